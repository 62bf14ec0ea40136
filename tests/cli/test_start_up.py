# SPDX-License-Identifier: Apache-2.0
"""Commands that do not train never load torch, and the quick ones nothing that they have no use for."""

import subprocess
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data" / "root"
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


def test_a_run_with_a_record_is_judged_without_what_reads_logs() -> None:
    folder = next(RECORDED.glob("workloads/*/experiments/*gpus2*/*/*"))
    probe = PROBE.replace('{"torch",', '{"llmb.logs.files", "torch",')
    assert loaded(f"judge {folder}", probe=probe) == ["loaded: [] code: 6"]  # no other run to judge it by


def test_a_log_without_a_record_is_parsed_without_what_reads_records(tmp_path: Path) -> None:
    """Which takes longer to load than such a log to read."""
    log = tmp_path / "log-run.out"
    lines = [
        f"Training epoch 0, iteration {step}/4 | global_step: {step} | reduced_train_loss: 7 |"
        f" train_step_timing in s: 2.{step} | consumed_samples: 8"
        for step in range(5)
    ]
    log.write_text("\n".join(["begun", "the model", *lines, "done", ""]))
    heavy = '{"torch", "transformers", "llmb.runs.record", "llmb.catalogue.load", "rich.progress"}'
    probe = PROBE.replace('{"torch", "scipy", "transformers", "safetensors"}', heavy)
    assert loaded(f"parse {log} --window 2-3", probe=probe) == ["loaded: [] code: 0"]


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
