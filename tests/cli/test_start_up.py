# SPDX-License-Identifier: Apache-2.0
"""Commands that do not train never load torch."""

import subprocess
import sys

import pytest

PROBE = """
import os, runpy, sys
def leave(code):
    heavy = sorted(set(sys.modules) & {"torch", "numpy", "scipy", "transformers", "safetensors"})
    sys.stderr.write("loaded:" + ",".join(heavy) + f" code:{code}")
    sys.stderr.flush()
    os.kill(os.getpid(), 9)
os._exit = leave
runpy.run_module("llmb.cli.main", run_name="__main__", alter_sys=True)
"""


def loaded(*arguments: str) -> str:
    """Heavy modules that a command loaded, and its exit code, taken the moment it leaves."""
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
    probe = PROBE.replace("import os, runpy, sys", "import os, runpy, sys, torch", 1)
    found = subprocess.run([sys.executable, "-c", probe, "--help"], capture_output=True, text=True, check=False)
    assert "torch" in found.stderr.rpartition("loaded:")[2]
