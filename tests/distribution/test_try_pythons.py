# SPDX-License-Identifier: Apache-2.0
"""Which of a machine's Pythons the quick tests are run with, beside the one of the whole suite."""

import json
import os
import sys
from pathlib import Path

import pytest
from try_pythons import chosen, closed_folder, promised, pythons


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
