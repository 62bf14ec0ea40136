# SPDX-License-Identifier: Apache-2.0
"""README's commands run as they stand, in their order, in a fresh clone."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(sys.prefix)
GOOD_CODES = {"judge": (0, 6), "compare": (0, 6), "accept": (0, 6), "doctor": (0, 4)}
"""Exit codes that are an answer: a busy machine without published figures settles nothing, and may be unfit."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_readme_run_in_their_order(tmp_path: Path) -> None:
    """With this environment, where ``make demo`` would make another, and without ``accept``, which takes minutes."""
    folder = clone(tmp_path / "llmb")
    (folder / ".venv").symlink_to(ENVIRONMENT)
    (folder / ".venv" / ".run").touch()
    run_all(folder, tmp_path / "home", [line for line in commands() if "make" not in line and "accept" not in line])


@pytest.mark.measured
@pytest.mark.timeout(1800)
def test_the_commands_of_readme_run_after_make_demo_alone(tmp_path: Path) -> None:
    run_all(
        clone(tmp_path / "llmb"),
        tmp_path / "home",
        [f"make demo PYTHON={shlex.quote(sys.executable)}", *commands()[1:]],
    )


def run_all(folder: Path, home: Path, lines: list[str]) -> None:
    home.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LLMB_", "COV_", "PYTEST"))}
    failures = []
    for line in lines:
        words = shlex.split(line)
        done = subprocess.run(
            words,
            cwd=folder,
            env=environ | {"HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode not in GOOD_CODES.get(words[1], (0,)):
            failures.append(f"{line}: exit code {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}")
    assert not failures, "\n\n".join(failures)
