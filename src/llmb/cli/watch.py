# SPDX-License-Identifier: Apache-2.0
"""``llmb watch``: follows the log of a run, with its pace and the time left."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from llmb.base.errors import InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.base.input_files import check_reachable
from llmb.base.trust import WORKLOADS
from llmb.cli.common import Json
from llmb.cli.jobs import ExpectS, lines_of
from llmb.cli.root import install_here, say
from llmb.cli.runs import print_result
from llmb.cli.shared_options import complete_run
from llmb.jobs.find_jobs import LATEST, find_run
from llmb.jobs.follow import Ask, asker, follow_log, job_of_folder
from llmb.jobs.history import read_history
from llmb.jobs.job import Job
from llmb.jobs.local_run import raise_unless_successful
from llmb.jobs.pace import RunView, WatchedRun
from llmb.jobs.store import Filter, Store
from llmb.jobs.wait import exit_code, last_try
from llmb.launch.programs.conclude import read_ended_run
from llmb.reports.jobs_report import watch_document, watch_line, watch_title
from llmb.reports.output import log_writer, print_output
from llmb.reports.run_report import run_document
from llmb.runs.folder import RunFolder

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

LAST_LINES = 10
"""Number of lines of the existing log to print first."""


@contextmanager
def find_watched(text: str | None) -> Iterator[tuple[Job, Ask]]:
    """Yield the job of the run that ``text`` names, or of a run that has not ended if ``text`` is None, and the
    function that updates it. Raise UsageError if there is none."""
    path = Path(text).expanduser() if text and text != LATEST else None
    if path and ("/" in str(text) or path.exists()):
        with _of_folder(_run_folder(path.resolve())) as found:
            yield found
        return
    install = install_here()
    with read_history(install, say) as store:
        ask = asker(store, install, say)
        yield _named(store, text, ask), ask


@contextmanager
def _of_folder(folder: RunFolder) -> Iterator[tuple[Job, Ask]]:
    """Yield the job of a run folder and the function that updates it, both from its files if no history has the run."""
    install = next((above.parent for above in folder.path.parents if above.name == WORKLOADS), None)
    if install:
        with read_history(install, say) as store:
            own = [job for job in store.find_named(folder.path.parent.name) if Path(job.run_dir) == folder.path]
            if own:
                yield last_try(store, own[-1].key), asker(store, install, say)
                return
    yield job_of_folder(folder), lambda _: job_of_folder(folder)


def _named(store: Store, text: str | None, ask: Ask) -> Job:
    if text is not None:
        return last_try(store, (_labeled(store, text, ask) or find_run(store, text)).key)
    if newest := _living(store.live(), ask):
        return newest
    do = "pass a job, a run folder or 'latest'; 'llmb jobs list' shows all"
    raise UsageError("no run is running or queued", where=str(store.path), do=do)


def _labeled(store: Store, text: str, ask: Ask) -> Job | None:
    """Return the running, queued or last run with the label ``text``; None if there is none or it is an id or name."""
    jobs = store.jobs(Filter(label=text, runs_only=True))
    if not jobs or store.find_named(text) or store.with_short_id(text):
        return None
    return _living([job for job in jobs if job.live], ask) or jobs[-1]


def _living(jobs: Iterable[Job], ask: Ask) -> Job | None:
    ordered = sorted(jobs, key=lambda job: (job.status == "running", job.submitted_s), reverse=True)
    return next((now for job in ordered if job.kind == "run" and (now := ask(job)).live), None)


def _run_folder(path: Path) -> RunFolder:
    """Return the folder of a run; ``path`` is that folder, its log, steps or record, or the parent of a single run."""
    check_reachable(path)
    folder = RunFolder(path if path.is_dir() else path.parent)
    if path.is_dir() and not folder.record.exists():
        below = sorted(found for found in path.glob("*/run.json") if found.parent.name[0] != ".")
        if len(below) != 1:
            what = f"the folder directly contains {len(below) or 'no'} runs"
            raise UsageError(what, where=str(path), do="pass the folder of one run, which contains run.json")
        return RunFolder(below[0].parent)
    if path.is_dir() or (folder.record.exists() and path in (folder.log, folder.steps, folder.record)):
        return folder
    if not path.is_file():
        raise UsageError("no such file or folder", where=str(path), do="see 'llmb jobs list' for all jobs")
    raise UsageError("not a run's log, steps or record", where=str(path), do=f"use 'llmb parse {path}' for another log")


@app.command()
def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=complete_run,
            help="Id of a job, beginning of a run's id or folder name, label, folder, or 'latest'. Default: the "
            "newest run that is running, else the newest that is queued.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and do not wait for the end.")] = False,
    expect_s: ExpectS = None,
    json: Json = False,
) -> None:
    """Follow the log of a run until it ends, with its pace and the time left, like 'llmb jobs log --follow'.

    A line on stderr reports if the pace is not as expected. The exit code is that of the run. Ctrl-C stops watching;
    the run continues.

    Examples:

    - `llmb watch`

    - `llmb watch 4711 --expect 12.5`

    - `llmb watch 4711 --once --json`
    """
    with find_watched(run) as (job, ask):
        lines = lines_of(job, expect_s)
        plan = lines.run.record.plan
        if not once and job.live:
            say(watch_title(plan, job))
            try:
                job = follow_log(job, ask, _drop if json else log_writer(), LAST_LINES, lines.look)
            except KeyboardInterrupt as error:
                raise UserInterrupt("stopped watching; the run continues") from error
        elif job.live:
            job = ask(job)
        seen = lines.run.look(job, time.time())
        if not once:
            _end(job, lines.run, seen, json=json)
        elif json:
            print_output(watch_document(job, plan, seen, None))
        else:
            print_output(f"{watch_title(plan, job)}\n{watch_line(seen)}\n")


def _drop(_: bytes) -> None:
    """Discard the log, because a JSON document is printed instead."""


def _end(job: Job, run: WatchedRun, seen: RunView, *, json: bool) -> None:
    record = run.record
    ended = read_ended_run(run.folder) if record.status not in ("queued", "running") else None
    if json:
        print_output(watch_document(job, record.plan, seen, run_document(ended) if ended else None))
    code = exit_code([job])
    if ended is None or code not in (0, RunFailed.exit_code, InvalidRun.exit_code):
        say(f"the run has ended: {seen.reason or job.state}")
        raise typer.Exit(code or RunFailed.exit_code)
    if json:
        raise_unless_successful(ended)
    else:
        print_result(ended, json=False)
