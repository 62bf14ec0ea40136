# SPDX-License-Identifier: Apache-2.0
"""Runs that ended, judged as ``llmb judge`` does."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from called_here import call_llmb
from recorded_runs import gpu_record, times_around, write_run
from shown_tables import shown_lines
from step_lines import step_line
from timed_runs import noisy_times
from timed_runs import write_run as write_timed_run
from typer.testing import CliRunner

from llmb.base.errors import LlmbError, NoVerdict, Regressed, UsageError
from llmb.catalogue.resolve import Overrides
from llmb.cli.judge import app
from llmb.jobs.find_runs import find_ended_runs
from llmb.reports.table import plain_lines
from llmb.reports.verdict_report import acceptance_table, summary_table, verdict_table
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import queued_record
from llmb.verdict.expectations_file import AcceptanceSet, find_acceptance_set
from llmb.verdict.judge_run import judge_acceptance, judge_against, judge_published

CONTRACT = {"verdict", "delta_pct", "ci95_pct", "tolerance_pct", "reference", "conditions", "sentence"}
REFERENCE = {"kind", "step_time_s", "window", "convention", "source"}
Judge = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Judge:
    """``llmb judge --json``: its document, with the keys of its verdict if that is the only one, and its exit code."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))

    def call(*words: object) -> tuple[dict[str, Any], int]:
        result = CliRunner().invoke(app, ["judge", *map(str, words), "--json"])
        if result.exception is not None and not isinstance(result.exception, LlmbError):
            raise result.exception
        if isinstance(result.exception, UsageError):
            raise result.exception
        code = result.exception.exit_code if isinstance(result.exception, LlmbError) else result.exit_code
        found = json.loads(result.stdout)
        only = found["judged"][0] if len(found["judged"]) == 1 else {}
        return {**only, **found}, code

    return call


def runs(root: Path, *means_s: float, **recipe: Any) -> Path:
    record = gpu_record(**recipe)
    for mean_s in means_s:
        write_run(root, record, times_around(mean_s))
    return root


def log_of(path: Path, step_times_s: Sequence[float]) -> Path:
    steps = len(step_times_s)
    told = {"global_batch_size": 128, "tflops_per_gpu": None}
    lines = (step_line(n, steps, step_time_s=time, **told) for n, time in enumerate(step_times_s))
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("mean_s", "verdict", "code"),
    [(12.3, "pass", 0), (11.0, "improved", 0), (13.15, "regressed", 5), (12.91, "inconclusive", 6)],
)
def test_a_run_against_the_published_figure(
    judge: Judge, tmp_path: Path, mean_s: float, verdict: str, code: int
) -> None:
    found, exit_code = judge(runs(tmp_path / "runs", mean_s))
    assert (found["verdict"], exit_code) == (verdict, code)
    assert found.keys() >= CONTRACT
    assert found["reference"].keys() >= REFERENCE
    assert found["reference"]["kind"] == "published"
    assert found["step_time_s"] == pytest.approx(mean_s)
    assert [one["path"] for one in found["runs"]] == [str(path.parent) for path in tmp_path.glob("runs/*/*/run.json")]


def test_the_result_of_a_run_has_the_same_verdict(judge: Judge, tmp_path: Path) -> None:
    found, _ = judge(runs(tmp_path / "runs", 13.15))
    kept = json.loads(next(tmp_path.glob("runs/*/*/run.json")).read_text())["result"]
    assert kept["verdict"] == {key: found[key] for key in kept["verdict"]}
    assert kept["verdict_reason"] is None
    own, code = judge(tmp_path / "runs", "--tolerance", 10)
    assert (own["verdict"], own["tolerance_pct"], own["tolerance_source"], code) == ("pass", 10, "--tolerance", 0)


def test_of_several_runs_the_worst_verdict_counts_and_is_at_the_top(judge: Judge, tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", 12.3, 13.15, 12.91)
    found, code = judge(folder)
    assert (found["verdict"], code) == ("regressed", 5)
    assert [one["verdict"] for one in found["judged"]] == ["pass", "regressed", "inconclusive"]
    assert {key: found[key] for key in CONTRACT} == {key: found["judged"][1][key] for key in CONTRACT}
    assert found["left_out"] == []


def test_several_verdicts_begin_with_a_summary_in_which_a_recipe_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    write_run(tmp_path / "runs", gpu_record(), times_around(12.3, steps=20), exit_code=1)
    write_run(tmp_path / "runs", gpu_record(dtype="fp8"), times_around(8.9))
    words = ["judge", str(runs(tmp_path / "runs", 12.15, 13.15))]
    lines = CliRunner().invoke(app, words).stdout.splitlines()
    assert lines[0] == "4 verdicts: 1 regressed, 1 invalid, 2 pass"
    assert lines[2].startswith("pretrain_llama3.1 8b bf16 on 8 x h100")
    assert lines[2].endswith("12.15 to 13.15      12.27  -1.0 to +7.2  1 regressed, 1 invalid, 1 pass")
    assert any(line.startswith("pretrain_llama3.1 8b fp8") and line.endswith(" pass") for line in lines)
    assert lines[-2].startswith("pretrain_llama3.1 8b bf16 on 8 x h100: REGRESSED (soft): 7.2 % slower than published")
    assert lines[-1] == "-v shows each verdict, with what differs"
    verbose = call_llmb(*words, "-v").stdout.splitlines()
    assert verbose[0] == lines[0]
    assert sum(line.startswith("reference: ") for line in verbose) == 4


@pytest.mark.parametrize(("cancelled", "begin"), [(False, ""), (True, "cancelled: ")])
def test_an_incomplete_run_is_invalid_with_and_without_a_figure(
    judge: Judge, tmp_path: Path, tiny_plan: Callable[..., Plan], cancelled: bool, begin: str
) -> None:
    times, root = times_around(12.3, steps=20), tmp_path / "runs"
    reason = "the workers ended with exit code 1, after 20 of 50 steps"
    for record, has_figure in ((gpu_record(), True), (queued_record(tiny_plan(), ()), False)):
        found, code = judge(write_run(root, record, times, exit_code=1, cancelled=cancelled))
        assert (found["verdict"], found["reference"] is not None, code) == ("invalid", has_figure, 6)
        assert found["reason"] == begin + reason


def test_repeats_are_judged_together_against_a_baseline(judge: Judge, tmp_path: Path) -> None:
    before = runs(tmp_path / "before", 12.29, 12.3, 12.31)
    slow = runs(tmp_path / "slow", 12.99, 13.0, 13.01)
    found, code = judge(slow, "--against", before)
    assert (found["verdict"], code) == ("regressed", 5)
    assert len(found["runs"]) == found["reference"]["runs"] == 3
    assert found["reference"]["step_time_s"] == pytest.approx(12.3)
    assert found["delta_pct"] == pytest.approx(100 * (13 / 12.3 - 1))
    again, code = judge(runs(tmp_path / "again", 12.29, 12.3, 12.31), "--against", before)
    assert (again["verdict"], code) == ("pass", 0)


def test_the_baseline_that_is_most_like_the_run_is_taken(judge: Judge, tmp_path: Path) -> None:
    runs(tmp_path / "before", 9.0, 9.01, dtype="fp8")
    runs(tmp_path / "before", 12.29, 12.3)
    own = runs(tmp_path / "own", 12.29, 12.3)
    found, _ = judge(own, "--against", tmp_path / "before")
    assert found["reference"]["step_time_s"] == pytest.approx(12.295)
    assert found["verdict"] == "pass"
    other = runs(tmp_path / "other", 9.0, 9.01, dtype="fp8", scale=16)
    found, code = judge(other, "--against", tmp_path / "before")
    assert (found["verdict"], code) == ("not comparable", 6)
    assert "GPUs" in found["reason"]


def test_measured_runs_become_expectations(judge: Judge, tmp_path: Path) -> None:
    before = runs(tmp_path / "before", 12.29, 12.3, 12.31)
    write_run(before, gpu_record(), times_around(50, steps=20), exit_code=1)
    file = tmp_path / "expected.yaml"
    written = CliRunner().invoke(app, ["judge", str(before), "--write-expectations", str(file)])
    assert written.exit_code == 0, written.exception
    (entry,) = yaml.safe_load(file.read_text())["expectations"]
    assert (entry["workload"], entry["size"], entry["scale"], entry["runs"]) == ("pretrain_llama3.1", "8b", 8, 3)
    assert entry["step_time_s"] == pytest.approx(12.3)
    assert entry["step_time_s_ci95"] == pytest.approx([12.2752, 12.3248], abs=1e-4)  # Student's t of three runs
    assert entry["conditions"]["nodes"] == "node1"
    assert "seed" not in entry["conditions"]
    found, code = judge(runs(tmp_path / "same", 12.3), "--expect", file)
    assert (found["verdict"], found["conditions"], found["soft"], code) == ("pass", [], False, 0)
    assert found["reference"]["kind"] == "expectation"
    slow, code = judge(runs(tmp_path / "slow", 13.0, nodes=("node2",)), "--expect", file)
    assert (slow["verdict"], code) == ("regressed", 5)
    assert [(one["key"], one["own"], one["reference"]) for one in slow["conditions"]] == [("nodes", "node2", "node1")]
    other, code = judge(runs(tmp_path / "other", 9.0, dtype="fp8"), "--expect", file)
    assert (other["verdict"], code) == ("not comparable", 6)
    assert "dtype bf16, not fp8" in other["reason"]
    with pytest.raises(UsageError, match="already exists"):
        judge(before, "--write-expectations", file)
    last = str(runs(tmp_path / "last", 12.3, window="49-49"))
    CliRunner().invoke(app, ["judge", last, "--write-expectations", f"{file}2"])
    assert not judge(Path(last), "--expect", f"{file}2")[0]["conditions"]


def test_without_a_figure_other_references_serve(judge: Judge, tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    record = queued_record(tiny_plan(), ())
    for folder in (tmp_path / "before", tmp_path / "tiny"):
        for mean_s in (0.499, 0.5, 0.501):
            write_run(folder, record, times_around(mean_s, 0.001))
    found, code = judge(next((tmp_path / "tiny").glob("run_*/run")))
    assert (found["verdict"], found["reference"], code) == ("not comparable", None, 6)
    assert found["sentence"].startswith("not comparable: no published figure: ")
    found, code = judge(tmp_path / "tiny", "--against", tmp_path / "before")
    assert (found["verdict"], code) == ("pass", 0)


def test_the_advice_is_not_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_plan: Callable[..., Plan]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    own = str(write_run(tmp_path / "tiny", queued_record(tiny_plan(), ()), times_around(0.5)))
    errors = [CliRunner().invoke(app, ["judge", *words]).exception for words in ([own], [own, "--against", own])]
    assert [isinstance(error, NoVerdict) and error.do for error in errors] == ["add --against or --expect", None]


def test_without_a_published_figure_a_run_is_judged_by_earlier_ones(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_plan: Callable[..., Plan]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    times = [noisy_times(mean_s, 0.002, 50, seed) for seed, mean_s in enumerate((2.0, 2.0, 2.0, 2.2))]
    folders = [write_timed_run(tmp_path, tiny_plan(), own, number=number) for number, own in enumerate(times)]
    found, code = judge(folders[1].path)
    assert (found["verdict"], code) == ("not comparable", 6)
    assert found["reason"].endswith("; 1 earlier run of this recipe on these nodes, and 2 are needed")
    found, code = judge(folders[2].path)
    assert (found["verdict"], found["reference"]["runs"], code) == ("pass", 2, 0)
    found, code = judge(folders[3].path)
    assert (found["verdict"], found["reference"]["runs"], code) == ("regressed", 3, 5)
    assert found["delta_pct"] == pytest.approx(10, abs=1)


def test_a_run_is_not_its_own_baseline(judge: Judge, tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", 12.3, 12.31, 13.0)
    last = sorted(folder.glob("*/run"))[-1]
    found, _ = judge(last, "--against", folder)
    assert (found["reference"]["runs"], found["reference"]["step_time_s"]) == (2, pytest.approx(12.305))
    found, code = judge(folder, "--against", folder)
    assert (found["verdict"], found["reference"], code) == ("not comparable", None, 6)
    assert "no other run" in found["reason"]


def test_a_log_without_a_record_is_judged(judge: Judge, tmp_path: Path) -> None:
    log = log_of(tmp_path / "log-a.out", times_around(12.3))
    slow = log_of(tmp_path / "log-b.out", times_around(13.0))
    found, code = judge(log)
    assert (found["verdict"], code) == ("not comparable", 6)
    found, code = judge(slow, "--against", log)
    assert found["delta_pct"] == pytest.approx(100 * (13 / 12.3 - 1))
    file = tmp_path / "expected.yaml"
    file.write_text("expectations:\n- {workload: pretrain_llama3.1, size: 8b, step_time_s: 12.3, tolerance_pct: 2}\n")
    found, code = judge(slow, "--expect", file)
    assert (found["verdict"], found["soft"], code) == ("regressed", True, 5)
    assert {one["key"]: one["own"] for one in found["conditions"]} == {"workload": None, "size": None}
    assert "workload" in found["sentence"]


def test_a_log_that_tells_its_nodes_alone_is_judged_with_the_gpus_of_the_gpu_type(judge: Judge, tmp_path: Path) -> None:
    name = "log-acct.pretrain_llama3.1_8b_bf16_1nodes_tp1_pp1_cp2_vp1_mbs1_gbs128_4711_0.out"
    log = log_of(tmp_path / name, times_around(13.15))
    assert judge(log)[0]["reason"] == "the log does not report its GPU type, number of GPUs"
    assert judge(log, "--gpu-type", "h100")[0]["verdict"] == "regressed"


def test_a_log_whose_recipe_is_known_is_judged_against_the_published_figure(judge: Judge, tmp_path: Path) -> None:
    name = "log-acct.pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128_4711_0.out"
    log = log_of(tmp_path / name, times_around(13.15))
    found, code = judge(log)
    assert (found["verdict"], code) == ("not comparable", 6)
    assert found["reason"] == "the log does not report its GPU type"
    found, code = judge(log, "--gpu-type", "h100")
    assert (found["verdict"], found["reference"]["kind"], code) == ("regressed", "published", 5)
    assert found["reference"]["step_time_s"] == 12.27
    effects = {one["key"]: one["effect"] for one in found["conditions"]}
    assert (effects["window"], effects["program"]) == ("weakens", "weakens")
    assert "workload" not in effects
    other = log_of(tmp_path / name.replace("tp1", "tp2"), times_around(13.15))
    found, _ = judge(other, "--gpu-type", "h100")
    source = found["reference"]["source"]
    assert source.startswith("a prediction of llmb predict, ±4 %, as the catalogue has no recipe with the layout")
    assert source.endswith("layout.tp 2, but 1 in the recipe")
    assert (found["reference"]["kind"], found["soft"]) == ("prediction", True)


def test_a_log_that_reports_no_recipe_is_judged_with_what_the_user_states(judge: Judge, tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "readers" / "logs" / "samples" / "megatron_lm.log"
    stated = ("-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--gpu-type", "h100")
    found, code = judge(log)
    assert (found["reason"], code) == ("the log does not report its workload, size, dtype, GPU type", 6)
    assert judge(log, "-w", "pretrain_nemotron3", "-s", "550b")[1] == 6  # a size without a description
    found, code = judge(log, *stated)
    assert (found["verdict"], found["soft"], code) == ("regressed", True, 5)
    assert found["tolerance_source"] == "the interval of the prediction"
    assert found["recipe"] == "pretrain_llama3.1 8b bf16 on 64 x h100"
    published = log_of(tmp_path / "run.out", times_around(13.15))
    found, _ = judge(published, *stated, "--scale", "8")
    assert (found["verdict"], found["reference"]["kind"]) == ("regressed", "published")
    for words, problem in (
        (("--scale", "8"), "number of GPUs 8 was specified, but the log reports 64"),
        (("-s", "70b"), "size 70b was specified, which has 80 layers, but the log reports 32"),
        (("-w", "other"), "unknown workload 'other'"),
    ):
        with pytest.raises(UsageError) as caught:
            judge(log, *stated, *words)
        assert problem in caught.value.what


def test_an_acceptance_set_needs_every_recipe(judge: Judge, tmp_path: Path) -> None:
    runs(tmp_path / "campaign", 12.29, 12.3)
    found, code = judge(tmp_path / "campaign", "--acceptance", "h100-node")
    assert [one["verdict"] for one in found["judged"]] == ["pass", "inconclusive"]
    assert (found["verdict"], code) == ("inconclusive", 6)
    assert len(found["judged"][0]["runs"]) == 2
    runs(tmp_path / "campaign", 9.4, dtype="fp8")
    found, code = judge(tmp_path / "campaign", "--acceptance", "h100-node")
    assert (found["verdict"], found["acceptance"]["name"], code) == ("pass", "h100-node", 0)
    runs(tmp_path / "late", 12.3)
    runs(tmp_path / "late", 10.2, dtype="fp8")
    found, code = judge(tmp_path / "late", "--acceptance", "h100-node")
    assert [one["verdict"] for one in found["judged"]] == ["pass", "regressed"]
    assert code == 5


def test_the_step_time_is_the_one_that_the_difference_is_of(judge: Judge, tmp_path: Path) -> None:
    runs(tmp_path / "before", 12.0, 12.1, 12.2)
    runs(tmp_path / "after", 12.1, 12.1, 15.0)
    runs(tmp_path / "after", 9.0, window="all")  # with the first step: no measurement
    found, _ = judge(tmp_path / "after", "--against", tmp_path / "before")
    assert (found["step_time_s"], found["reference"]["step_time_s"]) == (pytest.approx(12.1), pytest.approx(12.1))
    assert found["delta_pct"] == pytest.approx(0, abs=1e-9)
    assert len(found["runs"]) == 4


OTHERS: dict[str, dict[str, Any]] = {
    "proxy": {"overrides": Overrides(layers=2), "window": "last"},
    "layout": {"overrides": Overrides(mbs=2), "window": "last"},
    "window": {},
    "documents": {"document_tokens": 512, "window": "last"},
}


@pytest.mark.parametrize(("other", "other_is_last"), list(zip(OTHERS, (False, True) * 2, strict=True)))
def test_acceptance_does_not_mix_the_published_recipe_with_others(
    judge: Judge, tmp_path: Path, other: str, other_is_last: bool
) -> None:
    for is_other in sorted((False, True), reverse=not other_is_last):
        runs(tmp_path / "runs", 1.0 if is_other else 13.3, **(OTHERS[other] if is_other else {"window": "last"}))
    found, _ = judge(tmp_path / "runs", "--acceptance", "h100-node")
    assert found["judged"][0]["step_time_s"] == pytest.approx(13.3, abs=0.03)


def test_acceptance_takes_the_last_of_runs_that_are_as_much_like_the_published_one(
    judge: Judge, tmp_path: Path
) -> None:
    for mean_s, keep_logits in ((12.0, False), (13.0, True), (14.0, False), (13.5, True)):
        runs(tmp_path / "runs", mean_s, keep_logits=keep_logits)
    found, _ = judge(tmp_path / "runs", "--acceptance", "h100-node")
    assert (found["judged"][0]["step_time_s"], len(found["judged"][0]["runs"])) == (pytest.approx(13.25), 2)


def test_repeats_that_are_steady_from_different_steps_are_accepted_together(judge: Judge, tmp_path: Path) -> None:
    for warm_up in (1, 15):
        times = times_around(12.3)
        times[:warm_up] = [20.0] * warm_up
        write_run(tmp_path / "runs", gpu_record(window="auto"), times)
    found, _ = judge(tmp_path / "runs", "--acceptance", "h100-node")
    assert len(found["judged"][0]["runs"]) == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--against", "x", "--expect", "y"), "--against and --expect cannot be combined"),
        (("--tolerance", "0"), "--tolerance is 0; it must be a finite number above 0"),
        (("--acceptance", "h100", "--tolerance", "2"), "--tolerance has no effect with --acceptance"),
        (("--gpu-type", "v100"), "unknown GPU type 'v100'"),
        (("--acceptance", "h1000"), "unknown acceptance set 'h1000'"),
        (("--bisect", "--write-expectations", "new.yaml"), "--bisect needs a verdict"),
    ],
)
def test_options_that_cannot_be(judge: Judge, tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    folder = runs(tmp_path / "runs", 12.3)
    with pytest.raises(UsageError) as caught:
        judge(folder, *options)
    assert problem in caught.value.what


def test_a_table_has_the_sentence_first_and_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    result = CliRunner().invoke(app, ["judge", str(runs(tmp_path / "runs", 13.15))])
    assert isinstance(result.exception, Regressed)
    first, second, *rest = result.stdout.splitlines()
    assert first.startswith("REGRESSED (soft): 7.2 % slower than published (")
    assert second.startswith("pretrain_llama3.1 8b bf16 on 8 x h100, run ")
    (run,) = find_ended_runs(str(tmp_path / "runs"), tmp_path, lambda _: None).runs
    table = verdict_table(judge_published(run))
    assert max(map(len, shown_lines(table))) <= 80
    assert next(plain_lines(table)) == first
    assert any(line.split() == ["step", "time", "s", "13.15", "12.27"] for line in rest)
    assert any(re.search(r"NeMo 25\.02\.01 +makes it soft", line) for line in rest)
    assert "tolerance: 5.3 %: 95 % of the published throughput" in result.stdout
    failed = CliRunner().invoke(app, ["judge", str(tmp_path / "runs"), "--tolerance", "7.2"])
    assert isinstance(failed.exception, NoVerdict)


def test_an_accepted_cluster_is_said_to_be_accepted(tmp_path: Path) -> None:
    wanted = find_acceptance_set("h100-node").model_copy(update={"valid_months": 12})
    runs(tmp_path / "runs", 12.3)
    found = find_ended_runs(str(tmp_path / "runs"), tmp_path, lambda _: None).runs
    (missing,) = [line for line in table_of(wanted, found) if "no run among" in line]
    assert missing.startswith("1 recipe has")
    runs(tmp_path / "runs", 9.4, dtype="fp8")
    found = find_ended_runs(str(tmp_path / "runs"), tmp_path, lambda _: None).runs
    lines = table_of(wanted, found)
    assert lines[0] == "Acceptance h100-node (one node of 8 H100): 2 of 2 recipes pass"
    assert lines[-1] == "the cluster is accepted, for 12 months from these runs"


def table_of(wanted: AcceptanceSet, found: Sequence[AnalyzedRun]) -> list[str]:
    lines = shown_lines(acceptance_table(wanted, judge_acceptance(wanted, found)))
    assert max(map(len, lines)) <= 80
    return lines


def test_the_table_names_the_runs_that_were_counted(tmp_path: Path) -> None:
    write_run(runs(tmp_path / "after", 12.3, 12.31), gpu_record(), times_around(99.0, steps=20), exit_code=1)
    runs(tmp_path / "before", 12.3, 12.31)
    after, before = (find_ended_runs(str(tmp_path / name), tmp_path, print).runs for name in ("after", "before"))
    (judged,) = judge_against(after, before, "before")
    text = "\n".join(plain_lines(verdict_table(judged)))
    failed = next(run.id for run in after if run.status == "failed")
    counted = [run.id for run in after if run.status == "success"]
    assert f"2 of 3 runs {', '.join(counted)}\n" in text
    assert summary_table([judged], verbose=True).rows[0][1] == ", ".join(counted)
    assert f"not counted: {failed}: the workers ended with exit code 1, after 20 of 50 steps" in text


def test_the_window_of_the_command_is_for_both_sides(judge: Judge, tmp_path: Path) -> None:
    """Runs that slow down at their end; without the option, the steps before count."""
    before = runs(tmp_path / "before", 12.3, 12.32)
    record = gpu_record()
    for mean in (12.3, 12.31):
        write_run(tmp_path / "after", record, [*times_around(mean, steps=45), *times_around(13.5, steps=5)])
    found, code = judge(tmp_path / "after", "--against", before)
    assert (found["verdict"], code) == ("pass", 0)
    found, code = judge(tmp_path / "after", "--against", before, "--window", "45-49")
    assert (found["verdict"], code) == ("regressed", 5)
    assert found["reference"]["window"] == {"first": 45, "last": 49, "rule": "45-49"}
    found, _ = judge(before, "--window", "45-60")
    assert "outside the run" in found["judged"][0]["reason"]
    with pytest.raises(UsageError, match="not a window"):
        judge(before, "--window", "44-35")


def test_an_error_after_the_last_step_makes_a_verdict_soft_and_is_named(
    judge: Judge, tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    def write(name: str, seed: int) -> RunFolder:
        return write_timed_run(tmp_path / name, tiny_plan(), noisy_times(2.0, 0.002, 50, seed), number=seed)

    folders = [write("before" if seed < 4 else "after", seed) for seed in range(1, 7)]
    sides = (tmp_path / "after", "--against", tmp_path / "before")
    assert (judge(*sides)[0]["verdict"], judge(*sides)[0]["soft"]) == ("pass", False)
    record = json.loads(folders[-1].record.read_text())
    folders[-1].record.write_text(json.dumps(record | {"exit_code": 1}))
    found, code = judge(*sides)
    assert (found["verdict"], found["soft"], code) == ("pass", True, 0)
    assert "an error after the last step of yours: exit code 1" in found["sentence"]


def test_a_log_that_ends_in_a_traceback_has_a_soft_verdict(judge: Judge, tmp_path: Path) -> None:
    for side, seed in (("before", 1), ("after", 11)):
        (tmp_path / side).mkdir()
        logs = [log_of(tmp_path / side / f"log-{n}.out", noisy_times(12.0, 0.002, 50, seed + n)) for n in range(3)]
        for log in logs:
            log.rename(log.with_name(f"log-pretrain_llama3.1_8b_bf16_gpus8_{log.stem[-1]}_0.out"))
    sides = (tmp_path / "after", "--against", tmp_path / "before")
    assert judge(*sides)[0]["soft"] is False
    with next((tmp_path / "after").iterdir()).open("a") as log:
        log.write('Traceback (most recent call last):\n  File "train.py", line 1\nRuntimeError: CUDA out of memory\n')
    found, _ = judge(*sides)
    assert found["soft"] and "after the last step of yours: RuntimeError: CUDA out of memory" in found["sentence"]


def test_runs_that_recompute_differently_are_not_comparable(
    judge: Judge, tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    for name, recompute in (("before", "none"), ("after", "full")):
        for number in range(3):
            times = noisy_times(2.0, 0.002, 50, number + (10 if name == "after" else 0))
            write_timed_run(tmp_path / name, tiny_plan(recompute=recompute), times, number=number)
    found, code = judge(tmp_path / "after", "--against", tmp_path / "before")
    assert (found["verdict"], code) == ("not comparable", 6)
    assert "recomputed activations differs" in found["sentence"]


def test_git_finds_the_commit_that_made_steps_slower(tmp_path: Path) -> None:
    """The last of five commits; the one in the middle, which git tries first, cannot be judged."""
    before = runs(tmp_path / "before", 12.29, 12.3, 12.31)
    runs(tmp_path / "fast", 12.29, 12.3, 12.31)
    runs(tmp_path / "slow", 12.99, 13.0, 13.01)
    runs(tmp_path / "unclear", 12.0, 12.5, 13.0)
    measure, repository = tmp_path / "measure.sh", tmp_path / "code"
    judge = f'{sys.executable} -P -m llmb judge "{tmp_path}/$(cat made)" --against {before} --bisect'
    measure.write_text(f"#!/bin/sh\nexport LLMB_INSTALL={tmp_path}\nexec {judge}\n")
    measure.chmod(0o700)

    def git(*words: str) -> str:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words)
        return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout

    repository.mkdir()
    git("init", "--quiet")
    for number, made in enumerate(("fast", "fast", "unclear", "fast", "slow")):
        (repository / "made").write_text(f"{made}\n")
        git("add", "made")
        git("commit", "--quiet", "--allow-empty", "-m", f"commit {number}")
    last = git("rev-parse", "HEAD").strip()
    git("bisect", "start", "HEAD", "HEAD~4")
    assert f"{last} is the first bad commit" in git("bisect", "run", str(measure))
    log = git("bisect", "log")
    assert "# skip: " in log and "# good: " in log


def test_exit_codes_of_a_bisection(judge: Judge, tmp_path: Path) -> None:
    before = runs(tmp_path / "before", 12.29, 12.3, 12.31)
    for verdict, code, noise_s in (("pass", 0, 0.01), ("regressed", 1, 0.01), ("inconclusive", 125, 0.5)):
        mean_s = 12.3 if verdict == "pass" else 13.0
        made = runs(tmp_path / verdict, mean_s - noise_s, mean_s, mean_s + noise_s)
        found, exit_code = judge(made, "--against", before, "--bisect")
        assert (found["verdict"], exit_code) == (verdict, code)
