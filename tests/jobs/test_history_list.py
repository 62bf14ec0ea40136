# SPDX-License-Identifier: Apache-2.0
"""Runs are found by short ids, labels and as the latest one."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_rows import job_row
from typer.testing import CliRunner

from llmb.base.errors import UsageError
from llmb.cli.main import app, exit_code_of
from llmb.jobs.find_jobs import find_job
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.store import Filter, Store
from llmb.runs.folder import RunFolder, link_latest
from llmb.runs.record import short_id


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Below a folder whose name begins like a short id."""
    root = tmp_path / "work" / "bench"
    root.mkdir(parents=True)
    monkeypatch.setenv("LLMB_INSTALL", str(root))
    return root


@pytest.fixture
def store(install: Path) -> Iterator[Store]:
    with open_history(install, print) as opened:
        yield opened


@pytest.fixture
def job(install: Path) -> Callable[..., Job]:
    def made(number: int, **fields: object) -> Job:
        run_dir = install / "workloads" / "w" / "experiments" / "exp" / f"exp_{number}" / "exp"
        run = {"job_id": str(4000 + number), "run_dir": str(run_dir), "workload": "w", "size": "8b"}
        ended = {"submitted_s": 1000.0 + number, "state": "COMPLETED", "status": "success", "checked_s": 1.0}
        return job_row(**{"key": f"k{number}", **run, **ended, **fields})

    return made


def test_a_run_goes_by_its_short_id_and_its_beginning(store: Store, job: Callable[..., Job]) -> None:
    jobs = [job(number) for number in range(20)]
    store.add(jobs)
    for one in jobs:
        assert one.id == short_id(one.name)
        assert find_job(store, one.id) == one
    first = jobs[7].id
    length = next(n for n in range(1, 9) if sum(one.id.startswith(first[:n]) for one in jobs) == 1)
    assert find_job(store, first[:length]) == jobs[7]
    with pytest.raises(UsageError, match="matches"):
        find_job(store, next(letter for letter in "klmnopqrstuvwxyz" if sum(one.id[0] == letter for one in jobs) > 1))


def test_a_folder_above_is_no_name_of_a_run(store: Store, job: Callable[..., Job]) -> None:
    """``work`` is a part of the path of every run here, and could be the beginning of an id."""
    store.add([job(1)])
    with pytest.raises(UsageError, match="there is no job 'work'"):
        find_job(store, "work")
    assert find_job(store, "exp_1") == job(1)


def test_a_run_from_the_future_is_not_the_latest_for_ever(store: Store, job: Callable[..., Job]) -> None:
    """The clock of another node was wrong; alone it is still found."""
    store.add([job(9, submitted_s=time.time() + 10**6)])
    assert find_job(store, "latest").key == "k9"
    store.add([job(8, submitted_s=time.time() + 60)])
    assert find_job(store, "latest").key == "k8"


def test_the_latest_is_the_newest_run_not_a_preparation(store: Store, job: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match="there are no runs yet"):
        find_job(store, "latest")
    store.add([job(1), job(3), job(2), job(9, kind="preparation", subject="dataset")])
    assert find_job(store, "latest").key == "k3"


def test_the_latest_is_no_imported_run(store: Store, job: Callable[..., Job]) -> None:
    store.add([replace(job(1), key="imported-1")])
    with pytest.raises(UsageError, match="imported ones do not count"):
        find_job(store, "latest")


def test_jobs_are_listed_by_kind_and_only_runs_have_results(store: Store, job: Callable[..., Job]) -> None:
    kinds = {"preparation": "dataset", "benchmark": "gpus", "check": "node7"}
    others = [job(n, kind=kind, subject=kinds[kind]) for n, kind in enumerate(kinds, 2)]
    store.add([job(1), *(replace(one, workload="", size="") if one.kind != "preparation" else one for one in others)])

    def listed(*words: str) -> list[str]:
        done = CliRunner().invoke(app, ["jobs", "list", *words, "--json"])
        return [row["subject"] for row in json.loads(done.stdout)["jobs"]]

    assert listed() == ["", *kinds.values()]
    assert [listed("--kind", kind) for kind in kinds] == [[subject] for subject in kinds.values()]
    rows = CliRunner().invoke(app, ["jobs"]).stdout.splitlines()[2:]
    cells = [row.split()[2:4] for row in rows[1:]]
    assert cells == [["preparation", "w"], ["benchmark", "gpus"], ["check", "node7"]]
    for words in (["result"], ["watch", "--once"]):
        done = CliRunner().invoke(app, [*words, "4003"])
        assert isinstance(done.exception, UsageError)
        assert "job 4003 is a benchmark (gpus)" in done.exception.what


def test_a_retried_run_is_listed_once(store: Store, job: Callable[..., Job]) -> None:
    first = job(1, status="failed", state="FAILED")
    again = job(1, key="k1#2", retry_of="k1", job_id="5000", submitted_s=2000.0)
    store.add([first, again, job(2), job(3, kind="preparation", subject="dataset")])
    assert [one.key for one in store.jobs(Filter(runs_only=True))] == ["k2", "k1#2"]
    assert store.count(Filter(runs_only=True)) == 2
    assert find_job(store, first.id).key == "k1#2"


def test_runs_are_listed_by_label_status_and_time(store: Store, job: Callable[..., Job]) -> None:
    store.add(
        [job(1, label="a", verdict="pass", step_time_s=1.5), job(2, label="b"), job(3, label="a", status="failed")]
    )

    def listed(*words: str) -> list[int]:
        done = CliRunner().invoke(app, ["runs", *words, "--json"])
        assert done.exception is None, done.exception
        return [int(run["job_id"]) - 4000 for run in json.loads(done.stdout)["runs"]]

    assert listed() == [1, 2, 3]
    assert listed("--label", "a") == [1, 3]
    assert listed("--label", "a", "--status", "success") == [1]
    assert listed("--limit", "1") == [3]
    assert listed("--since", "1d") == []
    assert listed("-w", "w_8b") == [1, 2, 3]
    jobs = json.loads(CliRunner().invoke(app, ["jobs", "list", "--label", "a", "--json"]).stdout)["jobs"]
    assert [one["label"] for one in jobs] == ["a", "a"]
    table = CliRunner().invoke(app, ["runs"]).stdout.splitlines()
    assert table[1].split() == ["id", "label", "date", "recipe", "scale", "status", "step", "s", "verdict"]
    assert table[2].split()[:2] == [job(1).id, "a"]
    assert table[2].split()[-3:] == ["success", "1.5", "pass"]


@pytest.fixture
def folder(install: Path) -> RunFolder:
    made = RunFolder(install / "workloads" / "w" / "experiments" / "exp" / "exp_1" / "exp")
    made.path.mkdir(parents=True)
    return made


def test_the_link_leads_to_the_newest_run_wherever_the_root_is_mounted(install: Path, folder: RunFolder) -> None:
    (install / "latest").symlink_to("somewhere/else")
    link_latest(install, folder)
    assert (install / "latest").resolve() == folder.path.resolve()
    assert not (install / "latest").readlink().is_absolute()
    assert sorted(path.name for path in install.iterdir()) == ["latest", "workloads"]
    (install / "latest").unlink()
    (install / "latest").write_text("mine")
    link_latest(install, folder)
    assert (install / "latest").read_text() == "mine", "it is no link"
    link_latest(install / "missing", folder)
    assert not (install / "missing").exists()


def test_a_result_is_found_through_the_link(
    install: Path, monkeypatch: pytest.MonkeyPatch, tiny_plan: Callable[..., object]
) -> None:
    """In the install root ``latest`` is also a folder, whose name is that of no run."""
    from llmb.runs.experiment import create_run_folder
    from llmb.runs.record import queued_record, write_record

    run = create_run_folder(install, tiny_plan())  # type: ignore[arg-type]
    write_record(run, queued_record(tiny_plan(), ()))  # type: ignore[arg-type]
    link_latest(install, run)
    monkeypatch.chdir(install)
    for words in (["./latest"], [str(install / "latest")]):
        done = CliRunner().invoke(app, ["result", *words])
        assert isinstance(done.exception, UsageError)
        assert done.exception.where == str(run.path.resolve())


def test_a_label_is_told_from_an_id(store: Store, job: Callable[..., Job]) -> None:
    store.add([job(1, label="before"), job(2, label="before")])
    with pytest.raises(UsageError, match="'before' is not an id, but the label of 2 runs") as caught:
        find_job(store, "before")
    assert caught.value.do and "llmb runs --label before" in caught.value.do
    shown = CliRunner().invoke(app, ["jobs", "show", "before"])
    assert shown.stdout.startswith("Job 4002: ") and "2 runs have the label 'before'" in shown.stderr


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move])
def test_a_moved_or_copied_root_finds_its_own_runs(
    store: Store, job: Callable[..., Job], install: Path, tmp_path: Path, move: Callable[[Path, Path], object]
) -> None:
    store.add([job(1), job(2), job(3, run_dir="/elsewhere/exp_3/exp")])
    store.close()
    move(install, tmp_path / "other")
    with open_history(tmp_path / "other", print) as other:
        found = other.jobs()
        assert other.find_named("exp_2") == [found[1]]
        assert other.restore(found) == 0
    folders = "workloads/w/experiments/exp/exp_1/exp", "workloads/w/experiments/exp/exp_2/exp"
    assert [one.run_dir for one in found] == [
        *(str(tmp_path / "other" / folder) for folder in folders),
        "/elsewhere/exp_3/exp",
    ]


def test_a_name_that_no_run_has_is_told_with_those_that_there_are(
    store: Store, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> list[str]:
        assert exit_code_of(app, ["runs", "--no-refresh", *words]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "no run has" in line]

    store.add([job(1, label="before"), job(2, label="after")])
    assert said("--label", "before", "--since", "2026-01-01") == []
    assert said("--label", "befor", "--json") == [
        "llmb: no run has the label 'befor'; did you mean 'before'?; labels: after, before"
    ]
    assert said("--campaign", "x", "-w", "w") == ["llmb: no run has the campaign 'x', or any other campaign"]
    assert said("-w", "w_8b") == []
