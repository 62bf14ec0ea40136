# SPDX-License-Identifier: Apache-2.0
"""Which triton scripts/setup.sh lets pip install, and what it says where there is no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/setup.sh"


def constraint(folder: Path) -> str:
    """With the packages of ``folder`` alone."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    definition = SCRIPT.read_text().split("triton_constraint() {", 1)[1].split("\n}\n", 1)[0]
    shell = f"triton_constraint() {{{definition}\n}}\ntriton_constraint {python}"
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        ["bash", "-c", shell], env=environ, capture_output=True, text=True, check=True
    ).stdout.strip()  # fmt: skip


def add(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


@pytest.mark.parametrize(
    ("torch", "requires", "expected"),
    [
        ("2.13.0+cpu", (), "triton==3.7.1"),
        ("2.11.0+cpu", (), "triton==3.6.0"),
        ("2.12.0", ('triton==3.7.0; platform_system == "Linux"',), "triton==3.7.0"),
        ("9.0.0+cpu", (), ""),
    ],
)
def test_the_triton_of_the_installed_torch(tmp_path, torch, requires, expected):
    add(tmp_path, "torch", torch, *requires)
    assert constraint(tmp_path) == expected


def test_an_installed_triton_stays(tmp_path):
    add(tmp_path, "torch", "2.13.0")
    add(tmp_path, "triton", "3.5.0+git1")
    assert constraint(tmp_path) == "triton==3.5.0+git1"


PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0-pip" "$3/bin/pip";;
"- ") exit 1;;
esac
"""
"""An interpreter without torch, whose environments have the pip that is beside it."""
PIP = """#!/bin/sh
case "$*" in *torch*) echo "$SAID"; exit 1;; esac
"""


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", 4),
        ("have no matching distributions available for your environment:\n    torch", 4),
        ("ERROR: No space left on device", 1),
    ],
)
def test_a_python_for_which_there_is_no_torch_is_told_from_a_failure(tmp_path, said, code):
    python = tmp_path / "python"
    for path, script in ((python, PYTHON), (tmp_path / "python-pip", PIP)):
        path.write_text(script)
        path.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python), "SAID": said}
    command = ["bash", SCRIPT, str(tmp_path / "venv"), ""]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert ("there is no torch" in done.stderr) is (code == 4)
