# SPDX-License-Identifier: Apache-2.0
"""The packages that the comparison needs: which are missing, and wheels of them where nothing can be installed.

Standard library only: it runs before any of them is known to be there. ``python -m benchmarks.engine.wheels FOLDER
COMMAND...`` runs any command with the wheels of a folder.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """``module`` is imported from ``distribution``; ``needed_by`` is None if nothing runs without it."""

    distribution: str
    module: str
    needed_by: str | None = None


PACKAGES = (
    Package("torch", "torch"),
    Package("numpy", "numpy"),
    Package("typer", "typer"),
    Package("rich", "rich"),
    Package("pydantic", "pydantic"),
    Package("PyYAML", "yaml"),
    Package("ruamel.yaml", "ruamel.yaml"),
    Package("scipy", "scipy"),
    Package("transformers", "transformers", "huggingface"),
    Package("torchao", "torchao", "other engines in fp8"),
    Package("torchtitan", "torchtitan", "torchtitan"),
    Package("torchdata", "torchdata", "torchtitan"),
    Package("datasets", "datasets", "torchtitan"),
    Package("tyro", "tyro", "torchtitan"),
    Package("megatron-core", "megatron.core", "megatron-core"),
    Package("transformer-engine", "transformer_engine", "megatron-core"),
)
ROOT = Path(__file__).parents[2]
ADVICE = """these Python packages are needed and not installed: {missing}
  do:    pip install {missing}
  or:    without network access, prepare a folder of wheels on another machine, copy it and add --wheels FOLDER:
         python -m benchmarks.engine.wheel_folder FOLDER --python {version} {missing}
"""


QUICK = ("typer", "rich", "pydantic", "yaml")
"""Imported in a moment."""
ITS_NEED = "prepare the wheels again, without packages that the machine lacks in the list of --have: {} is one"
OTHER_VERSION = "prepare a wheel of another version: one that works with the packages of this machine"


class BadWheelError(Exception):
    """A file that was copied only in part, or is something else."""


class Found(NamedTuple):
    """What is installed: version by distribution, and what is not."""

    versions: dict[str, str]
    carried: frozenset[str]
    """Distributions that come from wheels."""
    missing: tuple[Package, ...]
    folder: Path | None
    """Where wheels are unpacked."""

    def lines(self) -> str:
        """What is there and what is not, and what is not measured for that reason."""
        there = [f"{name} {known}{' (wheel)' if name in self.carried else ''}" for name, known in self.versions.items()]
        text = f"packages: {', '.join(there)}\n"
        if self.folder:
            text += f"wheels are unpacked in {self.folder}\n"
        for reason in dict.fromkeys(package.needed_by for package in self.missing if package.needed_by):
            names = ", ".join(package.distribution for package in self.missing if package.needed_by == reason)
            text += f"not measured: {reason}, for want of {names}\n"
        return text

    def problem(self) -> str | None:
        """Why nothing can run; None if it can, as far as can be seen without importing torch."""
        names = " ".join(package.distribution for package in self.missing if package.needed_by is None)
        python = ".".join(map(str, sys.version_info[:2]))
        return ADVICE.format(missing=names, version=python) if names else broken()


def broken() -> str | None:
    """What is there and cannot be imported, such as a wheel that needs a newer version of a package of the machine."""
    for package in PACKAGES:
        if package.module in QUICK:
            try:
                import_module(package.module)
            except ModuleNotFoundError as error:
                return f"{package.distribution} cannot be imported: {error}\n  do:    {ITS_NEED.format(error.name)}\n"
            except ImportError as error:
                return f"{package.distribution} cannot be imported: {error}\n  do:    {OTHER_VERSION}\n"
    return None


def prepare(wheels: Path | None) -> Found:
    """Makes llmb and what it needs importable, here and in child processes."""
    own = {name for name in distributions_of(wheels) if installed(name)} if wheels else set()
    folder = unpack(wheels, own) if wheels else None
    if folder:
        add_to_path(folder)
    if find_spec("llmb") is None:
        add_to_path(ROOT / "src")
    add_to_path(ROOT)
    there = [package for package in PACKAGES if importable(package.module)]
    versions = {package.distribution: installed(package.distribution) or "?" for package in there}
    unpacked = frozenset(
        package.distribution
        for package in there
        if wheels and normal(package.distribution) in distributions_of(wheels) - own
    )
    return Found(versions, unpacked, tuple(package for package in PACKAGES if package not in there), folder)


def distributions_of(wheels: Path) -> set[str]:
    return {normal(file.name.split("-")[0]) for file in wheels.glob("*.whl")}


def normal(name: str) -> str:
    """The name by which a package is known, however it is spelled."""
    return name.lower().replace("_", "-").replace(".", "-")


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Found without importing the package that it is in: that may import torch, which takes seconds."""
    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
    return not parts or any(path.is_dir() or path.with_suffix(".py").is_file() for path in folders)


def unpack(wheels: Path, own: set[str]) -> Path:
    """Unpacks the wheels of a folder once, but for packages that the machine has: a wheel is an archive of files.

    The folder is on PYTHONPATH, which comes before the machine's own packages: what is in it replaces them.
    Raises BadWheelError.
    """
    files = [file for file in sorted(wheels.glob("*.whl")) if normal(file.name.split("-")[0]) not in own]
    names = " ".join([sys.executable, *(file.name for file in files)])
    target = Path(tempfile.gettempdir()) / f"llmb-wheels-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.lstat().st_uid != os.getuid():
        # What is in it would be run.
        raise BadWheelError(f"{target} belongs to another user: set TMPDIR to a folder of your own")
    for file in files:
        if not (target / file.name).exists():
            try:
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(target)
            except zipfile.BadZipFile as error:
                raise BadWheelError(f"{file} is not a complete wheel: {error}") from error
            (target / file.name).touch()
    return target


def add_to_path(folder: Path) -> None:
    sys.path.append(str(folder))
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (known, str(folder)) if part)


def main(arguments: Sequence[str]) -> None:
    """Becomes the command. Exits with 2 if there is none, or no folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.wheels", description="Runs a command with the wheels of a folder."
    )
    parser.add_argument("folder", type=Path, help="with wheels; nothing is installed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for example python3 -m pytest -m gpu")
    given = parser.parse_args(arguments)
    if not given.folder.is_dir():
        parser.error(f"{given.folder}: no such folder")
    if not given.command:
        parser.error("no command")
    try:
        prepare(given.folder)
        os.execvp(given.command[0], given.command)
    except BadWheelError as error:
        parser.error(f"{error}; copy it again")
    except OSError as error:
        parser.error(f"{given.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
