# SPDX-License-Identifier: Apache-2.0
"""The history of jobs: what two processes, a kill, a full disk and an older version do to it."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import store_writer
from job_rows import job_row

import llmb.jobs.store
from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.jobs.job import COLUMNS, Job, stale
from llmb.jobs.store import SCHEMA_VERSION, Damaged, Filter, KeyExists, Store, check_states


def seen(**changes: object) -> Job:
    return job_row(**{"state": "RUNNING", "status": "running", "checked_s": 10.0, **changes})


def writer(*arguments: str, prefix: list[str] | None = None) -> subprocess.Popen[str]:
    command = [*(prefix or []), sys.executable, store_writer.__file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened


def test_what_was_written_is_read_by_the_next_process(path: Path, store: Store) -> None:
    ended = {"exit_code": 3, "signal": 9, "nodes": "n[1-2]", "restarts": 2, "started_s": 2.5, "ended_s": 3.5}
    again = {"retries": 1, "retry_of": "a", "fault": "f", "bad_nodes": "n1", "step_time_s": 0.5}
    whole = job_row("b", job_id="7", campaign="c", reason="r", checked_s=4.5, **ended, **again)
    store.add([job_row(), whole])
    with Store(path) as other:
        assert other.jobs() == [job_row(), whole]
        assert other.by_key("b") == whole
        assert other.by_key("c") is None


def test_a_key_is_taken_once_and_a_group_is_added_whole_or_not_at_all(store: Store) -> None:
    store.add([job_row()])
    with pytest.raises(KeyExists):
        store.add([job_row("new"), job_row()])
    assert [found.key for found in store.jobs()] == ["a"]
    store.add([job_row("again", retry_of="a")])
    with pytest.raises(KeyExists):
        store.add([job_row("and again", retry_of="a")])


def test_an_id_is_given_once(store: Store) -> None:
    store.add([job_row(), job_row("refused")])
    store.submitted({"a": "7"})
    store.submitted({"a": "8"})
    store.not_submitted("a", "late news")
    store.not_submitted("refused", "no such partition")
    first, second = store.jobs()
    assert (first.job_id, first.state, first.status) == ("7", "PENDING", "queued")
    assert (second.state, second.status, second.reason) == ("NOT_SUBMITTED", "failed", "no such partition")
    assert store.live() == [first]


def test_what_never_reached_slurm_may_be_tried_again(store: Store) -> None:
    store.add([job_row(), job_row("refused"), job_row("lost")])
    store.submitted({"a": "7"})
    store.withdraw(["a", "refused"])
    store.not_submitted("lost", "the client died")
    assert [found.key for found in store.jobs()] == ["a", "lost"]
    store.add([job_row("lost"), job_row("refused")])
    assert {found.key for found in store.live()} == {"a", "lost", "refused"}


def test_what_was_seen_later_stays(store: Store) -> None:
    store.add([job_row()])
    first, second, third = (store.next_query() for _ in range(3))
    store.apply([seen(checked_s=20.0, state="COMPLETED", status="success", ended_s=19.0)], second)
    store.apply([seen(checked_s=15.0)], first)
    assert store.jobs()[0].state == "COMPLETED"
    store.apply([seen(checked_s=21.0, restarts=1)], third)  # Slurm put it back
    assert (store.jobs()[0].state, store.jobs()[0].ended_s, store.jobs()[0].restarts) == ("RUNNING", None, 1)


def test_a_clock_that_was_a_day_ahead_hides_no_later_end(store: Store) -> None:
    store.add([job_row()])
    store.apply([seen(checked_s=86_400.0)], store.next_query())
    assert stale(store.jobs(), 20.0, 10.0), "so a list asks again"
    store.apply([seen(checked_s=20.0, state="CANCELLED", status="cancelled")], store.next_query())
    assert (store.jobs()[0].status, store.jobs()[0].checked_s) == ("cancelled", 20.0)


def test_filters(store: Store) -> None:
    store.add(
        [
            job_row("a", submitted_s=1, workload="w"),
            job_row("b", submitted_s=2, campaign="c"),
            job_row("c", submitted_s=3, state="TIMEOUT", status="success"),
            job_row("d", submitted_s=4, state="TIMEOUT", status="failed"),
        ]
    )

    def keys(**wanted: object) -> str:
        return "".join(found.key for found in store.jobs(Filter(**wanted)))

    assert keys() == "abcd"
    assert keys(limit=2) == "cd"
    assert keys(workload="w") == "a"
    assert keys(workload="w_tiny") == "a"
    assert keys(workload="w_8b") == ""
    assert keys(campaign="c") == "b"
    assert keys(since_s=2.0) == "bcd"
    assert keys(states=("timeout",)) == "cd"
    assert keys(states=("SUCCESS", "submitting")) == "abc"
    assert keys(states=("timeout",), limit=1) == "d"
    assert store.count(Filter(states=("timeout",), limit=1)) == 2


def test_a_state_of_a_later_slurm_can_be_selected_once_a_job_has_it(store: Store) -> None:
    check_states(["timeout", "SUCCESS"], store)
    with pytest.raises(UsageError, match="unknown state 'NEWSTATE'"):
        check_states(["NEWSTATE"], store)
    store.add([job_row(state="NEWSTATE", status="running")])
    check_states(["newstate"], store)


def test_two_processes_hammer_it_and_nothing_is_lost_or_taken_twice(path: Path) -> None:
    both = [writer("hammer", str(path), name) for name in ("one", "two")]
    outputs = [process.communicate(timeout=6000) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    won = [int(number) for out, _ in outputs for number in out.split()]
    assert sorted(won) == list(range(40))
    with Store(path) as store:
        store.check()
        found = {one.key: one for one in store.jobs()}
        assert len(found) == 120
        assert {one.state for one in found.values()} == {"RUNNING"}
        assert all(found[f"{name}-{n}"].job_id == f"{name}{n}" for name in ("one", "two") for n in range(40))


def test_a_process_killed_in_a_transaction_leaves_the_state_before_it(path: Path, store: Store) -> None:
    store.add([job_row()])
    process = writer("die", str(path))
    process.communicate(timeout=600)
    assert process.returncode == -9
    assert store.jobs() == [job_row()]
    store.close()
    with Store(path) as again:
        again.check()
        assert again.jobs() == [job_row()]
        again.submitted({"a": "7"})


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, small_disk: Callable[[str], list[str]]) -> None:
    process = writer("fill", str(tmp_path / "disk" / "jobs.sqlite"), prefix=small_disk("512k"))
    out, err = process.communicate(timeout=600)
    taken, kind, said = out.strip().split("|")
    assert (kind, said) == ("NotWritable", "the history of jobs cannot be used: database or disk is full"), err
    with Store(tmp_path / "kept" / "jobs.sqlite") as store:
        store.check()
        assert len(store.jobs()) == int(taken) > 10


def test_a_broken_page_is_found(path: Path) -> None:
    with Store(path) as store:
        store.add([job_row(f"{number}", run_dir="/runs" * 50) for number in range(200)])
    content = bytearray(path.read_bytes())
    content[20_000:30_000] = b"\x5a" * 10_000
    path.write_bytes(content)
    with Store(path) as store, pytest.raises(Damaged):
        store.check()


def test_its_columns_are_the_fields_of_a_job(path: Path) -> None:
    Store(path).close()
    raw = sqlite3.connect(path)
    names = {name for _, name, *_ in raw.execute("PRAGMA table_info(jobs)")}
    raw.close()
    assert names == {*COLUMNS, "query"}


def test_a_history_of_a_development_version_is_refused(path: Path) -> None:
    old = sqlite3.connect(path)
    old.executescript("CREATE TABLE jobs (key TEXT); PRAGMA user_version = 10")
    old.close()
    with pytest.raises(Damaged, match="a development version before"):
        Store(path)


def test_a_history_of_a_later_version_is_left_alone(path: Path) -> None:
    with Store(path) as store:
        store.add([job_row()])
    raw = sqlite3.connect(path)
    raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(EnvironmentProblem, match=f"reads version {SCHEMA_VERSION}"):
        Store(path)
    assert path.read_bytes() == before


def test_a_text_that_is_not_utf8_is_an_error_with_advice(store: Store) -> None:
    store.add([job_row()])
    store.db.execute("UPDATE jobs SET reason = CAST(x'ff41' AS TEXT)")
    with pytest.raises(EnvironmentProblem, match="Could not decode to UTF-8"):
        store.jobs()


def test_a_read_that_failed_keeps_nobody_from_writing(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its error, and what that refers to, is kept."""
    store.add([job_row()])
    store.db.execute("UPDATE jobs SET reason = CAST(x'ff41' AS TEXT)")
    with pytest.raises(EnvironmentProblem) as kept:
        store.jobs()
    monkeypatch.setattr(llmb.jobs.store, "BUSY_S", 0.1)
    with Store(path) as other:
        assert other.next_query() == 1
    assert "Could not decode to UTF-8" in kept.value.what


def test_people_may_read_while_somebody_writes(path: Path, store: Store) -> None:
    store.add([job_row()])
    with Store(path) as other:
        other.db.execute("BEGIN IMMEDIATE")
        other.db.execute("UPDATE jobs SET state = 'RUNNING'")
        assert store.jobs() == [job_row()]
        other.db.execute("ROLLBACK")
    assert replace(job_row(), state="x") != job_row()
