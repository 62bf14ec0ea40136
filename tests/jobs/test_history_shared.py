# SPDX-License-Identifier: Apache-2.0
"""The history of an install root that others use too, or that nobody can write: a full disk, a read-only one."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import history_user
import pytest
from history_user import as_user, keep, read
from job_rows import job_row

from llmb.base.errors import InfrastructureError
from llmb.jobs import follow
from llmb.jobs.follow import asker, follow_log
from llmb.jobs.history import database_path, open_history
from llmb.jobs.locks import file_lock
from llmb.jobs.store import Store
from llmb.launch.local import LocalScheduler
from llmb.launch.scheduler_port import JobAnswers, JobHandle
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import NotWritable, cannot_write, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record import queued_record, write_record

OWNER, COLLEAGUE, GROUP = 20_001, 20_002, 30_001


@pytest.fixture
def root(needs: Callable[[str, bool, str], None]) -> Iterator[Path]:
    """An install root of OWNER and GROUP, whose files inherit the group."""
    needs("root", os.geteuid() == 0, "files of two users need root")
    path = Path(tempfile.mkdtemp(prefix="llmb-shared-"))
    try:
        os.chown(path, OWNER, GROUP)
        path.chmod(0o2775)
        yield path
    finally:
        shutil.rmtree(path)


def owner(action: Callable[[], str], umask: int = 0o002) -> str:
    return as_user(OWNER, [GROUP], umask, action)


def colleague(action: Callable[[], str], umask: int = 0o002) -> str:
    return as_user(COLLEAGUE, [GROUP], umask, action)


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(found.relative_to(path)): (found.stat().st_mode, found.read_bytes() if found.is_file() else b"")
        for found in sorted(path.rglob("*"))
    }


def test_colleagues_share_a_history_whoever_is_first(root: Path) -> None:
    assert colleague(lambda: keep(root, "a")) == ""
    assert owner(lambda: keep(root, "b")) == ""
    assert colleague(lambda: keep(root, "c")) == ""
    assert owner(lambda: read(root)) == "a b c"
    for path in (root / ".llmb").rglob("*"):
        assert (path.stat().st_gid, path.stat().st_mode & 0o060) == (GROUP, 0o060), path


def test_a_colleague_who_only_lists_leaves_nothing_behind(root: Path) -> None:
    """The owner's umask lets nobody else write; the folder does, so that SQLite could create files."""
    owner(lambda: keep(root, "a"), umask=0o022)
    (root / ".llmb").chmod(0o2775)
    before = contents(root)
    assert colleague(lambda: read(root)) == "a"
    assert colleague(lambda: keep(root, "b")) == "NotWritable: llmb cannot write: Permission denied"
    assert contents(root) == before
    assert owner(lambda: keep(root, "b")) == ""
    assert as_user(COLLEAGUE, [], 0o022, lambda: read(root)) == "a b"


def test_whoever_lists_an_empty_root_of_others_creates_no_history(root: Path) -> None:
    assert colleague(lambda: read(root)) == ""
    assert read(root) == "", "nor does root"
    assert contents(root) == {}
    assert owner(lambda: read(root)) == ""
    assert database_path(root).exists()


def test_a_lock_of_another_user_does_not_lock_the_owner_out(root: Path) -> None:
    lock = root / "submit.lock"
    lock.touch(0o644)
    os.chown(lock, COLLEAGUE, COLLEAGUE)

    def hold() -> str:
        with file_lock(lock, 0.1, "testing"):
            return "held"

    with file_lock(lock, 1, "testing"):
        assert "another process is testing" in owner(hold)
    assert owner(hold) == "held"


def test_a_lock_that_cannot_be_created_says_why(root: Path) -> None:
    os.chown(root, 0, 0)
    root.chmod(0o755)

    def hold() -> str:
        with file_lock(root / "new.lock", 0.1, "testing"):
            return "held"

    assert "cannot write: Permission denied" in colleague(hold)


def test_the_last_writer_of_a_file_locks_nobody_out(tmp_path: Path) -> None:
    path, before = tmp_path / "run.json", os.umask(0o027)
    try:
        write_atomically(path, "first")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o664)
        os.umask(0o077)
        write_atomically(path, "second")
        assert stat.S_IMODE(path.stat().st_mode) == 0o664
    finally:
        os.umask(before)


def test_a_history_to_read_takes_no_changes_and_creates_no_file(tmp_path: Path) -> None:
    assert keep(tmp_path, "a") == ""
    before = contents(tmp_path)
    with Store(database_path(tmp_path), "read") as store:
        assert [one.key for one in store.jobs()] == ["a"]
        with pytest.raises(NotWritable, match="it is read-only"):
            store.next_query()
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("makes_it_so", "said"),
    [("mount -o remount,bind,ro", "Read-only file system"), ("cp /dev/zero", "database or disk is full")],
)
def test_a_list_needs_no_room_and_no_permission(
    tmp_path: Path, small_disk: Callable[[str], list[str]], makes_it_so: str, said: str
) -> None:
    disk = tmp_path / "disk"
    target = f"{disk}/rest 2>/dev/null" if "zero" in makes_it_so else str(disk)
    call = f"{sys.executable} {history_user.__file__}"
    script = f"{call} keep {disk} a >&2; {makes_it_so} {target}; {call} read {disk}; {call} keep {disk} b"
    done = subprocess.run([*small_disk("1m"), "sh", "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "a", (done.stdout, done.stderr)
    assert "NotWritable" in lines[1]
    assert said in lines[1]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "permissions of the folder"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "is a file"),
    ],
)
def test_advice_follows_the_cause(number: int, advice: str) -> None:
    do = str(cannot_write(Path("/x"), OSError(number, os.strerror(number))).do)
    assert advice in do
    assert ("space" in do) is (number == errno.ENOSPC)


def test_the_log_of_another_users_run_is_followed_to_its_end(
    tmp_path: Path,
    tiny_plan: Callable[..., Plan],
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The history of the owner is not brought up to date, so that the job lives on there; a scheduler that does not
    answer once ends nothing.
    """
    folder = create_run_folder(tmp_path, tiny_plan(steps=2))
    folder.log.write_text("step 0\nstep 1\n")
    record = queued_record(tiny_plan(steps=2), ())
    write_record(folder, record.model_copy(update={"status": "success", "exit_code": 0}))
    ids = {"scheduler": "local", "job_id": "local-1", "run_dir": str(folder.path)}
    with open_history(tmp_path, print) as store:
        store.add([job_row(**ids, state="RUNNING", status="running")])
    path = database_path(tmp_path)
    answers, said = [InfrastructureError("it does not answer")], list[str]()
    states = LocalScheduler.states

    def answer(self: LocalScheduler, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        if answers:
            raise answers.pop()
        return states(self, jobs, time_out_s)

    monkeypatch.setattr(LocalScheduler, "states", answer)
    monkeypatch.setattr(follow, "ASK_EVERY_S", 0.0)
    with Store(path, "read") as store:
        (live,) = store.jobs()
        follow_log(live, asker(store, tmp_path, said.append), sys.stdout.buffer.write, None)
    assert capsysbinary.readouterr().out == b"step 0\nstep 1\n"
    assert said == ["it does not answer"]
