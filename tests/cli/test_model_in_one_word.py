# SPDX-License-Identifier: Apache-2.0
"""Every command that takes a workload also takes a workload and a size in one word."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from called_here import Run

from llmb.cli.main import ALIASES, COMMANDS, load_command

MODEL, TINY, H100 = "pretrain_llama3.1_8b", "pretrain_llama3.1_tiny", ("--gpu-type", "h100")
FINE_TUNING = "finetune_llama3_tiny"
CALLS = {
    "list": ("list", "-w", MODEL),
    "show": ("show", "-w", MODEL, *H100),
    "metrics": ("metrics", "-w", MODEL, *H100, "--scale", "8", "--step-time", "12.27"),
    "predict": ("predict", "-w", MODEL, *H100, "--scale", "8"),
    "plan": ("plan", "-w", MODEL, *H100, "--scale", "8", "--top", "1"),
    "memory": ("memory", "-w", TINY, *H100, "--scale", "2", "--rank", "2"),
    "run": ("run", "-w", TINY, "--gpu-type", "cpu", "--dry-run"),
    "submit": ("submit", "-w", MODEL, *H100, "--scale", "8", "--dry-run"),
    "single": ("single", "-w", MODEL, *H100, "--scale", "8", "--dry-run"),
    "bulk": ("bulk", "campaign.txt", "-w", MODEL, *H100, "--dry-run"),
    "runs": ("runs", "-w", MODEL),
    "jobs list": ("jobs", "list", "-w", MODEL),
    "jobs nodes": ("jobs", "nodes", "-w", MODEL),
    "checkpoint import": ("checkpoint", "import", "missing", "new", "-w", MODEL),
    "bench gemm": ("bench", "gemm", "-w", TINY, "--gpu-type", "cpu", "--mbs", "3"),
    "bench attention": ("bench", "attention", "-w", TINY, "--gpu-type", "cpu", "--mbs", "3"),
    "config show": ("config", "show", "-w", MODEL, "--json"),
    "prepare sample": ("prepare", "sample", "small", "-w", FINE_TUNING),
    "prepare dataset": ("prepare", "dataset", "-w", FINE_TUNING, "--source", "missing"),
    "prepare checkpoint": ("prepare", "checkpoint", "-w", FINE_TUNING, "--source", "missing"),
    "prepare verify": ("prepare", "verify", "-w", FINE_TUNING),
    "prepare submit": ("prepare", "submit", "-w", FINE_TUNING, "--skip-dataset", "--dry-run"),
}
FAILING = {
    "bench gemm": "is not divisible by MBS x DP = 3",
    "bench attention": "is not divisible by MBS x DP = 3",
    "checkpoint import": "missing",
    "memory": "the layout has ranks 0 to 1",
    "prepare dataset": "missing",
    "prepare checkpoint": "missing",
    "prepare verify": "not complete",
    "prepare submit": "the model of finetune_llama3 tiny is not on the hub",
}
"""What the commands say that end before they have done anything, but after the model was found."""
CAMPAIGN = "pretrain_llama3.1_8b:\n(bf16, [8], 1)\n\npretrain_llama3.1_70b:\n(bf16, [64], 1)\n"


def commands_with_a_workload() -> Iterator[str]:
    for name in set(COMMANDS) - {"install"}:  # which installs workloads, in all sizes
        command = load_command(name)
        parts = getattr(command, "commands", {})
        for path, part in ((f"{name} {key}", part) for key, part in parts.items()) if parts else ((name, command),):
            if any("--workload" in option.opts for option in part.params):
                yield path


def test_every_command_is_tried() -> None:
    elsewhere = {"prepare access"}  # asks the hub: tests/prepare/test_hub_access.py
    assert set(commands_with_a_workload()) == set(CALLS) - set(ALIASES) | elsewhere


@pytest.mark.parametrize("command", sorted(set(CALLS) - set(FAILING)))
def test_one_word_is_enough(command: str, llmb: Run, tmp_path: Path) -> None:
    (tmp_path / "campaign.txt").write_text(CAMPAIGN)
    result = llmb(*CALLS[command], code=0)
    assert "70b" not in result.stdout
    if command not in ("jobs list", "jobs nodes", "runs"):
        assert "8b" in result.stdout or "tiny" in result.stdout


@pytest.mark.parametrize("command", FAILING)
def test_one_word_leads_as_far_as_what_is_missing(command: str, llmb: Run) -> None:
    assert FAILING[command] in llmb(*CALLS[command]).stderr
    wrong = [word.replace("_8b", "_9b").replace("_tiny", "_9b") for word in CALLS[command]]
    assert "unknown size of " in llmb(*wrong, code=2).stderr
