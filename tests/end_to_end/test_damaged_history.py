# SPDX-License-Identifier: Apache-2.0
"""Whatever is where the history of jobs should be, each command works or says which command repairs it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from timed_runs import noisy_times, write_run

from llmb.cli.main import app, exit_code_of
from llmb.jobs import store
from llmb.jobs.history import database_path, open_history
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import SubmittedJob, now

COMMANDS = (
    ("jobs", "list"),
    ("jobs", "show", "latest"),
    ("runs",),
    ("result", "latest"),
    ("jobs", "refresh"),
    ("judge", "latest"),
)


def execute(*statements: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with sqlite3.connect(path, isolation_level=None) as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def zero_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)


def garble_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(20_000)),
    "zero pages": zero_pages,
    "garbled pages": garble_pages,
    "text": lambda path: path.write_text("no database\n" * 1000),
    "a folder": make_folder,
    "another schema": execute("DROP TABLE jobs", "CREATE TABLE jobs (a, b)"),
    "no table": execute("DROP TABLE jobs"),
    "text for a number": execute("UPDATE jobs SET submitted_s = 'soon'"),
    "blob for a folder": execute("UPDATE jobs SET run_dir = x'ff00fe'"),
    "text that is no UTF-8": execute("UPDATE jobs SET reason = CAST(x'ff00fe' AS TEXT)"),
    "huge text": execute("UPDATE jobs SET reason = printf('%.*c', 20000000, 'x')"),
    "a later year": execute("UPDATE jobs SET submitted_s = 1e18"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_command_works_or_names_the_one_that_repairs(
    tmp_path: Path,
    kind: str,
    tiny_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.setattr(store, "BUSY_S", 0.2)
    plan = tiny_plan()
    write_run(tmp_path, plan, noisy_times(2.0, 0.005, plan.steps, seed=1), number=1)
    for record in tmp_path.rglob("run.json"):
        job = SubmittedJob(scheduler="local", job_id="local-1", submitted_at=now(), key="k1")
        RunFolder(record.parent).job.write_text(job.model_dump_json())
    with open_history(tmp_path, lambda _: None) as history:
        assert len(history.jobs()) == 1
    DAMAGE[kind](database_path(tmp_path))
    for command in COMMANDS:
        code = exit_code_of(app, list(command))
        out, said = capsys.readouterr()
        assert "Traceback" not in said and "internal" not in said, (command, said)
        assert code in (0, 5, 6) or (code in (2, 3) and "llmb jobs rebuild" in said), (command, code, said, out[-300:])
    assert exit_code_of(app, ["jobs", "rebuild"]) == 0, capsys.readouterr().err
    assert exit_code_of(app, ["jobs", "list"]) == 0, capsys.readouterr().err
