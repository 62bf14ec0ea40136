# SPDX-License-Identifier: Apache-2.0
"""Programs of the system that hang, print without end or print nonsense, and the commands that ask them."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.base import tools
from llmb.base.parent_death import has_ended
from llmb.base.tools import ask_program
from llmb.cli.main import app, exit_code_of

TOOLS = (
    *("nvidia-smi", "sinfo", "squeue", "sacct", "sacctmgr", "scontrol", "sbatch", "scancel", "apptainer"),
    *("singularity", "enroot", "uv", "conda", "git", "ibstat", "ibv_devinfo", "lscpu", "nsys", "df", "findmnt"),
    *("ip", "getent", "nvidia-ctk", "systemctl", "timedatectl", "chronyc", "lspci", "ps", "module"),
)
HOSTILE = {
    "endless": "exec /usr/bin/yes 'NVIDIA H100 80GB HBM3, 12345'",
    "silent": "trap '' TERM\n/bin/sleep 600 &\nwhile :; do /bin/sleep 600; done",
    "binary": r"printf '\377\376\000\001\r\n\033[2J\200,\037\000|=\n'",
    "empty": "exit 0",
    "digits": "/usr/bin/head -c 1000000 /dev/zero | /usr/bin/tr '\\0' 9",
    "failing": "/usr/bin/head -c 100000 /dev/zero | /usr/bin/tr '\\0' '=' >&2; exit 1",
}
COMMANDS = (
    ("doctor", "--json", "--only", "gpu,cpu,memory,kernel,limits,network,scheduler,container,clock"),
    ("jobs", "list"),
    ("jobs", "refresh"),
    ("jobs", "nodes"),
    ("config", "show"),
    ("install", "--dry-run", "--yes"),
    ("submit", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "8", "-A", "a", "-p", "b"),
    ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--dry-run"),
    ("--version",),
)
LIMIT_S = 600
MOST_KB = 300_000


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LONGEST_S": 0.3, "GRACE_S": 0.1, "MOST_BYTES": 2**20}.items():
        monkeypatch.setattr(tools, name, value)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_command_hangs_or_breaks(
    tmp_path: Path,
    kind: str,
    program: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "install"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in TOOLS:
        program(name, HOSTILE[kind])
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in COMMANDS:
        start_s = time.monotonic()
        code = exit_code_of(app, list(command))
        said = capsys.readouterr().err
        assert code in (0, 2, 3, 4, 7), (command, code, said)
        assert "Traceback" not in said and "internal" not in said, (command, said)
        assert time.monotonic() - start_s < LIMIT_S, command
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MOST_KB


def test_a_number_without_end_is_not_used_of_a_program_that_is_ended_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns for versions would take an hour to search it."""
    monkeypatch.setattr(tools, "GRACE_S", 0.1)
    said = ask_program(["sh", "-c", f"{HOSTILE['digits']}; exec sleep 600"], 1.0)
    assert (said.text, said.errors, said.timed_out) == ("", "", True)


@pytest.mark.parametrize(
    ("script", "limits_s", "code"),
    [("trap '' TERM; sleep 600 & echo $!; wait; wait", (0.3, 3.0, 30.0), None), ("sleep 600 & echo $!", (60.0,), 0)],
    ids=["it ignores the request to end", "its parent succeeds"],
)
def test_what_a_program_started_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, script: str, limits_s: tuple[float, ...], code: int | None
) -> None:
    for limit_s in limits_s:  # on a busy machine it may be ended before it has said anything
        monkeypatch.setattr(tools, "LONGEST_S", limit_s)
        said = ask_program(["sh", "-c", script], 60)
        if said.text:
            break
    assert said.code == code
    end_s = time.monotonic() + LIMIT_S
    while not has_ended(int(said.text)):
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.usefixtures("limits")
def test_endless_output_is_cut_off_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "LONGEST_S", 60)
    said = ask_program(["yes"], 60)
    assert (said.text, said.problem) == ("", "yes printed more than 1 MiB, and was ended")
    errors = ask_program(["sh", "-c", "yes >&2"], 60)
    assert errors.problem == "sh printed more than 1 MiB, and was ended"


def test_what_it_prints_and_how_it_ends_are_told() -> None:
    whole = ask_program(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo no >&2"], 60)
    assert (len(whole.text), whole.errors, whole.code, whole.problem) == (3_000_000, "no\n", 0, None)
    assert ask_program(["sh", "-c", "echo a >&2; exit 3"], 60).problem == "sh: a"
    missing = ask_program(["no-such-program"], 60)
    assert (missing.problem, missing.not_here) == ("no-such-program was not found", True)
    assert ask_program(["a\0b"], 60).problem
    closed = ask_program(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 5"], 60)
    assert closed.code == 5
    killed = ask_program(["sh", "-c", f"kill -{signal.SIGKILL.value} $$"], 60)
    assert killed.code == -signal.SIGKILL
    reading, writing = os.pipe()
    assert ask_program(["sh", "-c", f"test -p /dev/fd/{writing} && echo held"], 60, held=(writing,)).text == "held\n"
    os.close(reading)
    os.close(writing)
