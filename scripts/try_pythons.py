# SPDX-License-Identifier: Apache-2.0
"""Runs the quick tests with the oldest and the newest Python that is here and promised, but for that of the caller.

``install`` makes for each a clone of the last commit and its environment in FOLDER, where ``test`` finds them. Called
by root, both act as an ordinary user, whom ``install`` adds: the tests have to pass without the rights of root, too.
"""

import argparse
import json
import os
import pwd
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIER = "Programming Language :: Python :: 3."
USER = "llmb-tests"
MARKS = "not slow and not measured and not slurm"
NO_TORCH = 4
"""The exit code of scripts/setup.sh where there is no torch for a Python."""
ASKED = (
    "import ensurepip, json, sys; print(json.dumps([sys.version_info[:3], sys.implementation.name, sys.base_prefix]))"
)
SHOWN = 'mkdir -p "$1" && mount --bind "$2" "$1" && mount --rbind "$3" "$4" && shift 4 && exec "$@"'
"""Mounts what root alone may open where it is, so that others may."""

Version = tuple[int, int, int]


class Python(NamedTuple):
    version: Version
    program: str
    prefix: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def promised() -> set[int]:
    """The minor versions that pyproject.toml names."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return {int(one.removeprefix(CLASSIFIER)) for one in named if one.startswith(CLASSIFIER)}


def candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Interpreters on the PATH, and those of pyenv."""
    for folder in environ.get("PATH", "").split(os.pathsep):
        yield from (found for found in Path(folder).glob("python3.*") if re.fullmatch(r"python3\.\d+", found.name))
    yield from Path(environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin/python3")


def ask(program: Path) -> Python | None:
    """None for what is not CPython, cannot make environments, or fails, as pyenv does for a version that is missing."""
    try:
        done = subprocess.run([program, "-c", ASKED], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    version, implementation, prefix = json.loads(done.stdout)
    return Python(tuple(version), str(program), prefix) if implementation == "cpython" else None


def pythons(environ: Mapping[str, str]) -> list[Python]:
    """Return the versions that are promised and here, each once, the oldest first."""
    found = filter(None, map(ask, candidates(environ)))
    return sorted({one.version: one for one in found if one.version[1] in promised()}.values())


def chosen(here: Sequence[Python], own: Version) -> list[Python]:
    """The oldest and the newest, but for those of the minor version that is tried anyway."""
    return [one for one in dict.fromkeys((here[0], here[-1])) if one.version[:2] != own[:2]] if here else []


def closed_folder(path: Path) -> Path | None:
    """The first folder on the way to ``path`` that others may not pass."""
    return next((each for each in (*reversed(path.parents), path) if not each.stat().st_mode & 0o001), None)


class Place:
    """The clone and the environment of one Python, and how programs are started there."""

    def __init__(self, folder: Path, python: Python) -> None:
        self.python, self.folder = python, folder / python.name
        self.clone, self.installed = self.folder / "llmb", self.folder / "installed"

    def install(self) -> int:
        """The exit code of scripts/setup.sh."""
        self.folder.mkdir(parents=True)
        for folder in (self.folder.parent, self.folder):
            folder.chmod(0o755)
        # Not --local: the copies of hard links would change their owner with them.
        source = f"file://{ROOT}"
        subprocess.run(["git", "-c", "safe.directory=*", "clone", "-q", source, self.clone], check=True)  # noqa: S607
        if os.geteuid() == 0:
            make_user()
            subprocess.run(["chown", "-R", f"{USER}:", self.folder], check=True)  # noqa: S607
        return self.run({"PYTHON": self.python.program, "PIP_NO_COMPILE": "0"}, "scripts/setup.sh", ".venv", "test")

    def test(self) -> int:
        """The exit code of the tests, but for those on Slurm, which is the same with each Python."""
        self.run({}, "touch", ".venv/.run", ".venv/.dev")
        return self.run({}, "make", "test", f"MARKS={MARKS}", f"WORKERS={os.cpu_count()}")

    def run(self, variables: Mapping[str, str], *command: str) -> int:
        environ = {name: value for name, value in os.environ.items() if name not in ("LLMB_REQUIRE", "MAKEFLAGS")}
        if os.geteuid() == 0:
            environ |= {"HOME": str(self.folder), "USER": USER, "LOGNAME": USER}
        words = [*self.as_user(), "env", *(f"{name}={value}" for name, value in variables.items()), *command]
        return subprocess.run(words, cwd=self.clone, env=environ, stdin=subprocess.DEVNULL, check=False).returncode

    def as_user(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups"]
        closed = closed_folder(Path(self.python.prefix))
        if closed is None:
            return user
        first = closed / Path(self.python.prefix).relative_to(closed).parts[0]
        view = self.folder / "view"
        mounts = [str(view / first.name), str(first), str(view), str(closed)]
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", SHOWN, "sh", *mounts, *user]


def make_user() -> None:
    if USER not in {entry.pw_name for entry in pwd.getpwall()}:
        subprocess.run(["useradd", "--system", "--user-group", "--shell=/bin/sh", USER], check=True)  # noqa: S607


def say(text: str) -> None:
    print(f"pythons: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["install", "test"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    here, own = pythons(os.environ), sys.version_info[:3]
    say(f"here are {', '.join(one.name for one in here) or 'none'}; {'.'.join(map(str, own))} is tried anyway")
    places = [Place(given.folder.absolute(), python) for python in chosen(here, own)]
    return install_all(places) if given.action == "install" else test_all(places)


def install_all(places: Sequence[Place]) -> int:
    for place in places:
        code = place.install()
        if code == NO_TORCH:
            say(f"{place.python.name} is not tried: there is no torch for it")
        elif code:
            say(f"no environment could be made with {place.python.name}")
            return 1
        else:
            place.installed.touch()
    return 0


def test_all(places: Sequence[Place]) -> int:
    failed = [place.python.name for place in places if place.installed.exists() and place.test()]
    tried = [place.python.name for place in places if place.installed.exists()]
    say(f"the quick tests were run with {', '.join(tried) or 'no other Python'}: {', '.join(failed) or 'none'} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
