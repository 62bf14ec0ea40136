# SPDX-License-Identifier: Apache-2.0
"""``llmb jobs``: lists, shows, awaits, cancels, updates and retries jobs, prints their logs, and compares nodes."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UserInterrupt
from llmb.cli.common import CommandGroup, Json, Junit
from llmb.cli.progress import JobProgress
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import COMPLETIONS, complete_run, takes
from llmb.jobs.conclude_ended import conclude_job
from llmb.jobs.find_jobs import find_job, find_jobs, node_records, parse_since, unknown_values
from llmb.jobs.follow import asker, follow_log, job_log
from llmb.jobs.history import open_history, read_history, rebuild_history
from llmb.jobs.imported import read_origin
from llmb.jobs.job import Job, Kind, stale
from llmb.jobs.pace import Standing, WatchedRun
from llmb.jobs.refresh import refresh as refresh_jobs
from llmb.jobs.states import read_last_lines, read_run
from llmb.jobs.store import Filter, Store, check_states
from llmb.jobs.wait import Watch, exit_code, last_try, refresh_and_retry, wait_for
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.reports.jobs_report import (
    job_document,
    job_table,
    jobs_document,
    jobs_table,
    nodes_table,
    pace_warning,
    watch_line,
)
from llmb.reports.junit import job_cases, write_junit
from llmb.reports.output import log_writer, print_output
from llmb.runs.folder import RunFolder, install_root
from llmb.runs.record import read_record, unreadable_record

LINE_EVERY_S = 10.0
ExpectS = Annotated[
    float | None,
    typer.Option(
        "--expect", metavar="SECONDS", min=1e-9, help="With --follow: expected seconds per step. Default: as published."
    ),
]


class StepLines:
    """Prints lines about a run: at intervals, if its state changes, and if it is slower or faster than expected."""

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.news: tuple[object, ...] = ()
        self.wrote_s = 0.0
        self.standing: Standing = "too early"

    def look(self, job: Job) -> None:
        seen = self.run.look(job, time.time())
        news = (seen.state, seen.reason, seen.attempt, seen.done)
        if news[:3] != self.news[:3] or (news != self.news and seen.at_s - self.wrote_s >= LINE_EVERY_S):
            self.news, self.wrote_s = news, seen.at_s
            say(watch_line(seen))
        if seen.comparison and seen.comparison.standing != self.standing:
            self.standing = seen.comparison.standing
            if self.standing in ("slower", "faster"):
                say(pace_warning(seen.comparison))


def lines_of(job: Job, expected_s: float | None) -> StepLines:
    """Return the ``StepLines`` of a job's run; raise UsageError if the run's record cannot be read."""
    folder = RunFolder(Path(job.run_dir))
    try:
        return StepLines(WatchedRun(folder, expected_s))
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error


app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown")

FRESH_S = 10.0
"""For this many seconds after a query, states are shown without another query."""
PATIENCE_S = 5.0
"""Seconds to wait for a scheduler; without an answer, the last known states are shown."""

JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        autocompletion=complete_run,
        help="Id of a job, beginning of a run's id or folder name, 'latest' (newest run); for 'show', also a label.",
    ),
]
JobIds = Annotated[list[str], typer.Argument(metavar="ID...", autocompletion=complete_run, help="Ids of jobs or runs.")]


@dataclass(frozen=True, slots=True)
class Selected:
    """Options that select the jobs or runs to list."""

    workload: Annotated[str | None, typer.Option("-w", "--workload", help="Show only this workload.")] = None
    since: Annotated[
        str | None,
        typer.Option("--since", help="Submitted since: 7d (age), 2026-11-21 or 2026-11-21T14:00. Default: any."),
    ] = None
    campaign: Annotated[str | None, typer.Option("--campaign", help="Show only this campaign.")] = None
    label: Annotated[
        str | None, typer.Option("--label", autocompletion=COMPLETIONS["label"], help="Show only runs with this label.")
    ] = None
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show only this many of the newest; 0: all.")] = 50
    no_refresh: Annotated[
        bool, typer.Option("--no-refresh", help="Show the last known states without querying schedulers.")
    ] = False

    def find(
        self, states: Iterable[str], kind: Kind | None = None, *, runs_only: bool = False
    ) -> tuple[list[Job], int]:
        """Return the selected jobs, after an update unless --no-refresh is set, and their number without the limit."""
        selection = Filter(
            states=tuple(states),
            workload=self.workload,
            campaign=self.campaign,
            label=self.label,
            since_s=parse_since(self.since, time.time()) if self.since else None,
            runs_only=runs_only,
            kind=kind,
            limit=self.limit or None,
        )
        with read_history(install_here(), say) as store:
            if not self.no_refresh:
                bring_up_to_date(store)
            check_states(selection.states, store)
            listed = store.jobs(selection)
            if not listed:
                say(*unknown_values(store, selection))
            return listed, store.count(selection)


@app.callback(invoke_without_command=True)
def jobs(context: typer.Context) -> None:
    """List submitted jobs and their results, or run a subcommand on jobs.

    Example:

    - `llmb jobs list --since 7d`
    """
    if context.invoked_subcommand is None:
        print_output(jobs_table(*Selected().find(())))


@app.command("list")
@takes(Selected)
def list_(
    selected: Selected,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="Show only this job state or run status, such as failed. Repeatable."),
    ] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help="Show only jobs of this kind.")] = None,
    json: Json = False,
) -> None:
    """List the jobs of this install root, the newest last.

    The schedulers of jobs that have not ended are queried first; if one does not answer within 5 s, the last known
    states are shown.

    Examples:

    - `llmb jobs list`

    - `llmb jobs list --state failed --state TIMEOUT --since 7d`

    - `llmb jobs list -w pretrain_llama3.1 --limit 0 --json`
    """
    listed, total = selected.find(state or (), kind)
    print_output(jobs_document(listed, total) if json else jobs_table(listed, total))


@app.command()
def show(job_id: JobId, json: Json = False) -> None:
    """Show one job: state and reason, nodes, attempts and files, and the last lines of a failed run.

    Examples:

    - `llmb jobs show 4711`

    - `llmb jobs show pretrain_llama3.1_8b_bf16_gpus8_tp1 --json`
    """
    with read_history(install_here(), say) as store:
        bring_up_to_date(store)
        job = conclude_job(store, find_job(store, _newest_with_label(store, job_id)), say)
    record, lines, imported = read_run(job), read_last_lines(job), read_origin(RunFolder(Path(job.run_dir)))
    if json:
        print_output(job_document(job, record, lines, imported))
        return
    print_output(job_table(job, record, imported))
    print_output("".join(f"  | {line}\n" for line in lines))


def _newest_with_label(store: Store, text: str) -> str:
    """Return the id of the newest run with the label ``text``; ``text`` itself if it names a job or is not a label."""
    runs = [] if store.find_named(text) else store.jobs(Filter(label=text, runs_only=True))
    if len(runs) > 1:
        say(f"{len(runs)} runs have the label '{text}'; this is the newest. 'llmb runs --label {text}' shows all")
    return runs[-1].id or runs[-1].name if runs else text


@app.command()
def log(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Print only the last N lines.")] = None,
    expect_s: ExpectS = None,
) -> None:
    """Print the log of a job's run or, if its workers never started, the output of its batch script.

    With --follow, lines on stderr report the pace of the run and the time left, and whether the pace is as expected.

    Examples:

    - `llmb jobs log 4711 --tail 20`

    - `llmb jobs log 4711 --follow`
    """
    write = log_writer()
    with read_history(install_here(), say) as store:
        job = find_job(store, job_id)
        if follow:
            look = lines_of(job, expect_s).look if read_run(job) else lambda _: None
            follow_log(job, asker(store, _install(), say), write, tail, look)
        else:
            for chunk in job_log(job, tail):
                write(chunk)


@app.command()
def wait(
    job_ids: JobIds,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Stop waiting after this many seconds. Default: never.")
    ] = None,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Wait for jobs to end; the exit code is that of the worst job.

    Exit codes: 0 success, 4 failed, 6 invalid or not ended in time, 7 failed because of the infrastructure, 130
    cancelled. Jobs that were submitted with --retries are retried, and the last attempt counts. A scheduler that does
    not answer is queried again for up to ten minutes.

    Examples:

    - `llmb jobs wait 4711 4712`

    - `llmb jobs wait 4711 --timeout 3600 --json`
    """
    with open_history(install_here(), say) as store:
        keys = [job.key for job in find_jobs(store, job_ids)]
        try:
            listed = _waited(store, keys, timeout)
        except KeyboardInterrupt as error:
            do = "run 'llmb jobs wait' to wait again, or 'llmb jobs cancel' to end them"
            raise UserInterrupt("stopped waiting; the jobs continue", do=do) from error
    write_junit(junit, "jobs", lambda: job_cases(listed))
    _print_jobs(listed, json=json)
    raise typer.Exit(exit_code(listed))


@app.command()
def cancel(job_ids: JobIds, json: Json = False) -> None:
    """Cancel running and queued jobs. Jobs that have ended are not changed.

    Example:

    - `llmb jobs cancel 4711 4712`
    """
    with open_history(install_here(), say) as store:
        refresh_jobs(store, _install())
        listed = find_jobs(store, job_ids)
        live = [job for job in listed if job.live and job.job_id]
        for name in sorted({job.scheduler for job in live}):
            find_scheduler(name).cancel([job for job in live if job.scheduler == name])
        if live:
            refresh_jobs(store, _install())
        listed = [again for job in listed if (again := store.by_key(job.key))]
    _print_jobs(listed, json=json)


@app.command()
def refresh(json: Json = False) -> None:
    """Update the states of all jobs; resubmit jobs that failed because of the infrastructure and have retries left.

    The exit code is 7 if a scheduler does not answer; the states of its jobs are then unchanged.

    Example:

    - `llmb jobs refresh --json`
    """
    with open_history(install_here(), say) as store:
        refresh_and_retry(store, _install(), os.environ, say)
        listed = store.live()
    _print_jobs(listed, json=json)


@app.command()
def rebuild(json: Json = False) -> None:
    """Add jobs that are missing from the history, by reading the run folders.

    Jobs in the history are neither changed nor removed. A damaged history is renamed and rebuilt.

    Example:

    - `llmb jobs rebuild`
    """
    with rebuild_history(install_here(), say) as store:
        bring_up_to_date(store)
        listed = store.jobs()
    _print_jobs(listed, json=json)


@app.command()
def nodes(
    workload: Annotated[str | None, typer.Option("-w", "--workload", help="Count only jobs of this workload.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Only jobs submitted since this time or age, such as 7d.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the number of runs, the failures and the slowdown of each node.

    The slowdown compares step times on a node with those of the same recipe and layout on other nodes.

    Example:

    - `llmb jobs nodes --since 30d`
    """
    since_s = parse_since(since, time.time()) if since else None
    with read_history(install_here(), say) as store:
        records = node_records(store.jobs(Filter(workload=workload, since_s=since_s)))
    print_output({"nodes": records} if json else nodes_table(records))


def _waited(store: Store, keys: list[str], timeout: float | None) -> list[Job]:
    if len(keys) > 1:
        return wait_for(store, _install(), keys, os.environ, say, timeout)
    job = last_try(store, keys[0])
    try:
        plan = read_record(RunFolder(Path(job.run_dir))).plan
    except (OSError, ValueError):
        return wait_for(store, _install(), keys, os.environ, say, timeout)
    with JobProgress(plan.steps, plan.first_step) as progress:
        watch = Watch(progress.job, progress.step)
        return wait_for(store, _install(), keys, os.environ, say, timeout, watch)


def _install() -> Path:
    return install_root(os.environ, Path.cwd())


def bring_up_to_date(store: Store) -> None:
    """Query schedulers if states are old or unknown; if a scheduler cannot be asked, print a warning."""
    live = store.live()
    if not stale(live, time.time(), FRESH_S) and not store.unresolved():
        return
    try:
        say(*refresh_jobs(store, _install(), PATIENCE_S))
    except (InfrastructureError, EnvironmentProblem) as error:
        say(f"states are from the last successful query, because {error.what}")


def _print_jobs(listed: list[Job], *, json: bool) -> None:
    print_output(jobs_document(listed, len(listed)) if json else jobs_table(listed, len(listed)))
