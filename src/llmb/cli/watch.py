# SPDX-License-Identifier: Apache-2.0
"""``llmb watch``."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from llmb.analysis.logged_run import log_identity
from llmb.analysis.watched import Expected, Kind, Outlook
from llmb.analysis.watched_run import WatchedLog, WatchedRun, Watcher, expectation, expectation_of_file, watch
from llmb.cli.common import Json
from llmb.cli.completion import runs
from llmb.cli.root import install_here, say
from llmb.cli.runs import print_result
from llmb.errors import EnvironmentProblem, InfrastructureError, InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.input_files import check_reachable
from llmb.jobs.find import LATEST, find_run
from llmb.jobs.follow import current
from llmb.jobs.history import read_history
from llmb.jobs.job import Job
from llmb.jobs.local_run import raise_unless_successful
from llmb.jobs.store import Filter, Store
from llmb.jobs.wait import exit_code, last_try
from llmb.logs.files import parse_file
from llmb.logs.outcome import FINISHED
from llmb.prepared.folders import WORKLOADS
from llmb.programs.conclude import read_ended_run
from llmb.report.output import print_output
from llmb.report.run_report import run_document
from llmb.report.table import table_lines
from llmb.report.watch_report import MOST_STEPS, WatchedTitle, watch_document, watch_line, watch_tables
from llmb.runs.folder import RunFolder
from llmb.runs.record import unreadable_record
from llmb.runs.recorded_identity import identity_of

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
        if text is not None:
            job = job_of_label(store, text, ask) or find_run(store, text)
        elif newest := _lasting(store.live(), ask):
            job = newest
        else:
            do = "name a job, a run folder or a log, or 'latest'; 'llmb jobs list' shows all"
            raise UsageError("no run is running or queued here", where=str(store.path), do=do)
        yield _run(RunFolder(Path(job.run_dir)), last_try(store, job.key), ask)


def asker(store: Store, install: Path) -> Callable[[Job], Job]:
    """Brings a job up to date; that of a retried one is its last attempt."""

    def ask(job: Job) -> Job:
        now = current(store, install, job)
        last = last_try(store, now.key)
        return now if last.key == now.key else last  # a history that must not be changed has it as it was

    return ask


def job_of_label(store: Store, text: str, ask: Callable[[Job], Job]) -> Job | None:
    """The run with that label that is still running, or the newest; None if none has it, or if it is an id too."""
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
    check_reachable(path)
    folder = RunFolder(path if path.is_dir() else path.parent)
    if path.is_dir() and not folder.record.exists():
        below = sorted(found for found in path.glob("*/run.json") if found.parent.name[0] != ".")
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


Show = Callable[[Outlook], None]
OTHER_LINES = 4
"""The headings of the steps, the empty line before them, and the cursor's."""


@contextmanager
def live_view(title: WatchedTitle) -> Iterator[Show]:
    """In a terminal; nothing of it is left at the end."""
    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(seen: Outlook) -> None:
            live.update(frame(title, seen, console.width, console.height), refresh=True)

        yield show


def frame(title: WatchedTitle, seen: Outlook, width: int, height: int) -> Text:
    """As many of the last steps as there are lines for."""
    first, *_ = watch_tables(title, seen, 0)
    space = height - len(list(table_lines(first, width))) - OTHER_LINES
    lines: list[Text] = []
    for table in watch_tables(title, seen, min(MOST_STEPS, space)):
        lines += [Text()] if lines else []
        for line in table_lines(table, width):
            style = "bold" if line.is_heading else "bold red" if line.text.startswith("WARNING") else ""
            lines.append(Text(line.text, style))
    return Text("\n").join(lines)


class LineView:
    """Writes a line when there is something new, and one for each new warning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.reported: set[Kind] = set()
        self.last: tuple[object, ...] | None = None

    def show(self, seen: Outlook) -> None:
        here = seen.circumstances
        news = (here.state, here.why, here.attempt, seen.done)
        if news != self.last:
            self.write(watch_line(seen))
        for concern in seen.concerns:
            if concern.kind not in self.reported:
                self.write(f"WARNING: {concern.text}")
        self.last, self.reported = news, {concern.kind for concern in seen.concerns}


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

LIVE_EVERY_S, LINES_EVERY_S = 1.0, 5.0
RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        autocompletion=runs,
        help="Id of a job, label, beginning of a run folder's name, folder, log of any framework, or 'latest'."
        " Default: the newest run that is running or queued.",
    ),
]


@app.command("watch")
def watch_(
    run: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and do not wait for the end.")] = False,
    no_live: Annotated[bool, typer.Option("--no-live", help="Print lines also to a terminal.")] = False,
    interval: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between two updates. Default: 1, and 5 for lines.")
    ] = None,
    expect_s: Annotated[
        float | None,
        typer.Option("--expect-s", min=1e-9, help="Expected seconds of a step, instead of the published figure."),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option("--expect", metavar="FILE", help="Expect the step time of this YAML file, as 'llmb judge' does."),
    ] = None,
    json: Json = False,
) -> None:
    """Watch a run until it ends: its steps, when its last one is due, and whether something is wrong.

    Warns of steps that take longer than expected or longer than before, of a run that stalls, a loss that is not
    finite, a rank that is slower than the others, and a time limit that comes too early. The exit code is that of the
    run. Ctrl-C ends the watching; the run continues.

    Examples:

    - `llmb watch`

    - `llmb watch 4711 --expect-s 12.5`

    - `llmb watch driver-580 --expect expected.yaml`

    - `llmb watch slurm-4711.out --no-live`

    - `llmb watch 4711 --once --json`
    """
    if expect and expect_s is not None:
        raise UsageError("--expect and --expect-s cannot be combined", do="give one of them")
    with find_target(run, say) as target:
        watcher = Watcher(target.subject, _expected(target, expect, expect_s))
        if once:
            _print_seen(target, watcher.look(time.time()), json=json)
            return
        live = sys.stdout.isatty() and not no_live and not json
        try:
            with _view(target, live=live, json=json) as show:
                seen = watch(watcher, show, interval or (LIVE_EVERY_S if live else LINES_EVERY_S))
        except KeyboardInterrupt as error:
            raise UserInterrupt("stopped watching; the run continues") from error
        if isinstance(target.subject, WatchedRun):
            _end_of_run(target, target.subject, seen, json=json)
        else:
            _end_of_log(target, target.subject, seen, live=live, json=json)


def _expected(target: Target, file: Path | None, given_s: float | None) -> Expected | None:
    if file is None:
        return expectation(target.title.plan, given_s)
    subject = target.subject
    if isinstance(subject, WatchedLog):
        identity = log_identity(parse_file(subject.path, "all"))
    else:
        identity = identity_of(subject.record)
    return expectation_of_file(file, identity.configuration)


@contextmanager
def _view(target: Target, *, live: bool, json: bool) -> Iterator[Show]:
    if live:
        with live_view(target.title) as show:
            yield show
        return
    write: Callable[[str], None] = say if json else lambda line: print_output(f"{line}\n")
    if not json:
        write(target.title.text)
    yield LineView(write).show


def _print_seen(target: Target, seen: Outlook, *, json: bool) -> None:
    print_output(watch_document(target.title, seen, None) if json else watch_tables(target.title, seen))


def _end_of_run(target: Target, run: WatchedRun, seen: Outlook, *, json: bool) -> None:
    """The result as ``llmb result`` prints it; raises and exits as the run ended."""
    record, job = run.record, run.job
    ended = read_ended_run(run.folder) if record.status not in ("queued", "running") else None
    if json:
        shown = run_document(ended) if ended else None
        print_output(watch_document(target.title, seen, shown))
    code = exit_code([job]) if job and not job.live else 0
    if ended is None or code not in (0, RunFailed.exit_code, InvalidRun.exit_code):
        say(f"the run has ended: {seen.circumstances.why or (job and job.state)}")
        raise typer.Exit(code or RunFailed.exit_code)
    if json:
        raise_unless_successful(ended)
    else:
        print_result(ended, json=False)


def _end_of_log(target: Target, log: WatchedLog, seen: Outlook, *, live: bool, json: bool) -> None:
    """Raises InvalidRun or RunFailed unless the run has finished by the rules of ``llmb parse``."""
    if live or json:
        _print_seen(target, seen, json=json)
    outcome = parse_file(log.path, "all").outcome
    if outcome.status == "invalid":
        raise InvalidRun(f"the run is invalid: {outcome.reason}", where=str(log.path))
    if outcome.status not in FINISHED:
        raise RunFailed(f"the run has not finished: {outcome.reason}", where=str(log.path))
