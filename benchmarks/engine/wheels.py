# SPDX-License-Identifier: Apache-2.0
"""Unpacks llmb's requirements from a folder of wheels if they cannot be installed. Standard library only."""

import hashlib
import os
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("typer", "rich", "pydantic", "yaml", "scipy")
ROOT = Path(__file__).parents[2]
ADVICE = """the benchmark needs these Python packages, which are not installed: {missing}
  do:    pip install typer rich pydantic PyYAML scipy
  or:    without network access, fill a folder on another machine, copy it and add --wheels FOLDER:
         pip download --only-binary :all: --python-version {version} --platform manylinux_2_28_x86_64 -d FOLDER \\
             typer rich pydantic PyYAML scipy
"""


def prepare(wheels: Path | None) -> str | None:
    """Makes llmb and its requirements importable, here and in child processes. Returns what is missing."""
    if wheels is not None:
        add_to_path(unpack(wheels))
    if find_spec("llmb") is None:
        add_to_path(ROOT / "src")
    add_to_path(ROOT)
    missing = [name for name in NEEDED if find_spec(name) is None]
    version = ".".join(map(str, sys.version_info[:2]))
    return ADVICE.format(missing=", ".join(missing), version=version) if missing else None


def unpack(wheels: Path) -> Path:
    """Unpacks all wheels of a folder once: a wheel is an archive of files in site-packages."""
    files = sorted(wheels.glob("*.whl"))
    names = " ".join(file.name for file in files)
    target = Path(tempfile.gettempdir()) / f"llmb-wheels-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    for file in files:
        if not (target / file.name).exists():
            with zipfile.ZipFile(file) as archive:
                archive.extractall(target)
            (target / file.name).touch()
    return target


def add_to_path(folder: Path) -> None:
    """Appended to the path, so that the machine's own packages take precedence."""
    sys.path.append(str(folder))
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (known, str(folder)) if part)
