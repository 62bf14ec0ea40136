# SPDX-License-Identifier: Apache-2.0
"""llmb from Python: the commands as functions with typed results."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import gpu_record, times_around, write_run
from timed_runs import START, fail
from timed_runs import write_run as write_timed_run
from typer.testing import CliRunner

import llmb
from llmb.base.errors import UsageError
from llmb.cli.main import app
from llmb.jobs.local_run import LocalRun
from llmb.runs.experiment import run_parent
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan

RUNS = Path(__file__).parent.parent / "data" / "root"


def test_importing_llmb_loads_nothing_until_it_is_used() -> None:
    code = "import sys, llmb; print([name for name in sys.modules if name.startswith(('llmb.', 'pydantic', 'typer'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {"run", "parse", "recipe", "result", "judge"} <= set(dir(llmb))


def test_a_recipe_is_a_typed_value() -> None:
    found = llmb.recipe("pretrain_llama3.1", "8B", scale=8, gpu_type="H100", dtype="bf16")
    assert (found.layout.dp, found.expectations[0].step_time_s, found.unspecified) == (4, 12.27, ())
    assert llmb.recipe("pretrain_llama3.1", "8b", gpus=16).scale == 16


def test_a_run_folder_is_parsed_as_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exact step times and the window of its record, not those of the log alone."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    kinds = set()
    for window in ("reference", "all", "3-5"):
        files = llmb.parse(RUNS, window=window)
        words = ["parse", str(RUNS), "--json", "--window", window, "--jobs", "1"]
        printed = json.loads(CliRunner().invoke(app, words).stdout)["results"]
        assert [str(file.path) for file in files] == [one["path"] for one in printed]
        means = [file.outcome.step_time_s.mean if file.outcome.step_time_s else None for file in files]
        assert means == [one["step_time_s"] and one["step_time_s"]["mean"] for one in printed]
        kinds |= {one["figures"] for one in printed}
    assert "exact" in kinds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scal": 8}, "unknown option 'scal'; did you mean 'scale'?"),
        ({"scale": "8"}, "scale is '8'; it must be a whole number of at least 1"),
        ({"scale": True}, "scale is True; it must be a whole number"),
        ({"scale": 12}, "has no layout for 12 GPUs"),
        ({"dtype": 8}, "dtype is 8; it must be a name"),
        ({"scale": 8, "gpus": 16}, "gpus and scale are the same option"),
    ],
)
def test_a_wrong_option_is_an_error_of_llmb(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        llmb.recipe("pretrain_llama3.1", "8b", **options)
    assert said in error.value.what


def test_a_wrong_choice_is_an_error_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    with pytest.raises(UsageError, match="recompute is 'some'; it must be none or selective or full"):
        llmb.run("pretrain_llama3.1", "tiny", gpu_type="cpu", recompute="some")
    with pytest.raises(UsageError, match="--steps is 0; it must be at least 1"):
        llmb.run("pretrain_llama3.1", "tiny", gpu_type="cpu", lr=0.1, compile=False, checkpoint_dir=tmp_path, steps=0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_may_not_fit_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.setattr(LocalRun, "check", lambda _: None)  # this machine has no such GPU
    said: list[str] = []

    def started(*_: object) -> None:
        raise UsageError("started")

    monkeypatch.setattr(LocalRun, "start", started)
    options: dict[str, Any] = {"gpu_type": "h100", "scale": 1, "layers": 32, "force": True}
    with pytest.raises(UsageError, match=r"^started$"):
        llmb.run("pretrain_llama3.1", "8b", on_message=said.append, **options)
    assert "needs about" in said[0]
    assert "of 80 GiB" in said[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_run_returns_its_result_and_reports_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    steps: list[int] = []
    ended = llmb.run(
        "pretrain_llama3.1", "tiny", gpu_type="cpu", scale=1, steps=3, on_step=lambda news: steps.append(news.step)
    )
    assert steps == [0, 1, 2]
    assert ended.result.loss is not None
    assert llmb.result(ended.folder).result.loss == ended.result.loss
    assert ended.recipe.title() == "pretrain_llama3.1 tiny fp32 on 1 x cpu"


def test_a_run_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    folder = write_run(tmp_path / "runs", gpu_record(), times_around(12.3))
    published = llmb.judge(folder)
    assert (published.verdict, published.reference and published.reference.kind) == ("pass", "published")
    assert llmb.judge(str(folder), tolerance=0.1).verdict == "regressed"
    last = llmb.judge(folder, window="40-49")
    assert last.delta_pct is not None and "the mean of 40-49" in last.sentence
    other = write_run(tmp_path / "before", gpu_record(), times_around(12.3))
    alone = llmb.judge(tmp_path / "runs", against=other)
    assert alone.sentence.startswith("inconclusive: as fast as the baseline")
    experiment = run_parent(tmp_path, gpu_record().plan)
    for mean_s in (12.3, 12.31, 12.29):
        write_run(experiment, gpu_record(), times_around(mean_s))
    known = llmb.judge(tmp_path / "runs", against=other)
    assert (known.verdict, known.soft) == ("pass", False)
    assert known.reason == "one run on each side: repeats differ as much as 3 earlier runs did"
    assert llmb.compare(tmp_path / "runs", other).rows[0].earlier_runs == 3
    write_run(tmp_path / "runs", gpu_record(), times_around(12.3))
    with pytest.raises(UsageError, match="2 verdicts"):
        llmb.judge(tmp_path / "runs")
    with pytest.raises(UsageError, match="cannot be combined"):
        llmb.judge(folder, against=folder, expect="expected.yaml")


@pytest.mark.parametrize("tolerance", [float("nan"), 0.0])
def test_a_tolerance_that_decides_nothing_is_refused(tolerance: float) -> None:
    for call in (partial(llmb.judge, RUNS), partial(llmb.compare, RUNS, vary=["layout.gbs"])):
        with pytest.raises(UsageError, match="tolerance"):
            call(tolerance=tolerance)


def test_runs_are_compared_from_python() -> None:
    found = llmb.compare(RUNS, vary=["layout.gbs"])
    assert (found.before, found.vary) == (str(RUNS), ("layout.gbs",))
    assert len(found.left_out) > 0
    with pytest.raises(UsageError, match="both sides have the same runs"):
        llmb.compare(RUNS, RUNS)


def test_runs_have_the_same_names_from_python_as_in_commands(
    tmp_path: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    plan = tiny_plan(steps=50)
    for number in range(4):
        folder = write_timed_run(
            tmp_path, plan, [1.0 + number] * 50, number=number, label="week" if number < 3 else None
        )
        job = {"key": f"k{number}", "job_id": str(number), "scheduler": "local", "submitted_at": START.isoformat()}
        folder.job.write_text(json.dumps(job))
    fail(folder, "out of memory")
    said: list[str] = []
    latest = llmb.result("latest", on_message=said.append)
    assert latest.step_time_s == 3.0 and "is failed" in said[-1]
    assert (latest.result.status, latest.recipe.workload) == ("success", "pretrain_llama3.1")
    assert llmb.result(latest.id) == latest == llmb.result(latest.folder)
    moved = shutil.move(latest.folder, tmp_path / "elsewhere")
    assert llmb.result(moved).id == latest.id, "it survives copying"
    shutil.move(moved, latest.folder)
    week = llmb.list_runs(label="week")
    assert [run.step_time_s for run in week] == [1.0, 2.0, 3.0]
    assert repr(week[0]) == f"<run {week[0].id}: pretrain_llama3.1 tiny fp32 on 2 x cpu, success, 1 s per step>"
    assert week._repr_html_().count("<tr>") == 4
    assert llmb.judge("latest", against=week[0].folder).verdict == "regressed"
    printed = CliRunner().invoke(app, ["result", "week"]).stdout
    assert printed.startswith("2 s a step, mean of 3 runs") and all(run.id in printed for run in week)
    document = json.loads(CliRunner().invoke(app, ["result", "label:week", "--json"]).stdout)
    assert [run["id"] for run in document["recipes"][0]["runs"]] == [run.id for run in week]
    with pytest.raises(UsageError, match="3 runs match 'week'"):
        llmb.result("week")
    with pytest.raises(UsageError, match="no job 'nothing'"):
        llmb.result("nothing")


H100 = ("--scale", "64", "--gpu-type", "h100", "--dtype", "bf16")


@pytest.mark.parametrize(
    ("name", "words", "options"),
    [
        ("predict", ("--scaling", "weak"), {"scaling": "weak"}),
        ("plan", ("--tp", "8", "--recompute", "full", "--top", "2"), {"tp": 8, "recompute": "full", "top": 2}),
        ("memory", ("--estimate",), {"estimate": True}),
    ],
)
def test_what_is_known_before_a_run_is_the_same_as_by_the_command(
    name: str, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    found = getattr(llmb, name)("pretrain_llama3.1", "70b", scale=64, gpu_type="h100", dtype="bf16", **options)
    printed = CliRunner().invoke(app, [name, "pretrain_llama3.1", "70b", *H100, *words, "--json"]).stdout
    assert json.loads(json.dumps(found.to_dict())) == json.loads(printed)
    assert "<table>" in found._repr_html_()


def test_a_run_by_its_label_is_parsed_calibrates_and_is_on_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    record = gpu_record().model_copy(update={"label": "week"})
    folder = write_run(run_parent(tmp_path, record.plan), record, times_around(12.3))
    job = {"key": "k", "job_id": "1", "scheduler": "local", "submitted_at": START.isoformat()}
    RunFolder(folder).job.write_text(json.dumps(job))
    logs = llmb.parse("week")
    assert [log.path for log in logs] == [log.path for log in llmb.parse(folder)]
    assert "success" in repr(logs) and "success" in logs._repr_html_()
    recipe = record.plan.recipe
    options = {"scale": recipe.scale, "gpu_type": recipe.gpu_type, "dtype": recipe.dtype}
    calibrated = llmb.predict(recipe.workload, recipe.size, calibrate="week", **options)
    assert calibrated.prediction.seconds == pytest.approx(12.3, rel=0.01)
    assert llmb.report("week").read_text().startswith("<!DOCTYPE html>")
    assert llmb.report(["week", "latest"], output="page.md").read_text().startswith("- ")
    with pytest.raises(UsageError, match="unknown file extension"):
        llmb.report("week", output="page.docx")


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: llmb.plan("x", "y", goal="z"), "goal is 'z'; it must be step or token"),  # type: ignore[arg-type]
        (lambda: llmb.judge("x", tolerance="x"), "tolerance is 'x'; it must be a number or None"),  # type: ignore[arg-type]
        (lambda: llmb.recipe("pretrain_llama3.1", 8), "size is 8; it must be text or None"),  # type: ignore[arg-type]
        (lambda: llmb.recipe("pretrain_llama3.1"), "the size of pretrain_llama3.1 is not specified"),
        (lambda: llmb.parse("x", window=None), "window is None; it must be text"),  # type: ignore[arg-type]
        (lambda: llmb.judge(None), "path is None; it must be text or a path"),  # type: ignore[arg-type]
        (lambda: llmb.compare("x", vary="tp"), "vary is 'tp'; it must be a list of texts"),
        (lambda: llmb.list_runs(limit=-1), "limit is -1; it must be a whole number from 0 to 9223372036854775807"),
        (lambda: llmb.result("x", on_message="x"), "on_message is 'x'; it must be a function"),  # type: ignore[arg-type]
        (lambda: llmb.parse("~nouser/x"), "this path cannot be used: Could not determine home directory."),
        (lambda: llmb.judge("a/" * 3000), "this path cannot be used: it is too long"),
    ],
)
def test_the_error_says_what_an_argument_must_be(call: Callable[[], object], what: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert error.value.what == what


def test_the_package_shows_its_interface_alone() -> None:
    names = [name for name in dir(llmb) if not name.startswith("_")]
    assert names == sorted(names) and {"judge", "run", "Runs"} <= set(names)
    assert all(getattr(llmb, name) for name in names)
    assert "Any" not in names and "import_module" not in names
