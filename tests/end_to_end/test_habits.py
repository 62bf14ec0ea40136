# SPDX-License-Identifier: Apache-2.0
"""What people try without reading the manual: places, names in any case or in one word, help, completion, files."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from called_here import Run

from llmb.cli.common import add_common_options
from llmb.cli.main import ALIASES, COMMANDS, app, as_spoken, exit_code_of, load_command
from llmb.cli.shared_options import COMPLETIONS
from llmb.runs import source_version

SHOWN = "show -w pretrain_llama3.1 -s 8b --dtype bf16 --scale 8 --gpu-type h100 --json"


@pytest.fixture
def printed(llmb: Run) -> Callable[[str], str]:
    return lambda line: llmb(*line.split(), code=0).stdout


@pytest.mark.parametrize(
    "line",
    [
        "show pretrain_llama3.1 8b --dtype bf16 --gpus 8 --gpu-type h100 --json",
        "show --json pretrain_llama3.1 -n 8 --dtype bf16 --gpu-type h100 8b",
        "show PRETRAIN_LLAMA3.1 8B --dtype BF16 --scale 8 --gpu-type H100 --json",
        "show pretrain_llama3.1_8b --dtype bf16 --gpus 8 --gpu-type h100 --json",
        "show pretrain_llama3.1 -s 8B --dtype Bf16 --gpus 8 --gpu-type h100 --json -v",
    ],
)
def test_a_recipe_is_named_in_many_ways(line: str, printed: Callable[[str], str]) -> None:
    assert printed(line) == printed(SHOWN)


def test_choices_are_taken_in_any_case(printed: Callable[[str], str]) -> None:
    line = "run pretrain_llama3.1 tiny --gpu-type CPU --recompute FULL --attention-backend Math --dry-run --json"
    plan = json.loads(printed(line))["plan"]
    assert (plan["recompute"], plan["attention_backend"]) == ("full", "math")


def test_a_campaign_takes_any_case_and_gpus(printed: Callable[[str], str]) -> None:
    line = "submit PRETRAIN_LLAMA3.1 8B,70b --dtype BF16,fp8 --gpus 64 --gpu-type H100 --dry-run --json"
    jobs = json.loads(printed(line))["jobs"]
    assert {(job["size"], job["dtype"]) for job in jobs} == {(s, d) for s in ("8b", "70b") for d in ("bf16", "fp8")}


def test_help_and_version_are_commands_too(printed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_version, "PATIENCE_S", 600)  # or git, late once, would tell less of the version then
    assert printed("version") == printed("--version")
    assert printed("help") == printed("--help")
    assert printed("help jobs wait") == printed("jobs wait --help")


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "llmb", "version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("llmb ")


@pytest.mark.parametrize("option", ["-v", "-q", "--json"])
def test_options_of_every_command_also_stand_before_it(option: str) -> None:
    assert as_spoken([option, "jobs", "list"]) == ["jobs", "list", option]
    assert as_spoken([option, "bench", "bisect", "--", "x"]) == ["bench", "bisect", option, "--", "x"]
    assert as_spoken([option, "--help"]) == [option, "--help"]


def test_a_command_is_not_quiet_and_verbose(llmb: Run) -> None:
    assert "--quiet and --verbose cannot be combined" in llmb("-v", "list", "-q", code=2).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(name: str) -> None:
    command = load_command(name)
    for one in (command, *getattr(command, "commands", {}).values()):
        assert "Example" in (one.help or ""), one.name


@pytest.mark.parametrize("wait_s", [0.02, 0.1, 0.2])
def test_an_interrupt_while_modules_load_shows_no_traceback(wait_s: float) -> None:
    code = "import os, signal, threading, time\nfrom llmb.__main__ import main\n"
    code += f"threading.Timer({wait_s}, os.kill, (os.getpid(), signal.SIGINT)).start()\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 130) and (done.returncode == 0 or "interrupted" in done.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_is_cut_and_the_long_one_has_every_option(
    name: str, printed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = load_command(name)
    for below in [name, *(f"{name} {child}" for child in getattr(command, "commands", {}))]:
        assert "…" not in printed(f"{below} --help")
    if hasattr(command, "commands"):
        assert printed(f"{name} --help-all") == printed(f"{name} --help")
    else:
        text = printed(f"{name} --help-all")
        assert "…" not in text
        for item in command.params:
            assert all(re.search(rf"(^|\s){re.escape(option)}\b", text) for option in item.opts if option[0] == "-")


def test_the_short_help_of_a_run_fits_two_screens(
    printed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short = printed("run --help")
    assert len(short.splitlines()) < 80
    for said in ("--steps", "--profile", "--help-all", "detected"):
        assert said in short
    assert "--first-stage-layers" not in short


def test_a_result_goes_to_a_file_and_nothing_else_anywhere(tmp_path: Path, llmb: Run) -> None:
    target = tmp_path / "list.json"
    assert llmb("list", "--json", "--output", target, code=0).stdout == ""
    assert json.loads(target.read_text())["workloads"]
    line = "submit pretrain_llama3.1 8b --gpu-type h100 --dry-run"
    assert "not specified" in llmb(*line.split(), code=0).stderr
    quiet = llmb(*line.split(), "-q", code=0)
    assert quiet.stderr == ""
    assert quiet.stdout.startswith("#!/bin/bash")


def test_a_failed_command_reports_its_error_though_quiet_and_leaves_the_file_of_its_result_alone(
    tmp_path: Path, llmb: Run
) -> None:
    target = tmp_path / "shown.txt"
    target.write_text("before")
    done = llmb("show", "pretrain_llama3.1", "7b", "--quiet", "--output", target, code=2)
    assert "unknown pretrain_llama3.1 size '7b'" in done.stderr
    assert (target.read_text(), list(tmp_path.iterdir())) == ("before", [target])


def test_the_file_of_a_result_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    """A device such as /dev/null must not be replaced, even by a user who may."""
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    assert exit_code_of(app, ["list", "--output", str(link)]) == 0
    assert link.is_symlink()
    assert "pretrain_llama3.1" in target.read_text()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert exit_code_of(app, ["list", "--output", str(pipe)]) == 0
        assert pipe.is_fifo()
        assert os.read(reader, 1 << 16).decode() == target.read_text()
    finally:
        os.close(reader)


def test_the_file_of_a_result_takes_any_bytes(tmp_path: Path) -> None:
    app = typer.Typer()

    @app.command()
    def log() -> None:
        sys.stdout.buffer.write(b"caf\xe9\n")

    command = typer.main.get_command(app)
    add_common_options(command)
    command(["--output", str(tmp_path / "log")], standalone_mode=False)
    assert (tmp_path / "log").read_bytes() == b"caf\xe9\n"


def test_the_complete_help_goes_through_a_pipe() -> None:
    """Standard output is then buffered, and the program ends without flushing it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "llmb", "list", "--help-all"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert "--workload" in printed


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("llmb run -w pretrain_q", 3, {"pretrain_qwen3"}),
        ("llmb run pretrain_qwen3 ", 3, {"0.6b", "8b", "30b", "235b", "tiny", "tiny-moe"}),
        ("llmb run -w pretrain_qwen3 -s ", 5, {"0.6b", "8b", "30b", "235b", "tiny", "tiny-moe"}),
        ("llmb show --dtype ", 3, {"fp32", "bf16", "fp8", "mxfp8", "nvfp4"}),
        ("llmb submit --gpu-type g", 3, {"gb200", "gb300"}),
        ("llmb pa", 1, {"parse"}),
    ],
)
def test_the_shell_completes_names(
    words: str, place: int, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"_LLMB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        exit_code_of(app, [])
    assert set(capsys.readouterr().out.split()) == offered


def test_every_option_that_names_a_recipe_or_runs_is_completed() -> None:
    assert set(COMPLETIONS) == {"workload", "size", "dtype", "gpu_type", "release", "label"}


def test_common_options_replace_none_of_a_command() -> None:
    for name in COMMANDS:
        command = load_command(name)
        for item in [command, *getattr(command, "commands", {}).values()]:
            names = [option.name for option in item.params]
            assert len(names) == len(set(names))


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
    "bench collectives": ("bench", "collectives", "--experts", "-w", TINY, "--gpu-type", "cpu"),
    "config show": ("config", "show", "-w", MODEL, "--json"),
    "parse": ("parse", "logs", "-w", MODEL),
    "judge": ("judge", "logs", "-w", MODEL),
    "report": ("report", "logs", "-w", MODEL),
    "prepare sample": ("prepare", "sample", "small", "-w", FINE_TUNING),
    "prepare dataset": ("prepare", "dataset", "-w", FINE_TUNING, "--source", "missing"),
    "prepare checkpoint": ("prepare", "checkpoint", "-w", FINE_TUNING, "--source", "missing"),
    "prepare verify": ("prepare", "verify", "-w", FINE_TUNING),
    "prepare submit": ("prepare", "submit", "-w", FINE_TUNING, "--skip-dataset", "--dry-run"),
}
FAILING = {
    "bench gemm": "is not divisible by MBS x DP = 3",
    "bench attention": "is not divisible by MBS x DP = 3",
    "bench collectives": "exchanges no tokens between experts, because the model has no experts",
    "checkpoint import": "missing",
    "memory": "the layout has ranks 0 to 1",
    "parse": "no such file or directory",
    "judge": "logs",
    "report": "logs",
    "prepare dataset": "missing",
    "prepare checkpoint": "missing",
    "prepare verify": "are incomplete",
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
    # The one asks the hub: tests/setup/prepare/test_hub_access.py. The other takes a minute: tests/cli/test_accept.py.
    elsewhere = {"prepare access", "accept"}
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
    assert " size '9b'" in llmb(*wrong, code=2).stderr
