# SPDX-License-Identifier: Apache-2.0
"""Runs by folder, log, campaign, id and date; those that are not used, with the reason."""

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from timed_runs import write_run

from llmb.base.errors import UsageError
from llmb.jobs.find_runs import MOST_NEAR, earlier_runs, find_ended_runs, find_runs, run_folders
from llmb.runs.analyzed_run import RunSet
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record

ROOT = Path(__file__).parents[1] / "data" / "root"
CAMPAIGN = "20261121-220547-d2e11e"
STEP_LINE = (
    "Training epoch 0, iteration {step}/{last} | lr: 4.491e-06 | global_batch_size: 256 | global_step: {step} |"
    " reduced_train_loss: {loss} | train_step_timing in s: {time}\n"
)


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """An install root with eight runs."""
    shutil.copytree(ROOT, tmp_path / "bench")
    return tmp_path / "bench"


def nemo_log(path: Path, *, steps: int = 50, logged: int | None = None, loss: float = 10.0) -> Path:
    lines = [
        STEP_LINE.format(step=step, last=steps - 1, loss=loss, time=12 + step % 3 / 10)
        for step in range(steps if logged is None else logged)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((f"{path.name}\n", *lines)))
    return path


def found(selector: object, install: Path) -> RunSet:
    return find_runs(str(selector), install, lambda _: None)


def folder_names(runs: RunSet) -> list[str]:
    return [run.path.parent.name.rpartition("_")[2] for run in runs.runs]


def reasons(runs: RunSet) -> list[str]:
    return sorted(one.reason for one in runs.left_out)


def test_runs_are_found_by_folder(install: Path) -> None:
    runs = found(install / "workloads", install)
    assert len(runs.runs) == 6
    assert runs.title == str(install / "workloads")
    first = runs.runs[0]
    assert first.identity.configuration["workload"] == "pretrain_llama3.1"
    assert first.step_times_s == (0.5, 0.5)
    assert first.step_time_s and (first.step_time_s.mean, first.step_time_s.count) == (0.5, 2)
    assert first.window and (first.window.first, first.window.last) == (7, 8)
    assert first.status == "success" and first.reason is None
    assert [run.started_s for run in runs.runs] == sorted(run.started_s or 0 for run in runs.runs)
    assert "it is queued" in reasons(runs)
    assert any(reason.startswith("failed: the workers ended with exit code 3") for reason in reasons(runs))


def test_every_run_that_ended_is_found_for_whoever_judges_it(install: Path) -> None:
    (measured,) = (run.path for run in found("2_0", install).runs)
    (measured / "metrics.jsonl").unlink()
    runs = find_ended_runs(str(install / "workloads"), install, lambda _: None)
    assert sorted(run.status for run in runs.runs) == ["failed", "invalid", *5 * ["success"]]
    unmeasured = next(run for run in runs.runs if run.status == "invalid")
    assert str(unmeasured.reason).startswith("there are no steps in ")
    failed = next(run for run in runs.runs if run.status == "failed")
    assert failed.step_time_s is None and failed.step_times_s == () and "exit code 3" in str(failed.reason)
    assert reasons(runs) == ["it is queued"]


def test_a_campaign_a_job_and_a_run_are_found_by_their_ids(install: Path) -> None:
    assert len(found(CAMPAIGN, install).runs) == 2
    assert len(found(f"campaign:{CAMPAIGN}", install).runs) == 2
    assert folder_names(found("7", install)) == ["1795298748"]
    assert (
        folder_names(found("1", install)) == folder_names(found("9", install)) == ["1795298745"]
    )  # was submitted twice
    assert folder_names(found("2_0", install)) == ["1795298746.0"]
    (run,) = found("2_0", install).runs
    assert found(run.id, install).runs == (run,)
    assert found(run.path.parent.name, install).runs == (run,)
    (run.path / "run.json").write_text((run.path / "run.json").read_text().replace('label": null', 'label": "2_0"'))
    with pytest.raises(UsageError, match=rf"valid: label:2_0 \(1 run\), {run.id}\n"):
        run_folders("2_0", install, lambda _: None)


def test_runs_are_found_by_the_days_on_which_they_started(install: Path) -> None:
    day = datetime.fromisoformat("2026-11-21T22:05:47+00:00").astimezone().date()
    assert len(found(day, install).runs) == 6
    assert len(found(f"2026-11-01..{day}", install).runs) == 6
    assert found("2026-11-01..2026-11-19", install).runs == ()
    with pytest.raises(UsageError, match="ends before it begins"):
        found("2026-11-07..2026-11-01", install)
    with pytest.raises(UsageError, match="is not a valid date"):
        found("2026-02-30", install)
    with pytest.raises(UsageError, match="is not a valid date"):
        found("9999-12-31", install)


def test_the_latest_run_is_the_one_that_started_last(install: Path) -> None:
    assert folder_names(found("latest", install)) == ["1795298778"]


def test_a_word_with_two_meanings_is_refused_with_both(
    install: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nemo_log(tmp_path / "7" / "log-other.out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        found("7", install)
    assert error.value.choices == ("id:7 (1 run)", "./7 (a folder here)")
    assert folder_names(found("id:7", install)) == ["1795298748"]
    assert [run.path.name for run in found("./7", install).runs] == ["log-other.out"]


def test_an_id_that_two_jobs_have_is_refused_with_their_folders(install: Path) -> None:
    for path in install.rglob("job.json"):
        job = json.loads(path.read_text())
        if job["job_id"] == "6":
            path.write_text(json.dumps(job | {"job_id": "7"}))
    with pytest.raises(UsageError, match="'7' is ambiguous") as error:
        found("7", install)
    assert all("/experiments/" in choice for choice in error.value.choices)


def test_an_unknown_word_is_refused_with_what_is_near(install: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        found(CAMPAIGN[:-1], install)
    assert CAMPAIGN in error.value.choices
    with pytest.raises(UsageError, match="there is no regular file or folder"):
        found("./nothing", install)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no '\*\.out' file"):
        found(tmp_path / "empty", install)


def test_logs_without_a_record_are_runs(install: Path, tmp_path: Path) -> None:
    name = "log-account.pretrain_llama3_8b_bf16_gpus8_tp1_pp1_cp1_vp1_mbs1_gbs256_{}_0.out"
    one, two = (nemo_log(tmp_path / "logs" / name.format(job)) for job in (1234567, 1234568))
    nemo_log(tmp_path / "logs" / "log-died_1_0.out", logged=20)
    nemo_log(tmp_path / "logs" / "log-nan_1_0.out", loss=float("nan"))
    nemo_log(tmp_path / "logs" / "log-pretrain_x_nsys_1_0.out")
    nemo_log(tmp_path / "logs" / "train.log")
    runs = found(tmp_path / "logs", install)
    assert [run.path for run in runs.runs] == [one, two]
    assert len({run.identity.key for run in runs.runs}) == 1
    assert len({run.id for run in runs.runs}) == 2
    assert runs.runs[0].step_time_s and runs.runs[0].step_time_s.count == 10
    assert [one.split()[0].strip(":") for one in reasons(runs)] == ["incomplete", "invalid", "profiled", "specify"]
    assert [run.path for run in found(two, install).runs] == [two]


def test_the_log_of_a_run_folder_is_that_run(install: Path) -> None:
    (folder,) = (run.path for run in found("2_0", install).runs)
    assert found(RunFolder(folder).log, install).runs == found(folder, install).runs


def test_a_damaged_record_is_left_out_with_the_reason(install: Path) -> None:
    (folder,) = (run.path for run in found("2_0", install).runs)
    (folder / "run.json").write_text("{")
    runs = found(install / "workloads", install)
    assert len(runs.runs) == 5
    (damaged,) = (one for one in runs.left_out if one.run == str(folder))
    assert damaged.reason.startswith("cannot be read: it is damaged")
    assert damaged.reason.endswith("(run.json)")


def test_runs_are_found_by_their_label(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    for number, label in enumerate(["old", "old", "new", None]):
        write_run(tmp_path, tiny_plan(), 50 * [1.0 + number], number=number, label=label)
    assert [run.step_times_s[0] for run in found("old", tmp_path).runs] == [1.0, 2.0]
    assert [run.label for run in found("label:new", tmp_path).runs] == ["new"]
    with pytest.raises(UsageError) as error:
        found("ne", tmp_path)
    assert "new" in error.value.choices


def test_a_label_that_is_a_campaign_too_is_refused_unless_both_are_the_same_runs(
    install: Path, tiny_plan: Callable[..., Plan]
) -> None:
    write_run(install, tiny_plan(), 50 * [1.0], label=CAMPAIGN)
    with pytest.raises(UsageError) as error:
        found(CAMPAIGN, install)
    assert error.value.choices == (f"label:{CAMPAIGN} (1 run)", f"campaign:{CAMPAIGN} (2 runs)")
    assert len(found(f"label:{CAMPAIGN}", install).runs) == 1


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_name_is_not_the_current_folder(text: str, install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(install)
    with pytest.raises(UsageError, match="the name is empty"):
        found(text, install)


def test_the_latest_of_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no runs yet"):
        found("latest", tmp_path)


def test_records_that_do_not_name_what_is_asked_for_are_not_parsed(
    tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    """Parsing takes most of the time: damage in a record of another label is not even seen, and a cut one is named."""
    folders = [write_run(tmp_path, tiny_plan(), [2.0] * 50, number=n, label=f"label-{n}") for n in range(3)]
    folders[1].record.write_text('{"label": "label-1"}')
    said: list[str] = []

    def ids(selector: str) -> list[str]:
        said.clear()
        return [run.id for run in find_runs(selector, tmp_path, said.append).runs]

    own = read_record(folders[0])
    assert ids("label-0") == ids("label:label-0") == ids(own.id) == ids(folders[0].path.parent.name) == [own.id]
    assert said == []
    folders[2].record.write_text(folders[2].record.read_text()[:300])
    assert ids("label-0") == [own.id]
    assert len(said) == 1 and str(folders[2].path) in said[0]
    with pytest.raises(UsageError, match="neither a file nor the label"):
        ids("label-1")
    assert len(said) > 1 and any(str(folders[1].path) in text for text in said)


def test_a_label_with_letters_that_a_record_may_escape_is_found(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    folder = write_run(tmp_path, tiny_plan(), [2.0] * 50, label="größe")
    write_run(tmp_path, tiny_plan(), [2.0] * 50, number=1, label="other")
    folder.record.write_text(json.dumps(json.loads(folder.record.read_text())))
    assert "\\u00f6" in folder.record.read_text()
    assert [run.path for run in found("größe", tmp_path).runs] == [folder.path]


def test_no_more_repeats_of_a_run_are_read_than_are_made_next_to_it(
    tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    folders = [write_run(tmp_path, tiny_plan(), [2.0] * 50, number=n) for n in range(MOST_NEAR + 4)]
    every = find_runs(str(tmp_path), tmp_path, lambda _: None).runs

    def near(place: int) -> list[int]:
        return [int(run.path.parent.name[-2:]) for run in earlier_runs(tmp_path, lambda _: None)(every[place])]

    last = len(folders) - 1
    assert near(0) == list(range(MOST_NEAR))
    assert near(last) == list(range(last - MOST_NEAR, last + 1))
    assert near(2) == list(range(2 + MOST_NEAR))


def test_what_records_have_alike_is_kept_once(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    """Thousands of runs of one recipe fit into memory."""
    first, second = (read_record(write_run(tmp_path, tiny_plan(), [2.0] * 50, number=n)) for n in range(2))
    other = read_record(write_run(tmp_path, tiny_plan(seed=7), [2.0] * 50, number=2))
    assert first.plan is second.plan and first.environment is second.environment and first.origin is second.origin
    assert first.run_id != second.run_id and first.plan is not other.plan and other.plan.seed == 7
