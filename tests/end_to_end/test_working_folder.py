# SPDX-License-Identifier: Apache-2.0
"""No Python that is started finds a user's modules in the working folder; a real run shows it in test_reachable.py."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmb
from llmb.nodes.doctor.checks.software import NO_WORKING_FOLDER, PROBE
from llmb.setup.install.python_environment import PROOF

SOURCE = Path(llmb.__file__).parent
POISON = ("numbers", "types", "random", "json", "ctypes", "socket", "selectors", "signal", "importlib")
WITHOUT = ("-P", "-I")
GUARDED = ("PROOF", "NO_WORKING_FOLDER + PROBE.read_text()")
"""Texts for interpreters that may be too old for -P, which leave the folder out themselves."""


def starts(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of each command that starts an interpreter with the working folder on its path."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        if not any(isinstance(item, ast.Constant) and item.value in ("-m", "-c") for item in node.elts):
            continue
        words = [item.value if isinstance(item, ast.Constant) else ast.unparse(item) for item in node.elts]
        for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
            if word == "-m" and before not in WITHOUT:
                yield node.lineno, ast.unparse(node)
            if word == "-c" and before not in (*WITHOUT, "sh", "bash") and after not in GUARDED:
                yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_every_start_leaves_the_working_folder_out() -> None:
    found = [(path.name, *start) for path in SOURCE.rglob("*.py") for start in starts(path.read_text())]
    assert found == []


def test_a_start_that_does_not_is_found() -> None:
    text = 'a = [sys.executable, "-m", X]\nb = (python, "-P", "-m", X)\nc = [python, "-c", TEXT]\nd = ["sh", "-c", X]\n'
    assert [line for line, _ in starts(text)] == [1, 3]


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    for name in POISON:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name}\\n')\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("text", [PROOF, NO_WORKING_FOLDER + PROBE.read_text()])
def test_an_older_interpreter_executes_nothing_there(poisoned: Path, text: str) -> None:
    assert subprocess.run([sys.executable, "-c", text], cwd=poisoned, capture_output=True, check=False).returncode == 0
    assert not (poisoned / "executed").exists()


def test_processes_that_read_logs_execute_nothing_there(poisoned: Path) -> None:
    for number in range(600):
        (poisoned / f"{number}.out").touch()
    llmb_as_installed = Path(sys.executable).with_name("llmb")
    command = [llmb_as_installed, "parse", ".", "--jobs", "2", "--json"]
    done = subprocess.run(command, cwd=poisoned, capture_output=True, text=True, check=False)
    assert "599.out" in done.stdout, done.stderr
    assert not (poisoned / "executed").exists()
