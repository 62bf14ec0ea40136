# SPDX-License-Identifier: Apache-2.0
"""Commands that do not train never load torch, and the quick ones nothing that they have no use for."""

import subprocess
import sys

PROBE = """
import sys
from llmb.cli.main import app, exit_code_of
for line in sys.argv[1:]:
    code = exit_code_of(app, line.split())
    heavy = sorted(set(sys.modules) & {"torch", "scipy", "transformers", "safetensors"})
    sys.stderr.write(f"loaded: {heavy} code: {code}\\n")
"""
QUICK = (
    "--help",
    "list",
    "list --json",
    "checkpoint --help",
    "checkpoint export --help",
    "show -w pretrain_llama3.1 -s 8b",
    "metrics -w pretrain_llama3.1 -s 8b --step-time 12.27",
)
PLANNED = ("run -w pretrain_llama3.1 -s tiny --gpu-type cpu --dry-run", "run --help")


def loaded(*lines: str, probe: str = PROBE) -> list[str]:
    """Heavy modules that are there after each of the commands, and its exit code."""
    done = subprocess.run([sys.executable, "-c", probe, *lines], capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if line.startswith("loaded: ")]


def test_quick_commands_load_nothing_heavy() -> None:
    assert loaded(*QUICK) == ["loaded: [] code: 0"] * len(QUICK)


def test_even_a_run_is_planned_without_torch() -> None:
    found = loaded(*PLANNED)
    assert len(found) == len(PLANNED)
    assert all("torch" not in line and line.endswith("code: 0") for line in found)


def test_the_probe_sees_what_is_there() -> None:
    assert loaded("list", probe=f"import scipy\n{PROBE}") == ["loaded: ['scipy'] code: 0"]


def test_help_loads_no_records() -> None:
    probe = PROBE.replace('{"torch",', '{"pydantic", "yaml", "importlib.metadata", "torch",')
    assert loaded("--help", probe=probe) == ["loaded: [] code: 0"]


def closed(streams: str, *words: str) -> "subprocess.CompletedProcess[str]":
    script = f'exec "$@" {streams}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "llmb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_closed_standard_output_is_an_error() -> None:
    done = closed(">&-", "list")
    assert (done.returncode, "standard output is closed" in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr
    assert closed(">&- 2>&-", "list").returncode == 3


def test_messages_to_a_closed_stream_are_lost_alone() -> None:
    done = closed("<&- 2>&-", "list")
    assert done.returncode == 0
    assert "pretrain_llama3.1" in done.stdout
    assert closed("2>&-", "list", "--nonsense").returncode == 2
