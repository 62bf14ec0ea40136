# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.engine.wheel_folder FOLDER``: wheels for a machine without network access.

pip finds what the packages need for that machine's Python; what the machine has already is left out with everything
that only it needs, so that a few MB remain. Standard library and pip only.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.wheels import PACKAGES, normal

DEFAULT = ("typer", "rich", "pydantic", "PyYAML", "scipy")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
ALWAYS = tuple(package.distribution for package in PACKAGES if package.distribution in ("torch", "numpy"))
"""A machine to compare engines on has them."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
MB = 1e6


def main() -> int:
    given = _parser().parse_intermixed_args()
    have = {normal(name) for name in (*ALWAYS, *(listed(given.have.read_text()) if given.have else ()))}
    target = ["--only-binary", ":all:", "--python-version", given.python]
    target += [word for platform in given.platform or PLATFORMS for word in ("--platform", platform)]
    packages = given.packages or list(DEFAULT)
    needed = closure(packages, solved(packages, target), have)
    if not needed:
        sys.stderr.write("nothing to prepare: the machine has everything\n")
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(given.folder), *target]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in needed.items())], check=True)
    files = sorted(given.folder.glob("*.whl"))
    total = sum(file.stat().st_size for file in files)
    sys.stdout.write("".join(f"{file.stat().st_size / MB:8.1f} MB  {file.name}\n" for file in files))
    sys.stdout.write(f"{total / MB:8.1f} MB  in all\n")
    return 0


def solved(packages: Iterable[str], target: Iterable[str]) -> list[dict[str, Any]]:
    """The metadata of every package that pip would install, as it reports it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--target", folder, *target, *packages]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def closure(packages: Iterable[str], known: Iterable[Mapping[str, Any]], have: set[str]) -> dict[str, str]:
    """Name and version of what ``packages`` need, without ``have`` and what only those need."""
    by_name = {normal(item["name"]): item for item in known}
    found: dict[str, str] = {}
    waiting = [*listed("\n".join(packages))]
    while waiting:
        name = normal(waiting.pop())
        if name in found or name in have or name not in by_name:
            continue
        found[name] = by_name[name]["version"]
        # A requirement that does not apply to the machine is not in pip's report.
        waiting += listed("\n".join(by_name[name].get("requires_dist") or ()))
    return found


def listed(text: str) -> list[str]:
    """The names in requirements or in the output of ``pip list``, one to a line; comments and rules are no names."""
    return [match[0] for line in text.splitlines() if (match := NAME.match(line.strip()))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.wheel_folder",
        description="Downloads wheels for a machine without network access, for --wheels of the comparison.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", help=f"what is missing there (default: {' '.join(DEFAULT)})")
    python = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("--python", default=python, help="the other machine's Python (default: %(default)s)")
    parser.add_argument("--platform", action="append", help=f"its platform (default: {', '.join(PLATFORMS)})")
    parser.add_argument("--have", type=Path, help="output of 'python3 -m pip list' there: what needs no wheel")
    return parser


if __name__ == "__main__":
    sys.exit(main())
