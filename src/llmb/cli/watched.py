# SPDX-License-Identifier: Apache-2.0
"""Finds what is to be watched: a run by its job or folder, or a log."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmb.analysis.watched_log import WatchedLog
from llmb.analysis.watched_run import WatchedRun
from llmb.cli.root import install_here
from llmb.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.jobs.find import LATEST, find_run
from llmb.jobs.follow import current
from llmb.jobs.history import read_history
from llmb.jobs.job import Job
from llmb.jobs.store import Filter, Store
from llmb.jobs.wait import last_try
from llmb.prepared.folders import WORKLOADS
from llmb.report.watch_report import WatchedTitle
from llmb.runs.folder import RunFolder
from llmb.runs.record import unreadable_record

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    subject: WatchedRun | WatchedLog
    title: WatchedTitle


@contextmanager
def find_target(text: str | None, say: Say) -> Iterator[Target]:
    """Raises UsageError if ``text`` names nothing, or nothing that trains."""
    with ExitStack() as stack:
        path = Path(text).expanduser() if text else None
        if path and text != LATEST and ("/" in str(text) or path.exists()):
            yield _at(path.resolve(), say, stack)
            return
        install = install_here()
        store = stack.enter_context(read_history(install, say))
        ask = asker(store, install)
        job = (
            _newest_that_lasts(store, ask) if text is None else job_of_label(store, text, ask) or find_run(store, text)
        )
        yield _run(RunFolder(Path(job.run_dir)), last_try(store, job.key), ask)


def asker(store: Store, install: Path) -> Callable[[Job], Job]:
    """Brings a job up to date; that of a retried one is its last attempt."""

    def ask(job: Job) -> Job:
        now = current(store, install, job)
        last = last_try(store, now.key)
        return now if last.key == now.key else last  # a history that must not be changed has it as it was

    return ask


def _newest_that_lasts(store: Store, ask: Callable[[Job], Job]) -> Job:
    """Running ones first; a job of the history may have ended since."""
    if job := _lasting(store.live(), ask):
        return job
    do = "name a job, a run folder or a log, or 'latest'; 'llmb jobs list' shows all"
    raise UsageError("no run is running or queued here", where=str(store.path), do=do)


def job_of_label(store: Store, text: str, ask: Callable[[Job], Job]) -> Job | None:
    """Of the runs with that label the one that lasts, or the newest; None if none has it, or if it is an id, too."""
    jobs = store.jobs(Filter(label=text, runs_only=True))
    if not jobs or store.named(text) or store.with_short_id(text):
        return None
    return _lasting([job for job in jobs if job.live], ask) or jobs[-1]


def _lasting(jobs: Iterable[Job], ask: Callable[[Job], Job]) -> Job | None:
    """The first that has not ended since: running ones are asked first, then the newest."""
    for job in sorted(jobs, key=lambda job: (job.status == "running", job.submitted_s), reverse=True):
        try:
            now = ask(job)
        except (InfrastructureError, EnvironmentProblem):
            now = job
        if now.live and now.kind == "run":
            return now
    return None


def _run(folder: RunFolder, job: Job | None, ask: Callable[[Job], Job]) -> Target:
    try:
        run = WatchedRun(folder, job, ask)
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
    return Target(run, WatchedTitle(path=folder.path, job_id=job.job_id if job else None, plan=run.plan))


def _at(path: Path, say: Say, stack: ExitStack) -> Target:
    """A run folder or a file in one, the only run folder in a folder, or a log."""
    folder = RunFolder(path if path.is_dir() else path.parent)
    if path.is_dir() and not folder.record.exists():
        below = sorted(path.glob("*/run.json"))
        if len(below) != 1:
            do = "name a folder with run.json, or a log"
            raise UsageError("there is no run in this folder", where=str(path), do=do)
        folder = RunFolder(below[0].parent)
    if path.is_dir() or (folder.record.exists() and path in (folder.log, folder.steps, folder.record)):
        return _in_its_install(folder, say, stack)
    if not path.is_file():
        raise UsageError("there is no such file or folder", where=str(path), do="'llmb jobs list' shows all jobs")
    return Target(WatchedLog(path), WatchedTitle(path=path))


def _in_its_install(folder: RunFolder, say: Say, stack: ExitStack) -> Target:
    """With the run's job in the history of the install root that the folder is in; a copy has none."""
    install = next((above.parent for above in folder.path.parents if above.name == WORKLOADS), None)
    if install is None:
        return _run(folder, None, lambda job: job)
    store = stack.enter_context(read_history(install, say))
    own = [job for job in store.named(folder.path.parent.name) if Path(job.run_dir) == folder.path]
    return _run(folder, last_try(store, own[-1].key) if own else None, asker(store, install))
