# SPDX-License-Identifier: Apache-2.0
"""The requirement by which another Python gets the llmb that runs here."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import llmb

SOURCE = "pyproject.toml"


def llmb_requirement(extras: str, package: Path | None = None) -> str:
    """The folder of a source tree, the address that pip recorded, or a version of the index."""
    folder = (package or Path(llmb.__file__).resolve().parent).parents[1]
    if (folder / SOURCE).is_file():
        return str(folder)
    address = _address()
    return f"llmb[{extras}] @ {address}" if address else f"llmb[{extras}]=={llmb.__version__}"


def _address() -> str | None:
    """Where this llmb was installed from, if not from an index."""
    try:
        found = json.loads(distribution("llmb").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    address, commit = found.get("url"), found.get("vcs_info", {}).get("commit_id")
    if address and commit:
        return f"{found['vcs_info']['vcs']}+{address}@{commit}"
    return str(address) if address else None
