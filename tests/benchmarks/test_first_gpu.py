# SPDX-License-Identifier: Apache-2.0
"""The steps for a first GPU: their commands are understood, their results are kept, resumed and shown."""

import shlex
import sys
from pathlib import Path

import pytest
from benchmarks.first_gpu import KEPT, Step, engine_digest, read_result, results_table, run_steps, steps_of
from typer.testing import CliRunner

from llmb.cli.main import app

RUNS = [step for gpus in (1, 8) for step in steps_of(gpus) if " run " in step.command]
OTHERS = [step for gpus in (1, 8) for step in steps_of(gpus) if " run " not in step.command]


@pytest.mark.parametrize("step", RUNS, ids=lambda step: step.name)
def test_every_run_is_accepted_on_a_gpu(step: Step) -> None:
    module, *words = shlex.split(step.command.removeprefix("-m "))
    assert module == "llmb.cli.main"
    gpu = [] if "--gpu-type" in words else ["--gpu-type", "h100"]
    result = CliRunner().invoke(app, [*words, *gpu, "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.name)
def test_every_other_command_has_its_options(step: Step) -> None:
    module, *words = shlex.split(step.command.removeprefix("-m "))
    options = [word for word in words if word.startswith("--")]
    if module == "llmb.cli.main":
        help_text = CliRunner().invoke(app, [*words[:2], "--help"], env={"COLUMNS": "200"}).output
        assert [option for option in options if option not in help_text] == []
    else:
        assert (
            module == "pytest"
            or (KEPT.parents[2] / f"{module.replace('.', '/')}").with_suffix(".py").exists()
            or (KEPT.parents[2] / module.replace(".", "/") / "__main__.py").exists()
        )


def test_calls_of_four_minutes_reach_every_step() -> None:
    assert max(step.limit_s for gpus in (1, 8) for step in steps_of(gpus)) + 10 <= 240
    assert len({step.name for gpus in (1, 8) for step in steps_of(gpus)}) == len(RUNS) + len(OTHERS)


def step(name: str, program: str, limit_s: float = 60) -> Step:
    return Step(name=name, question="?", limit_s=limit_s, command=f"-c {shlex.quote(program)}")


def test_results_are_kept_and_a_later_call_goes_on(tmp_path: Path) -> None:
    document = "import json; print(json.dumps({'result': {'step_time_s': {'mean': 1.25}, 'peak_memory_gib': 3.5}}))"
    steps = [step("good", document), step("bad", "import sys; print('why'); sys.exit(4)"), step("next", "print(1)")]
    first = list(run_steps(steps[:2], tmp_path, 200))
    assert [(result.status, result.exit_code) for result in first] == [("done", 0), ("failed", 4)]
    assert first[0].document == {"result": {"step_time_s": {"mean": 1.25}, "peak_memory_gib": 3.5}}
    assert "why" in first[1].output
    assert [result.step.name for result in run_steps(steps, tmp_path, 200)] == ["next"]
    assert [result.step.name for result in run_steps(steps, tmp_path, 200, again=["bad"])] == ["bad"]
    assert list(run_steps([step("long", "print(1)", limit_s=190)], tmp_path, 199)) == [], "it may not end in time"
    kept = read_result(tmp_path / "good.json")
    assert kept.engine_digest == engine_digest()
    assert kept.machine["python"] == sys.version.split()[0]
    table = results_table([tmp_path], engine_digest())
    assert "| good | done | 1.25 | 3.50 |" in table
    assert "changed since" not in table
    assert results_table([tmp_path], "another").count("changed since") == 3


def test_a_step_at_its_limit_ends_with_its_children_and_keeps_its_output(tmp_path: Path) -> None:
    wait = f"subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    child = f"import subprocess; print('began', flush=True); {wait}"
    (result,) = run_steps([step("slow", child, limit_s=3)], tmp_path, 200)
    assert (result.status, result.exit_code) == ("timed out", None)
    assert "began" in result.output


def test_only_code_counts_in_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('def double(x):\n    """Twice."""\n    return 2 * x\n')
    before = engine_digest(tmp_path)
    file.write_text('# Why.\ndef double(x):\n    """Return twice the value."""\n\n    return 2 * x\n')
    assert engine_digest(tmp_path) == before
    file.write_text("def double(x):\n    return 3 * x\n")
    assert engine_digest(tmp_path) != before


def test_what_is_kept_is_of_this_form() -> None:
    for path in KEPT.glob("*/*.json"):
        read_result(path)
