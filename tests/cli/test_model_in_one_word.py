# SPDX-License-Identifier: Apache-2.0
"""Every command that takes a workload also takes a workload and a size in one word."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmb.cli.main import COMMANDS, app, load_command

MODEL, TINY, H100 = "pretrain_llama3.1_8b", "pretrain_llama3.1_tiny", ("--gpu-type", "h100")
CALLS = {
    "list": ("list", "-w", MODEL),
    "show": ("show", "-w", MODEL, *H100),
    "metrics": ("metrics", "-w", MODEL, *H100, "--scale", "8", "--step-time", "12.27"),
    "run": ("run", "-w", TINY, "--gpu-type", "cpu", "--dry-run"),
    "submit": ("submit", "-w", MODEL, *H100, "--scale", "8", "--dry-run"),
    "single": ("single", "-w", MODEL, *H100, "--scale", "8", "--dry-run"),
    "bulk": ("bulk", "campaign.txt", "-w", MODEL, *H100, "--dry-run"),
    "jobs list": ("jobs", "list", "-w", MODEL),
    "jobs nodes": ("jobs", "nodes", "-w", MODEL),
    "checkpoint import": ("checkpoint", "import", "missing", "new", "-w", MODEL),
}
CAMPAIGN = "pretrain_llama3.1_8b:\n(bf16, [8], 1)\n\npretrain_llama3.1_70b:\n(bf16, [64], 1)\n"


def commands_with_a_workload() -> Iterator[str]:
    for name in COMMANDS:
        command = load_command(name)
        parts = getattr(command, "commands", {})
        for path, part in ((f"{name} {key}", part) for key, part in parts.items()) if parts else ((name, command),):
            if any("--workload" in option.opts for option in part.params):
                yield path


def call(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, arguments, env={"LLMB_INSTALL": str(folder)})


def test_every_command_is_tried() -> None:
    assert set(commands_with_a_workload()) == set(CALLS)


@pytest.mark.parametrize("command", sorted(set(CALLS) - {"checkpoint import"}))
def test_one_word_is_enough(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "campaign.txt").write_text(CAMPAIGN)
    result = call(tmp_path, monkeypatch, *CALLS[command])
    assert result.exception is None, result.exception
    assert "70b" not in result.stdout
    if not command.startswith("jobs"):
        assert "8b" in result.stdout or "tiny" in result.stdout


def test_weights_are_imported_for_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the missing folder: the model was found."""
    error = call(tmp_path, monkeypatch, *CALLS["checkpoint import"]).exception
    assert "missing" in str(error)
    unknown = call(tmp_path, monkeypatch, *CALLS["checkpoint import"][:-1], "pretrain_llama3.1_9b").exception
    assert "unknown size of pretrain_llama3.1 '9b'" in str(unknown)


def test_a_list_is_of_that_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workload,) = json.loads(call(tmp_path, monkeypatch, "list", "-w", MODEL, "--json").stdout)["workloads"]
    assert list(workload["sizes"]) == ["8b"]


@pytest.mark.parametrize("command", ["show", "run", "metrics"])
def test_two_sizes_are_an_error(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = call(tmp_path, monkeypatch, *CALLS[command], "-s", "70b").exception
    assert "--size" in str(error)
    assert "70b" in str(error)
