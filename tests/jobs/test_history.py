# SPDX-License-Identifier: Apache-2.0
"""A history is made from the run folders where it is missing, or damaged and rebuilt; names of jobs; logs; locks."""

import io
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_rows import job_row
from quick_order import spec_of

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.jobs.find_jobs import find_job, find_jobs
from llmb.jobs.follow import job_log, start_of_last
from llmb.jobs.history import database_path, open_history, read_history, rebuild_history
from llmb.jobs.job import Job, row_of_record
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Prepared
from llmb.jobs.store import Filter, Store
from llmb.jobs.submit import new_job, record_handle
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import SubmittedJob, queued_record, write_record

Submitted = Callable[..., Job]


@pytest.fixture
def submitted(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Submitted:
    """A run folder of a job that Slurm has taken; the history is not told."""
    plan = tiny_plan(scale=1, steps=10)
    spec = spec_of(plan, tmp_path)

    def submit(key: str, job_id: str, folder: RunFolder | None = None, **values: object) -> Job:
        folder = folder or create_run_folder(tmp_path, plan)
        record = queued_record(plan, ())
        write_record(folder, record)
        job = new_job(Prepared(spec, folder, row_of_record(record)), key, "c")
        handle = SubmittedJob(scheduler="slurm", job_id=job_id, submitted_at="2026-11-21T10:00:00+00:00")
        record_handle(folder, handle.model_copy(update=values), job)
        return job

    return submit


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_new_history_is_empty_and_says_nothing(tmp_path: Path, said: list[str]) -> None:
    with open_history(tmp_path, said.append) as store:
        assert store.jobs() == []
    assert said == []


def test_a_lost_history_is_made_again_with_every_job_of_a_run(
    tmp_path: Path, submitted: Submitted, said: list[str]
) -> None:
    first = submitted("a", "1")
    submitted("a#2", "2", RunFolder(Path(first.run_dir)))
    submitted("b", "3")
    broken = submitted("c", "4")
    Path(broken.run_dir, "job.json").write_text("{")
    with open_history(tmp_path, said.append) as store:
        found = store.jobs()
    assert [(job.key, job.job_id, job.campaign) for job in found] == [
        ("a", "1", "c"),
        ("a#2", "2", "c"),
        ("b", "3", "c"),
    ]
    assert {(job.state, job.status, job.submitted_s) for job in found} == {("PENDING", "queued", 1795255200.0)}
    assert said == ["the history of jobs was rebuilt from 3 jobs in run folders; run 'llmb jobs refresh' to update it"]


@pytest.mark.parametrize("content", [b"garbage " * 1000, b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_damaged_history_is_an_error_until_it_is_rebuilt(
    tmp_path: Path, submitted: Submitted, said: list[str], content: bytes
) -> None:
    job = submitted("a", "1")
    with open_history(tmp_path, said.append):
        pass
    path = database_path(tmp_path)
    path.write_bytes(content)
    said.clear()
    for read in (open_history, read_history):
        with pytest.raises(EnvironmentProblem, match="the history of jobs is damaged") as caught:
            read(tmp_path, said.append)
        assert "llmb jobs rebuild" in str(caught.value.do)
    for _ in range(2):
        with rebuild_history(tmp_path, said.append) as store:
            assert [one.run_dir for one in store.jobs()] == [job.run_dir]
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == content and str(aside) in said[0]
    assert said[-1] == "added 0 jobs from run folders"


def test_two_clients_that_find_none_make_it_once(tmp_path: Path, submitted: Submitted) -> None:
    submitted("a", "1")
    script = (
        "import sys; from pathlib import Path; from llmb.jobs.history import open_history;"
        "print(len(open_history(Path(sys.argv[1]), lambda text: print(text, file=sys.stderr)).jobs()))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=600) for process in both]
    assert [counted for counted, _ in told] == ["1\n", "1\n"]
    assert sum("the history of jobs was rebuilt" in errors for _, errors in told) == 1


def write_ahead_log(path: Path) -> bytes:
    """Files beside the history that a killed process left."""
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA journal_mode = WAL")
    raw.execute("UPDATE jobs SET reason = 'written ahead'")
    raw.commit()
    log = Path(f"{path}-wal").read_bytes()
    raw.close()
    return log


def test_what_a_lost_database_left_behind_is_not_taken_for_a_part_of_the_new_one(
    tmp_path: Path, submitted: Submitted, said: list[str]
) -> None:
    path = database_path(tmp_path)
    with open_history(tmp_path, said.append) as store:
        store.add([submitted("a", "1")])
    log = write_ahead_log(path)
    path.unlink()
    Path(f"{path}-wal").write_bytes(log)
    with open_history(tmp_path, said.append) as store:
        store.check()
        assert [job.key for job in store.jobs()] == ["a"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / ".llmb").write_text("a file")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        open_history(tmp_path, lambda _: None)
    with pytest.raises(EnvironmentProblem, match="unable to open"):
        Store(tmp_path / "nowhere" / "jobs.sqlite")


def test_a_lock_is_held_by_a_child_that_outlives_its_parent(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock", 1, "testing") as descriptor:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    refused = pytest.raises(EnvironmentProblem, match="another process is testing")
    with refused, file_lock(tmp_path / "lock", 0.1, "testing"):
        raise AssertionError("it was free")
    child.communicate()
    with file_lock(tmp_path / "lock", 1, "testing"):
        pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "jobs.sqlite")
    names = {"11": "m_1", "12": "m_2", "120": "other_1", "14": "m_2"}
    opened.add(row(f"k{number}", job_id, name) for number, (job_id, name) in enumerate(names.items()))
    return opened


def row(key: str, job_id: str, name: str) -> Job:
    return job_row(key, job_id=job_id, run_dir=f"/runs/w/{name}/e", submitted_s=float(key[1:]))


@pytest.mark.parametrize(
    ("text", "ids"),
    [("12", ["12"]), ("m_1", ["11"]), ("m_2", ["14"]), ("other", ["120"])],
)  # fmt: skip
def test_jobs_go_by_their_ids_and_by_the_beginning_of_their_names(store: Store, text: str, ids: list[str]) -> None:
    assert [job.job_id for job in find_jobs(store, [text, text])] == ids
    store.close()


def test_names_that_mean_no_job_or_several_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="there is no job 'm_11'") as caught:
        find_jobs(store, ["11", "m_11"])
    assert "m_1" in caught.value.choices
    for text in ("m", "_", "%", ""):
        with pytest.raises(UsageError):
            find_job(store, text)
    store.close()


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_the_last_lines_of_a_log_are_found_from_its_end(end: bytes, count: int) -> None:
    text = b"first\n" + b"x" * 100_000 + b"\nlast" + end
    expected = b"".join(text.splitlines(keepends=True)[-count:]) if count else b""
    assert text[start_of_last(io.BytesIO(text), count) :] == expected


def test_a_run_without_a_log_says_what_its_job_waits_for() -> None:
    job = row("k1", "7", "m_1")
    with pytest.raises(UsageError, match="the job has no log; it is SUBMITTING"):
        list(job_log(job, None))


def test_a_folder_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    messages: list[str] = []
    with read_history(tmp_path / "missing", messages.append) as store:
        assert store.jobs(Filter()) == []
    assert messages == [f"{tmp_path / 'missing'} does not exist, so it has no runs"]
    assert not (tmp_path / "missing").exists()
