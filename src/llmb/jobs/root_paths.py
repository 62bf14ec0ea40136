# SPDX-License-Identifier: Apache-2.0
"""Folders as the history stores them: relative to its install root, which may be moved or copied."""

from pathlib import Path

from llmb.prepared.folders import WORKLOADS


def stored(root: Path, folder: str) -> str:
    """``folder`` relative to ``root``; unchanged if it is not below it."""
    path = Path(folder)
    return str(path.relative_to(root)) if path.is_relative_to(root) else folder


def resolved(root: Path, folder: str) -> str:
    """The folder that is stored as ``folder``: what is not below the root is stored absolute."""
    return str(root / folder)


def stored_of_earlier(root: Path, folder: str) -> str:
    """``folder`` as it is stored now. Earlier versions stored the absolute path, when the root may have been elsewhere.

    A folder of the same name below this root is taken for it: the run itself in a moved root, its copy in a copied one.
    """
    parts = Path(folder).parts
    below = (Path(*parts[place:]) for place, part in enumerate(parts) if part == WORKLOADS)
    here = next((path for path in below if (root / path).is_dir()), None)
    return str(here) if here else stored(root, folder)
