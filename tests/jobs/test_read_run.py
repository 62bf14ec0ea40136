# SPDX-License-Identifier: Apache-2.0
"""What is known of a log's run: from the record beside it, or from the log alone."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from llmb.jobs.read_run import in_other_window, parsed_run, read_folder, recorded_run
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record, short_id

ROOT = Path(__file__).parents[1] / "data" / "root" / "workloads"
EXPERIMENT = "pretrain_llama3.1_tiny_fp32_gpus1_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of three steps, in the folder of its run."""
    (metrics,) = ROOT.rglob(f"{EXPERIMENT}_1795298748/*/metrics.jsonl")
    folder = tmp_path / f"{EXPERIMENT}_1795298748" / EXPERIMENT
    shutil.copytree(metrics.parent, folder)
    return folder / f"log-{EXPERIMENT}.out"


def record(log: Path, **changes: Any) -> None:
    path = log.parent / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def exact_times(log: Path) -> tuple[float, ...]:
    lines = (log.parent / "metrics.jsonl").read_text().splitlines()
    return tuple(json.loads(line)["step_time_s"] for line in lines)


def mean(run: AnalyzedRun) -> float:
    assert run.outcome.step_time_s
    return run.outcome.step_time_s.mean


def test_the_figures_are_those_of_the_steps_in_full_precision(log: Path) -> None:
    run = parsed_run(log, "1-2")
    assert (run.figures, run.outcome.status) == ("exact", "success")
    assert run.outcome.step_times_s == exact_times(log)[1:]
    assert mean(run) == pytest.approx(sum(exact_times(log)[1:]) / 2, rel=1e-12)
    (log.parent / "metrics.jsonl").unlink()
    rounded = parsed_run(log, "1-2")
    assert rounded.figures == "rounded"
    assert mean(rounded) != mean(run)
    assert mean(rounded) == pytest.approx(mean(run), rel=1e-3)


@pytest.mark.parametrize("damage", ["", '{"step": 0}\n{"step": 1}\n', '{"profiled"'])
def test_steps_that_are_missing_or_damaged_leave_the_figures_of_the_log(log: Path, damage: str) -> None:
    (log.parent / "metrics.jsonl").write_text(damage)
    assert parsed_run(log, "1-2").figures == "rounded"


def profile_steps(log: Path, *numbers: int) -> None:
    """Steps that follow each other, as planned."""
    plan = json.loads((log.parent / "run.json").read_text())["plan"]
    profile = {"profiler": "torch", "first_step": numbers[0], "stop_step": numbers[-1] + 1, "ranks": [0]}
    record(log, plan=plan | {"profile": profile})
    path = log.parent / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for number in numbers:
        assert '"profiled": false' in lines[number]
        lines[number] = lines[number].replace('"profiled": false', '"profiled": true')
    path.write_text("".join(lines))


def test_profiled_steps_are_no_measurement(log: Path) -> None:
    profile_steps(log, 1, 2)
    run = parsed_run(log, "1-2")
    assert (run.status, run.figures, run.step_time_s) == ("profiled", None, None)
    assert run.outcome.reason == "2 of the 2 steps of the window were profiled, which slows them down"
    ended = recorded_run(read_folder(RunFolder(log.parent)))
    spoiled, measured = in_other_window(ended, "1-2"), in_other_window(ended, "0-1")
    assert (spoiled.step_time_s, spoiled.reason) == (None, run.reason)
    assert in_other_window(spoiled, "0-1").step_time_s == measured.step_time_s == parsed_run(log, "0-1").step_time_s


@pytest.mark.parametrize("shown", [3, 2, 0])
def test_a_run_has_one_window_and_one_figure_however_it_is_read(log: Path, shown: int) -> None:
    """By its folder or by its log, whatever that shows of its steps."""
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not any(f"iteration {n}/2" in line for n in range(shown, 3))))
    profile_steps(log, 1)
    ended = recorded_run(read_folder(RunFolder(log.parent)))
    for rule in ("reference", "0-2", "last", "auto"):
        judged = ended if rule == "reference" else in_other_window(ended, rule)
        parsed = parsed_run(log, rule)
        assert parsed.step_time_s == judged.step_time_s
        assert [*parsed.step_times_s] == [*judged.step_times_s]
        if parsed.step_time_s:
            assert (parsed.status, parsed.window, parsed.figures) == ("success", judged.window, "exact")
            assert parsed.tokens_per_s_per_gpu == judged.tokens_per_s_per_gpu


def test_the_record_says_what_was_run(log: Path) -> None:
    run = parsed_run(log, "1-2")
    assert run.id == read_record(RunFolder(log.parent)).id
    assert run.recipe_text == "pretrain_llama3.1 tiny fp32"
    assert (run.gpus, run.text("gpu_type"), run.text("program")) == (1, "cpu", "engine")
    assert run.layout == {"tp": 1, "pp": 1, "cp": 1, "vp": 1, "ep": 1, "etp": 1, "mbs": 1, "gbs": 8}
    assert run.layout_text == "mbs1 gbs8"
    assert (run.node_count, run.path) == (1, log.parent)
    assert run.origin and run.origin.data.short == "synthetic"
    assert run.tokens_per_s_per_gpu == pytest.approx(8 * 128 / mean(run))
    assert set(run.mfu_pct) == {"published", "full", "causal", "packed"}


def test_repeats_have_one_key_whatever_they_are_called(log: Path, tmp_path: Path) -> None:
    before = parsed_run(log, "1-2")
    folder = tmp_path / "another_experiment_7" / "renamed"
    shutil.copytree(log.parent, folder)
    again = (folder / log.name).rename(folder / "log-renamed.out")
    after = parsed_run(again, "1-2")
    assert (after.key, after.id) == (before.key, before.id), "the id is that of the run, not of its folder"
    other = json.loads((folder / "run.json").read_text())
    other["environment"]["torch"] = "9.9"
    (folder / "run.json").write_text(json.dumps(other))
    assert parsed_run(again, "1-2").key != before.key, "another version of torch makes no repeat"


def test_a_log_without_a_record_is_known_by_itself(log: Path) -> None:
    (log.parent / "run.json").unlink()
    run = parsed_run(log, "1-2")
    assert (run.id, run.figures, run.record) == (short_id(str(log)), "rounded", None)
    assert run.unread_record is None
    assert run.started_s == log.stat().st_mtime
    assert run.id == parsed_run(log, "2-2").id


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"status": "running"}'])
def test_a_damaged_record_is_none(log: Path, content: str) -> None:
    (log.parent / "run.json").write_text(content)
    run = parsed_run(log, "1-2")
    assert (run.outcome.status, run.record, run.figures) == ("success", None, "rounded")
    assert run.id == short_id(str(log.parent))
    assert run.unread_record and run.unread_record.startswith("it is damaged")


def test_a_run_that_lasts_is_not_one_that_died(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "iteration 2/2" not in line))
    record(log, status="running", result=None, ended_at=None)
    run = parsed_run(log, "reference")
    assert run.outcome.status == "incomplete"
    assert run.outcome.reason == "the run has not ended, according to its record; the log's last step is 1"


def record_window(log: Path, window: dict[str, Any]) -> None:
    """The run as if it had been planned, and had ended, with another window."""
    content = json.loads((log.parent / "run.json").read_text())
    content["plan"]["window"] = window
    mean_s = fmean(exact_times(log)[window["first"] : window["last"] + 1])
    content["result"]["tokens_per_s"] *= content["result"]["step_time_s"]["mean"] / mean_s
    content["result"]["step_time_s"]["mean"] = mean_s
    record(log, plan=content["plan"], result=content["result"])


def test_a_window_that_two_attempts_trained_is_whole_by_the_record(log: Path) -> None:
    """The log of the second attempt begins in the middle; ``metrics.jsonl`` has every step once."""
    lines = log.read_text().splitlines(keepends=True)
    step = {number: line for line in lines for number in range(3) if f"iteration {number}/2" in line}
    record_window(log, {"first": 0, "last": 2, "rule": "0-2"})
    log.write_text(step[0] + step[1] + step[1] + step[0] + step[2])
    run = parsed_run(log, "0-2")
    assert run.outcome.status == "success"
    assert run.outcome.step_times_s == exact_times(log)


def test_a_log_without_steps_is_that_of_its_run(log: Path) -> None:
    log.write_text("done\n")
    record(log, status="failed", reason="the workers ended with exit code 3")
    run = parsed_run(log, "reference")
    assert run.outcome.status == "no_data"
    assert run.outcome.reason == "no step line; the recorded status is failed: the workers ended with exit code 3"


def test_the_default_window_is_that_of_the_record(log: Path) -> None:
    """A log does not tell that its recipe's document takes its figures from other steps."""
    record_window(log, {"first": 1, "last": 2, "rule": "reference"})
    run = parsed_run(log, "reference")
    assert run.outcome.window
    assert (run.outcome.window.first, run.outcome.window.last, run.outcome.window.rule) == (1, 2, "reference")
    assert (run.outcome.reason, run.outcome.step_times_s) == ("steps 1-2 of 3", exact_times(log)[1:])
