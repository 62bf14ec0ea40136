# SPDX-License-Identifier: Apache-2.0
"""Scripts: which triton setup.sh installs, what the Containerfile asks of its base, which Pythons are tried."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from try_pythons import chosen, closed_folder, promised, pythons

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


@pytest.mark.parametrize(("first", "python", "code"), [("--help", sys.executable, 2), ("venv", "python9", 3)])
def test_a_wrong_argument_makes_no_environment(tmp_path, first, python, code):
    done = subprocess.run(["bash", SCRIPT, first], cwd=tmp_path, env={**os.environ, "PYTHON": python}, check=False)
    assert (done.returncode, [*tmp_path.iterdir()]) == (code, [])


def test_the_torch_of_a_virtual_environment_is_used(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    makes = 'mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$0-pip" "$4/bin/pip"'
    script = f'#!/bin/sh\ncase "$1 $2" in\n"-m venv") {makes};;\n"-c "*) echo {packages};;\nesac\n'
    for name, text in {"python": script, "python-pip": '#!/bin/sh\necho "$@" >>"$0.called"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PYTHON": "./python"}
    done = subprocess.run(
        ["bash", SCRIPT, "venv"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert "its torch is used" in done.stderr
    assert (packages / "outer.pth").read_text() == f"{packages}\n"
    assert "torch" not in (tmp_path / "venv" / "bin" / "pip.called").read_text()


CONTAINERFILE = Path(__file__).resolve().parents[2] / "Containerfile"


@pytest.mark.parametrize(
    ("version", "kept"), [("2.10.0a0+b4e4ee81d3", False), ("2.11.0a0", True), ("2.12.0a0+1.nv26", True), ("3.0", True)]
)
def test_a_torch_of_the_base_that_is_too_old_ends_the_build(tmp_path: Path, version: str, kept: bool) -> None:
    (check,) = re.findall(r'python -c "([^"]*torch\.__version__[^"]*)"', CONTAINERFILE.read_text())
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) is kept
    assert kept or version in done.stderr


def put(folder: Path, name: str, version: tuple[int, ...] | None, implementation: str = "cpython") -> None:
    """An interpreter that only says what it is; without ``version`` one that fails, as stand-ins of pyenv do."""
    said = json.dumps([version, implementation, str(folder)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\nexit 127\n" if version is None else f"#!/bin/sh\necho '{said}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    on_path, of_pyenv = tmp_path / "bin", tmp_path / "pyenv"
    put(on_path, "python3.9", (3, 9, 2))
    put(on_path, "python3.11", (3, 11, 2))
    put(on_path, "python3.11-config", (3, 11, 1))
    put(on_path, "python3.12", None)
    put(of_pyenv / "versions" / "pypy" / "bin", "python3", (3, 11, 3), "pypy")
    put(of_pyenv / "versions" / "3.12.1" / "bin", "python3", (3, 12, 1))
    put(of_pyenv / "versions" / "3.13.0" / "bin", "python3", (3, 13, 0))
    put(of_pyenv / "versions" / "3.99.0" / "bin", "python3", (3, 99, 0))
    return {"PATH": f"{on_path}{os.pathsep}{tmp_path / 'nowhere'}", "PYENV_ROOT": str(of_pyenv)}


def test_the_oldest_and_the_newest_that_are_promised_are_tried(environ: dict[str, str]) -> None:
    here = pythons(environ)
    assert [one.name for one in here] == ["3.11.2", "3.12.1", "3.13.0"]
    assert [one.name for one in chosen(here, (3, 12, 4))] == ["3.11.2", "3.13.0"]
    assert [one.name for one in chosen(here, (3, 11, 7))] == ["3.13.0"]
    assert chosen(here[:1], (3, 11, 7)) == chosen([], (3, 11, 7)) == []


def test_the_python_of_these_tests_is_promised_and_found() -> None:
    assert sys.version_info.minor in promised()
    environ = {"PATH": str(Path(sys.base_prefix) / "bin"), "PYENV_ROOT": "/nowhere"}
    assert sys.version_info[:3] in [one.version for one in pythons(environ)]


def test_a_folder_of_root_alone_is_found_on_the_way(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "own" / "versions" / "3.13.0").mkdir(parents=True)
    (tmp_path / "own").chmod(0o700)
    found = closed_folder(tmp_path / "own" / "versions" / "3.13.0")
    assert found is not None
    assert found in (tmp_path / "own", *tmp_path.parents)
    assert closed_folder(Path("/usr/bin")) is None
