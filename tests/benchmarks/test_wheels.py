# SPDX-License-Identifier: Apache-2.0
"""Packages that a comparison needs are carried as wheels where nothing can be installed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from benchmarks.engine.wheel_folder import closure, listed
from benchmarks.engine.wheels import BadWheelError, distributions_of, importable, main, unpack

ROOT = Path(__file__).resolve().parents[2]


def test_wheels_are_unpacked_where_nothing_can_be_installed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing/__init__.py", "answer = 42\n")
    with zipfile.ZipFile(wheels / "own_thing-2-py3-none-any.whl", "w") as archive:
        archive.writestr("own_thing/__init__.py", "")
    folder = unpack(wheels, {"own-thing"})
    assert unpack(wheels, {"own-thing"}) == folder
    assert not (folder / "own_thing").exists(), "it would come before the machine's own"
    assert distributions_of(wheels) == {"thing", "own-thing"}
    use = [sys.executable, "-c", "import thing, llmb; print(thing.answer)"]
    command = [sys.executable, "-m", "benchmarks.engine.wheels", str(wheels), *use]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    assert subprocess.check_output(command, text=True, cwd=ROOT, env=environ) == "42\n"


def test_wheels_are_not_unpacked_into_a_folder_of_somebody_else(tmp_path, monkeypatch) -> None:
    """The name can be foreseen, and what is in it would be run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    unpack(tmp_path, set())
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BadWheelError, match="belongs to another user: set TMPDIR"):
        unpack(tmp_path, set())


def test_a_wheel_that_is_not_complete_is_named(tmp_path) -> None:
    (tmp_path / "thing-1-py3-none-any.whl").write_bytes(b"PK")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.engine", "--check", "--wheels", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "thing-1-py3-none-any.whl is not a complete wheel" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_said_before_anything_is_imported() -> None:
    bare = [sys.executable, "-S", "-m", "benchmarks.engine"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(bare, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 3
    first, *rest = done.stderr.splitlines()
    assert first.startswith("packages: ")
    assert any(line.startswith("not measured: megatron-core, for want of ") for line in rest)
    assert "pydantic" in done.stderr and "--wheels FOLDER" in done.stderr
    assert "wheel_folder FOLDER" in done.stderr


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "slow_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("slow_package", "slow_package.inner", "slow_package.module", "slow_package.other", "no_package.module")
    assert [importable(name) for name in names] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("source", "said", "advice"),
    [
        ("from typing import not_there_yet\n", "cannot import name 'not_there_yet'", "another version"),
        ("import not_carried\n", "No module named 'not_carried'", "not_carried is one"),
    ],
)
def test_a_wheel_that_does_not_work_here_is_named(tmp_path, source, said, advice) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "pydantic-9-py3-none-any.whl", "w") as archive:
        archive.writestr("pydantic/__init__.py", source)
    for name in ("torch", "numpy", "typer", "rich", "yaml", "scipy"):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "__init__.py").touch()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "own"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-S", "-m", "benchmarks.engine", "--wheels", str(wheels)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 3
    assert f"pydantic cannot be imported: {said}" in done.stderr and advice in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_wheels_has_only_what_the_machine_lacks() -> None:
    needs = {"a": ["b>=1", "torch"], "b": ["c; python_version < '3.13'", "windows-only"], "c": [], "torch": ["cuda"],
             "cuda": []}  # fmt: skip
    known = [{"name": name, "version": "1", "requires_dist": found} for name, found in needs.items()]
    assert set(closure(["a==1"], known, {"torch"})) == {"a", "b", "c"}
    assert set(closure(["a"], known, {"torch", "b"})) == {"a"}
    printed = "Package Version\n------- -------\npydantic_core 2.1\ntyper==1\n"
    assert {"pydantic_core", "typer"} <= set(listed(printed))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: folder"),
        (["missing", "true"], "missing: no such folder"),
        (["."], "no command"),
        ([".", "no-such-program"], "no-such-program: No such file or directory"),
    ],
)
def test_a_command_that_cannot_run_with_wheels_is_refused(arguments, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
