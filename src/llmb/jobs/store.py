# SPDX-License-Identifier: Apache-2.0
"""The history of jobs in SQLite.

Any number of processes may use it concurrently. Every change is one transaction, which is on disk when the call
returns. The result of a query never replaces the result of a later query.
"""

import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args

from llmb.base.errors import EnvironmentProblem, UsageError, unknown
from llmb.base.shown_text import counted
from llmb.jobs.job import CHANGING, COLUMNS, LIVE, NOT_SUBMITTED, SUBMITTING, Job, Kind, Status
from llmb.jobs.states import job_states
from llmb.runs.folder import WRITE_ADVICE, NotWritable, cannot_write
from llmb.runs.record import may_be_short_id

SCHEMA_VERSION = 13
"""The version of the schema; lower versions were written by development versions before 0.1."""
QUERY = "query INTEGER NOT NULL DEFAULT 0"
"""The column with the number of the query that last updated a row."""
NUMBERS = {int: "INTEGER", float: "REAL"}
INDEXES = """
CREATE INDEX jobs_by_time ON jobs (submitted_s);
CREATE INDEX jobs_by_id ON jobs (job_id);
CREATE UNIQUE INDEX jobs_by_repeated ON jobs (retry_of);
CREATE TABLE queries (latest INTEGER NOT NULL);
INSERT INTO queries VALUES (0)
"""
BUSY_S = 20.0  # seconds to wait for another process that is writing
APPLICATION_ID = 0x6C6C6D62  # 'llmb', in the file's header
CAUSES = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}  # why SQLite cannot write
UNLESS_PRESENT = "WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE run_dir = :run_dir AND job_id = :job_id)"
WRONG = """SELECT count(*) FROM jobs WHERE typeof(submitted_s) NOT IN ('real', 'integer') OR typeof(run_dir) != 'text'
    OR submitted_s NOT BETWEEN 0 AND 32503680000"""  # the year 3000: Python's dates end at 9999
_RUNS = "kind = 'run' AND NOT EXISTS (SELECT 1 FROM jobs AS later WHERE later.retry_of = jobs.key AND later.state != ?)"
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM jobs"  # noqa: S608 (names of columns)


class Damaged(EnvironmentProblem):
    """Raised if the history of jobs is not an SQLite database, is corrupt, or is of a development version."""

    def __init__(self, what: str, path: Path) -> None:
        do = "run 'llmb jobs rebuild', which renames the file and rebuilds the history from the run folders"
        super().__init__(f"the history of jobs is damaged: {what}", where=str(path), do=do)


class KeyExists(UsageError):
    """Raised if the history already contains a job with this key, or with the same ``retry_of``."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects jobs; None or an empty value selects all. ``states`` are states or statuses, case-insensitive."""

    states: tuple[str, ...] = ()
    workload: str | None = None
    """A workload, or a workload and a size in one word."""
    campaign: str | None = None
    label: str | None = None
    since_s: float | None = None
    until_s: float | None = None
    runs_only: bool = False
    """True to select only runs, each once with its last job."""
    made_here: bool = False
    """True to omit imported runs."""
    kind: Kind | None = None
    limit: int | None = None
    """The maximum number of jobs; the newest are selected."""


class Store:
    """An open history. Methods raise NotWritable, Damaged, or EnvironmentProblem if the file cannot be read or written.

    Run folders below the install root are stored relative to it; the file is in ``.llmb`` there.

    The modes ``change`` and ``read`` require an existing file; ``read`` rejects changes, and ``memory`` uses an empty
    database without a file.
    """

    def __init__(self, path: Path, mode: Literal["create", "change", "read", "memory"] = "create") -> None:
        self.path = path
        self.root = path.parent.parent
        if mode in ("create", "change"):
            if path.is_dir():
                raise Damaged("it is a folder", path)
            check_writable(path)
        with self._problems():
            self.db = _connection(path, mode)
            self.db.row_factory = self._job
            try:
                self._prepare()
            except BaseException:
                self.db.close()
                raise
        if mode == "read":
            self.lock_changes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.db.close()

    def lock_changes(self) -> None:
        """Make every later change raise NotWritable."""
        self.db.execute("PRAGMA query_only = ON")

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs, and replace jobs that never reached the scheduler; raise KeyExists if one is there already."""
        rows = [self._row(job) for job in jobs]
        try:
            with self._transaction():
                self.db.executemany(f"DELETE FROM jobs WHERE key = :key AND state = '{NOT_SUBMITTED}'", rows)  # noqa: S608
                self.db.executemany(_insert("INSERT"), rows)
        except sqlite3.IntegrityError as error:
            raise KeyExists(f"this job was submitted before: {error}", where=str(self.path)) from error

    def restore(self, jobs: Iterable[Job]) -> int:
        """Add jobs unless the history has their key, or their folder and job id; return the number of added jobs."""
        rows = [self._row(job) for job in jobs]
        with self._transaction():
            before = self.db.total_changes
            self.db.executemany(_insert("INSERT OR IGNORE", UNLESS_PRESENT), rows)
            return self.db.total_changes - before

    def submitted(self, job_ids: Mapping[str, str], cluster: str | None = None) -> None:
        """Set the ids of accepted jobs by their keys, unless a job already has an id."""
        with self._transaction():
            self.db.executemany(
                "UPDATE jobs SET reason = NULL, job_id = ?, cluster = coalesce(?, cluster), state = 'PENDING',"
                " status = 'queued' WHERE key = ? AND job_id IS NULL",
                [(job_id, cluster, key) for key, job_id in job_ids.items()],
            )

    def withdraw(self, keys: Iterable[str]) -> None:
        """Remove the rejected jobs with these keys, except jobs with an id."""
        with self._transaction():
            self.db.executemany("DELETE FROM jobs WHERE key = ? AND job_id IS NULL", [(key,) for key in keys])

    def not_submitted(self, key: str, reason: str) -> None:
        """Record that the job with ``key`` never reached the scheduler."""
        with self._transaction():
            self.db.execute(
                "UPDATE jobs SET state = ?, status = 'failed', reason = ? WHERE key = ? AND job_id IS NULL",
                (NOT_SUBMITTED, reason, key),
            )

    def next_query(self) -> int:
        """Return the number of the next query, which increases with every query, independently of clocks."""
        with self._transaction():
            self.db.execute("UPDATE queries SET latest = latest + 1")
            return self._single("SELECT latest FROM queries", ())

    def apply(self, jobs: Iterable[Job], query: int) -> None:
        """Write the results of a query, except for jobs that a later query has updated."""
        columns = (*CHANGING, "key")
        rows = [{name: getattr(job, name) for name in columns} | {"query": query} for job in jobs]
        values = ", ".join(f"{name} = :{name}" for name in (*CHANGING, "query"))
        with self._transaction():
            self.db.executemany(f"UPDATE jobs SET {values} WHERE key = :key AND query <= :query", rows)  # noqa: S608

    def jobs(self, selection: Filter = Filter()) -> list[Job]:
        """Return the selected jobs in order of submission."""
        where, values = _where(selection)
        limit = "" if selection.limit is None else " LIMIT ?"
        values += [] if selection.limit is None else [selection.limit]
        return self._jobs(f"{_SELECT}{where} ORDER BY submitted_s DESC, rowid DESC{limit}", values)[::-1]

    def count(self, selection: Filter) -> int:
        """Return the number of selected jobs, regardless of the limit."""
        where, values = _where(selection)
        return self._single(f"SELECT count(*) FROM jobs{where}", values)  # noqa: S608

    def live(self) -> list[Job]:
        return self.jobs(Filter(states=LIVE))

    def changeable(self, since_s: float) -> list[Job]:
        """Return jobs that have not ended, and jobs that ended after ``since_s`` and may have been requeued."""
        return self._select("WHERE status IN ('queued', 'running') OR ended_s >= ? ORDER BY submitted_s", since_s)

    def unresolved(self) -> list[Job]:
        """Return jobs that may or may not have reached the scheduler."""
        return self._select("WHERE job_id IS NULL AND state = ? ORDER BY submitted_s", SUBMITTING)

    def failed_with_retries(self, since_s: float) -> list[Job]:
        """Return jobs that have retries, failed after ``since_s`` for a known cause, and were not resubmitted."""
        return self._select(
            "AS failed WHERE status = 'failed' AND retries > 0 AND fault IS NOT NULL AND ended_s >= ? AND NOT EXISTS"
            " (SELECT 1 FROM jobs AS next WHERE next.retry_of = failed.key AND next.state != ?) ORDER BY submitted_s",
            since_s,
            NOT_SUBMITTED,
        )

    def job_ids(self) -> set[str]:
        return {job.job_id for job in self._select("WHERE job_id IS NOT NULL") if job.job_id}

    def find_named(self, text: str) -> list[Job]:
        """Return jobs with the id ``text``, and jobs with a folder name that starts with ``text``."""
        pattern = f"%/{_escaped(text)}%/%"
        jobs = self._select("WHERE job_id = ? OR '/' || run_dir LIKE ? ESCAPE '!' ORDER BY submitted_s", text, pattern)
        return [job for job in jobs if job.job_id == text or job.name.startswith(text)]

    def with_short_id(self, text: str) -> list[Job]:
        """Return runs with a short id that starts with ``text``."""
        if not may_be_short_id(text):
            return []
        return [job for job in self._select("WHERE kind = 'run' ORDER BY submitted_s") if job.id.startswith(text)]

    def _select(self, rest: str, *values: object) -> list[Job]:
        return self._jobs(f"{_SELECT} {rest}", values)

    def _jobs(self, query: str, values: Sequence[object]) -> list[Job]:
        with self._reading() as cursor:
            jobs: list[Job] = cursor.execute(query, values).fetchall()
            return jobs

    def next_try(self, key: str) -> Job | None:
        """Return the job that retries the job with ``key``; None if there is none."""
        return next(iter(self._select("WHERE retry_of = ? AND state != ?", key, NOT_SUBMITTED)), None)

    def by_key(self, key: str) -> Job | None:
        return next(iter(self._select("WHERE key = ?", key)), None)

    def check(self) -> None:
        """Raise Damaged if the database is corrupt, or jobs lack a time or a folder."""
        with self._reading() as cursor:
            cursor.row_factory = None
            (problem,) = cursor.execute("PRAGMA quick_check(1)").fetchone()
            if problem == "ok":
                (wrong,) = cursor.execute(WRONG).fetchone()
                problem = f"{counted(wrong, 'job')} without a valid time or folder" if wrong else problem
        if problem != "ok":
            raise Damaged(problem, self.path)

    def _row(self, job: Job) -> dict[str, Any]:
        path = Path(job.run_dir)  # stored relative to the root, which may be moved or copied
        return asdict(job) | {"run_dir": str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)}

    def _job(self, cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> Job:  # noqa: ARG002 (as sqlite3 calls it)
        values = dict(zip(COLUMNS, row, strict=True))
        return Job(**values | {"run_dir": str(self.root / values["run_dir"])})

    def _prepare(self) -> None:
        self.db.execute("PRAGMA synchronous = EXTRA")
        if self._version() == SCHEMA_VERSION:
            return
        with self._transaction():
            version = self._version()  # another process may have come first
            if version > SCHEMA_VERSION:
                raise EnvironmentProblem(
                    f"the history of jobs has version {version}; this llmb reads version {SCHEMA_VERSION}",
                    where=str(self.path),
                    do="use the newer llmb that wrote it",
                )
            if 0 < version < SCHEMA_VERSION:
                raise Damaged("a development version before 0.1 wrote it", self.path)
            if version == 0:
                self.db.execute(f"CREATE TABLE jobs ({', '.join(map(_column, fields(Job)))}, {QUERY})")
                for statement in INDEXES.split(";"):
                    self.db.execute(statement)
                self.db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self.db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _version(self) -> int:
        return self._single("PRAGMA user_version", ())

    def _single(self, query: str, values: Sequence[object]) -> int:
        with self._reading() as cursor:
            cursor.row_factory = None
            (value,) = cursor.execute(query, values).fetchone()
            return int(value)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Cursor]:
        """Yield a cursor and close it, because a failed cursor would lock the file while its error exists."""
        with self._problems(), closing(self.db.cursor()) as cursor:
            yield cursor

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._problems():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if _code(error) in (0, sqlite3.SQLITE_ERROR):  # text that is not UTF-8, another schema
                raise Damaged(str(error), self.path) from error
            raise _environment_problem(error, self.path) from error
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise Damaged(str(error), self.path) from error


def _column(item: "Field[Any]") -> str:
    types = (item.type, *get_args(item.type))
    kind = next((name for number, name in NUMBERS.items() if number in types), "TEXT")
    needed = "PRIMARY KEY" if item.name == "key" else "" if NoneType in types else "NOT NULL"
    return f"{item.name} {kind} {needed}"


def check_states(states: Sequence[str], store: Store) -> None:
    """Raise UsageError if one of ``states`` is neither a state nor a status, and no job in the history has it."""
    if not states:
        return
    valid = sorted({*job_states(), *get_args(Status)})
    for state in states:
        if state.upper() not in {name.upper() for name in valid} and not store.count(Filter(states=(state,))):
            raise unknown("state", state, valid)


def _connection(path: Path, mode: str) -> sqlite3.Connection:
    if mode == "memory":
        return sqlite3.connect(":memory:", isolation_level=None)
    if mode == "create":
        return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    existing = f"{path.absolute().as_uri()}?mode={'ro' if mode == 'read' else 'rw'}"
    try:
        return sqlite3.connect(existing, uri=True, timeout=BUSY_S, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise EnvironmentProblem(f"the history of jobs cannot be used: {error}", where=str(path)) from error


def _insert(verb: str, where: str = "") -> str:
    return f"{verb} INTO jobs ({', '.join(COLUMNS)}) SELECT {', '.join(f':{name}' for name in COLUMNS)} {where}"


def _where(selection: Filter) -> tuple[str, list[object]]:
    parts: list[str] = []
    values: list[object] = []
    if selection.states:
        marks = ", ".join("?" * len(selection.states))
        parts.append(f"(upper(state) IN ({marks}) OR upper(status) IN ({marks}))")
        values += [state.upper() for state in selection.states] * 2
    if selection.runs_only:
        parts.append(_RUNS)
        values.append(NOT_SUBMITTED)
    if selection.made_here:
        parts.append("key NOT LIKE 'imported-%'")
    if selection.workload is not None:
        parts.append("? IN (workload, workload || '_' || size)")
        values.append(selection.workload)
    for column, operator, value in (
        ("kind", "=", selection.kind),
        ("campaign", "=", selection.campaign),
        ("label", "=", selection.label),
        ("submitted_s", ">=", selection.since_s),
        ("submitted_s", "<=", selection.until_s),
    ):
        if value is not None:
            parts.append(f"{column} {operator} ?")
            values.append(value)
    return (f" WHERE {' AND '.join(parts)}" if parts else ""), values


def _escaped(text: str) -> str:
    return "".join(f"!{letter}" if letter in "!%_" else letter for letter in text)


def check_writable(path: Path) -> None:
    """Raise NotWritable if ``path`` or its folder cannot be written; SQLite would open the file and fail later."""
    for place in (path, path.parent):
        if place.exists() and not os.access(place, os.W_OK):
            cause = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
            raise cannot_write(place, OSError(cause, os.strerror(cause)))


def _code(error: sqlite3.OperationalError) -> int:
    """Return SQLite's primary error code; 0 for an error from Python, such as for text that is not UTF-8."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _environment_problem(error: sqlite3.OperationalError, path: Path) -> EnvironmentProblem:
    problem, code = str(error), _code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return EnvironmentProblem(
            f"another process has been writing to the history of jobs for {BUSY_S:.0f} s",
            where=str(path),
            do="retry; if it fails again, end the process that holds the file (see lsof)",
        )
    kind = NotWritable if code in CAUSES else EnvironmentProblem
    do = WRITE_ADVICE[CAUSES[code]] if code in CAUSES else "check that the folder and the disk can be read"
    problem = "it is read-only" if code == sqlite3.SQLITE_READONLY else problem
    return kind(f"the history of jobs cannot be used: {problem}", where=str(path), do=do)
