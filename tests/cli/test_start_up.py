# SPDX-License-Identifier: Apache-2.0
"""Commands that do not train never load torch, and the quick ones nothing that they have no use for."""

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import runpy, sys
try:
    runpy.run_module("llmb.cli.main", run_name="__main__", alter_sys=True)
except SystemExit as end:
    heavy = sorted(set(sys.modules) & {"torch", "numpy", "scipy", "transformers", "safetensors"})
    sys.stderr.write("loaded:" + ",".join(heavy) + f" code:{end.code}")
"""


def loaded(*arguments: str) -> str:
    """Heavy modules that a command loaded, and its exit code."""
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.rpartition("loaded:")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("list",),
        ("list", "--json"),
        ("checkpoint", "--help"),
        ("checkpoint", "export", "--help"),
        ("show", "-w", "pretrain_llama3.1", "-s", "8b"),
        ("metrics", "-w", "pretrain_llama3.1", "-s", "8b", "--step-time", "12.27"),
    ],
)
def test_quick_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert loaded(*arguments) == " code:0"


@pytest.mark.parametrize(
    "arguments",
    [("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--dry-run"), ("run", "--help")],
)
def test_even_a_run_is_planned_without_torch(arguments: tuple[str, ...]) -> None:
    modules, _, code = loaded(*arguments).partition(" code:")
    assert "torch" not in modules
    assert code == "0"


def test_the_probe_sees_torch_when_it_is_there() -> None:
    probe = PROBE.replace("import runpy, sys", "import runpy, sys, torch", 1)
    found = subprocess.run([sys.executable, "-c", probe, "--help"], capture_output=True, text=True, check=False)
    assert "torch" in found.stderr.rpartition("loaded:")[2]


def closed(streams: str, *words: str) -> "subprocess.CompletedProcess[str]":
    script = f'exec "$@" {streams}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "llmb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_closed_standard_output_is_an_error(tmp_path: Path) -> None:
    done = closed(">&-", "list")
    assert (done.returncode, "standard output is closed" in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr
    assert closed(">&- 2>&-", "list").returncode == 3


def test_messages_to_a_closed_stream_are_lost_alone(tmp_path: Path) -> None:
    done = closed("<&- 2>&-", "list")
    assert done.returncode == 0
    assert "pretrain_llama3.1" in done.stdout
    assert closed("2>&-", "list", "--nonsense").returncode == 2
