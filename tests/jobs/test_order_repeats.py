# SPDX-License-Identifier: Apache-2.0
"""Repeats run in turn, one that fails ends none of the others, and with a label what is missing is run."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_steps import steps_of
from job_rows import job_row
from typer.testing import CliRunner

from llmb.base.errors import EnvironmentProblem, InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request
from llmb.cli.main import app
from llmb.cli.run import combined, run_or_print
from llmb.jobs.history import open_history
from llmb.jobs.local_run import LocalRun, Turn, interleaved, plan_here, remaining, runs_lock
from llmb.jobs.store import Filter
from llmb.launch.programs.conclude import EndedRun
from llmb.runs.choices import Choices
from llmb.runs.conclusion import RunEvidence, conclude
from llmb.runs.conditions import identity_of
from llmb.runs.experiment import create_run_folder
from llmb.runs.record import new_record, write_record
from llmb.runs.result import Status
from llmb.runs.steps import step_to_json

REQUEST = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=1)


def test_every_second_round_is_backwards() -> None:
    assert [turn.recipe for turn in interleaved([3, 3, 3])] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [turn.repeat for turn in interleaved([2, 2, 2])] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("repeats", [2, 4, 6])
def test_a_linear_drift_adds_the_same_to_each(repeats: int) -> None:
    turns = list(interleaved([repeats, repeats]))
    places = [[place for place, turn in enumerate(turns) if turn.recipe == recipe] for recipe in (0, 1)]
    assert sum(places[0]) == sum(places[1])


def test_what_was_run_before_is_left_out() -> None:
    assert remaining(interleaved([2, 2]), {0: 1, 1: 2}) == [Turn(0, 2)]
    assert remaining(interleaved([1, 1]), {}) == [Turn(0, 1), Turn(1, 1)]


def test_lists_of_options_are_combined() -> None:
    values = {"size": "tiny,8b", "dtype": "fp32, bf16", "mbs": "2", "label": "a,b", "tp": None}
    found = list(combined(values))
    assert [(one["size"], one["dtype"]) for one in found] == [
        ("tiny", "fp32"), ("tiny", "bf16"), ("8b", "fp32"), ("8b", "bf16")
    ]  # fmt: skip
    assert {(one["mbs"], one["label"], one["tp"]) for one in found} == {(2, "a,b", None)}
    for text in ("fp32,", "fp32,fp32", ","):
        with pytest.raises(UsageError, match="--dtype is"):
            list(combined({"dtype": text}))
    with pytest.raises(UsageError, match="--mbs is 'x'; it must be a whole number"):
        list(combined({"mbs": "1,x"}))


@dataclass(slots=True)
class Script:
    """How the next runs end, and the dtypes of those that were run."""

    ends: list[Status | Exception] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickRun(LocalRun):
    """A run without workers: the steps of the first one take 1 s, those of the second 2 s, and so on."""

    script: Script

    def check(self) -> None:
        """It needs no machine."""

    def start(self, on_step: Callable[..., None], say: Callable[[str], None]) -> EndedRun:
        end = self.script.ends.pop(0) if self.script.ends else "success"
        self.script.ran.append(self.plan.recipe.dtype.value)
        if isinstance(end, Exception):
            raise end
        folder = create_run_folder(self.install, self.plan)
        seconds = float(len(self.script.ran))
        count = 1 if end == "failed" else self.plan.steps
        steps = steps_of([seconds] * count, self.plan)
        folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
        folder.log.touch()
        result = conclude(RunEvidence(self.plan, steps)).model_copy(update={"status": end})
        record = new_record(self.plan, (), label=self.label)
        write_record(folder, record.model_copy(update={"status": end, "result": result, "exit_code": 0}))
        recipe = self.plan.recipe
        name, identity = folder.path.parent.name, identity_of(record).key
        ran = {"job_id": name, "scheduler": "local", "dtype": recipe.dtype, "scale": recipe.scale, "label": self.label}
        ended = {"run_id": record.run_id, "identity": identity, "state": "COMPLETED", "status": end}
        folders = {"run_dir": str(folder.path), "experiment": folder.name}
        row = job_row(name, submitted_s=seconds, **folders, **ran, **ended)
        with open_history(self.install, say) as store:
            store.restore([row])  # which may have been rebuilt with it just now
        return EndedRun(folder, record, result)


class Caller:
    """Calls ``run_or_print`` with quick runs, and keeps the JSON that it printed."""

    def __init__(self, install: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.install, self.capsys, self.script = install, capsys, Script()
        self.document: dict[str, Any] = {}

    def locals_of(self, *dtypes: str, label: str | None = None, **choices: Any) -> list[LocalRun]:
        wanted = Choices(label=label, **{"steps": 4, **choices})
        made = [plan_here(Catalogue(), replace(REQUEST, dtype=dtype), wanted, {}, self.install) for dtype in dtypes]
        names = LocalRun.__dataclass_fields__
        return [QuickRun(**{name: getattr(one, name) for name in names}, script=self.script) for one in made]

    def __call__(self, *dtypes: str, repeats: int, start_new: bool = False, **values: Any) -> list[str]:
        """The dtypes that were run, in order."""
        self.script.ran.clear()
        try:
            made = self.locals_of(*dtypes, **values)
            run_or_print(made, [repeats] * len(dtypes), dry_run=False, start_new=start_new, json=True)
        finally:
            self.document = json.loads(self.capsys.readouterr().out)
        return list(self.script.ran)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(tmp_path, capsys)


def test_recipes_run_in_turn_and_the_spread_of_each_is_reported(call: Caller) -> None:
    assert call("fp32", "bf16", repeats=2) == ["fp32", "bf16", "bf16", "fp32"]
    recipes = call.document["recipes"]
    assert [recipe["title"].split()[2] for recipe in recipes] == ["fp32", "bf16"]
    assert [recipe["run_means_s"]["mean"] for recipe in recipes] == [2.5, 2.5]
    assert [run["step_time_s"]["mean"] for run in recipes[0]["runs"]] == [1.0, 4.0]
    assert len({run["id"] for recipe in recipes for run in recipe["runs"]}) == 4


def test_a_run_that_fails_ends_none_of_the_others(call: Caller) -> None:
    call.script.ends = ["success", "failed", "success"]
    with pytest.raises(RunFailed, match="1 of 3 runs failed"):
        call("fp32", repeats=3)
    (recipe,) = call.document["recipes"]
    assert [one["status"] for one in recipe["runs"]] == ["success", "failed", "success"]
    assert recipe["run_means_s"]["count"] == 2


def test_an_invalid_run_has_its_own_exit_code(call: Caller) -> None:
    call.script.ends = ["invalid"]
    with pytest.raises(InvalidRun, match="1 of 2 runs had invalid results"):
        call("fp32", repeats=2)


def test_an_interrupt_keeps_what_ended_and_the_same_command_runs_the_rest(call: Caller) -> None:
    call.script.ends = ["success", "success", UserInterrupt("interrupted")]
    with pytest.raises(UserInterrupt) as raised:
        call("fp32", "bf16", repeats=2, label="night")
    assert "run the same command for the remaining 2" in str(raised.value)
    assert [len(recipe["runs"]) for recipe in call.document["recipes"]] == [1, 1]
    assert call("fp32", "bf16", repeats=2, label="night") == ["bf16", "fp32"]
    assert [len(recipe["runs"]) for recipe in call.document["recipes"]] == [2, 2]
    assert call("fp32", "bf16", repeats=2, label="night") == []
    assert call("fp32", repeats=2, label="night", start_new=True) == ["fp32", "fp32"]


def test_a_failed_run_is_repeated_by_the_same_command(call: Caller) -> None:
    call.script.ends = ["failed"]
    with pytest.raises(RunFailed):
        call("fp32", repeats=2, label="night")
    assert call("fp32", repeats=2, label="night") == ["fp32"]


@pytest.mark.parametrize(
    "other", [{"label": "day"}, {"label": None}, {"label": "night", "steps": 5}, {"label": "night", "seed": 3}]
)
def test_only_repeats_of_the_same_label_and_steps_count(call: Caller, other: dict[str, Any]) -> None:
    call("fp32", repeats=2, label="night")
    assert call("fp32", repeats=2, **other) == ["fp32", "fp32"]


def test_a_full_disk_ends_the_repeats_and_shows_those_before(call: Caller) -> None:
    call.script.ends = ["success", EnvironmentProblem("cannot write")]
    with pytest.raises(EnvironmentProblem):
        call("fp32", repeats=3)
    assert [len(recipe["runs"]) for recipe in call.document["recipes"]] == [1]


def test_progress_and_table_name_the_runs(call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    call.script.ends = ["success", "success", "failed"]
    with pytest.raises(RunFailed):
        run_or_print(call.locals_of("fp32"), [3], dry_run=False, start_new=False, json=False)
    out, err = capsys.readouterr()
    assert out.startswith("1.5 s a step, mean of 2 runs; median 1.5 s, std 0.7071 s (47.14 %), from 1 to 2 s\n")
    assert "llmb: repeat 3 of 3: pretrain_llama3.1 tiny fp32 on 1 x cpu\n" in err
    assert "did not succeed" in err
    run_or_print(call.locals_of("fp32", "bf16"), [2, 2], dry_run=False, start_new=False, json=False)
    assert "llmb: run 2 of 4: pretrain_llama3.1 tiny bf16 on 1 x cpu, repeat 1 of 2\n" in capsys.readouterr().err


def test_a_dry_run_shows_the_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    words = ["run", "pretrain_llama3.1", "tiny", "-n", "1", "--gpu-type", "cpu", "--dtype", "fp32,bf16", "-r", "2"]
    done = CliRunner().invoke(app, [*words, "--dry-run", "--json"])
    assert done.exception is None, done.exception
    found = [(one["title"].split()[2], one["repeat"]) for one in json.loads(done.stdout)["runs"]]
    assert found == [("fp32", 1), ("bf16", 1), ("bf16", 2), ("fp32", 2)]
    assert "fp32 on 1 x cpu, repeat 2 of 2" in CliRunner().invoke(app, [*words, "--dry-run"]).stdout
    assert list(tmp_path.iterdir()) == []


def test_a_second_client_waits_for_the_first(call: Caller) -> None:
    said: list[str] = []

    def make_runs() -> None:
        with runs_lock(call.install, said.append):
            pass

    with ThreadPoolExecutor(1) as pool:
        with runs_lock(call.install, said.append):
            waiting = pool.submit(make_runs)
            while not said:
                time.sleep(0.01)
            assert not waiting.done()
        waiting.result()
    assert said == ["another command is running a series here; waiting for it to end"]


def test_a_copied_run_folder_is_no_other_repeat(call: Caller) -> None:
    call("fp32", repeats=2, label="night")
    folder = next(call.install.glob("workloads/*/experiments/*/*"))
    shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
    with open_history(call.install, print) as store:
        (job,) = (job for job in store.jobs(Filter()) if job.run_dir.startswith(f"{folder}/"))
        copied = str(folder.with_name(f"{folder.name}-copy") / job.experiment)
        store.restore([replace(job, key="copy", job_id="copy", run_dir=copied)])
    assert call("fp32", repeats=3, label="night") == ["fp32"]
