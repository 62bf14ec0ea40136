# SPDX-License-Identifier: Apache-2.0
"""``llmb watch``."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.forecast import Expected
from llmb.analysis.log_identity import log_identity
from llmb.analysis.watch_run import Watcher, expectation, expectation_of_file, watch
from llmb.analysis.watched import Outlook
from llmb.analysis.watched_log import WatchedLog
from llmb.analysis.watched_run import WatchedRun
from llmb.cli.completion import runs
from llmb.cli.json_option import Json
from llmb.cli.live_view import LineView, Show, live_view
from llmb.cli.messages import say
from llmb.cli.result import print_result
from llmb.cli.watched import Target, find_target
from llmb.errors import InvalidRun, RunFailed, UsageError, UserInterrupt
from llmb.jobs.local_run import raise_unless_successful
from llmb.jobs.wait import exit_code
from llmb.logs.files import parse_file
from llmb.logs.outcome import FINISHED
from llmb.programs.conclude import finished_result
from llmb.report.output import print_json, print_tables, print_text
from llmb.report.run_report import run_document
from llmb.report.watch_report import watch_document, watch_tables
from llmb.runs.identity import identity_of

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

LIVE_EVERY_S, LINES_EVERY_S = 1.0, 5.0


@app.command("watch")
def watch_(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=runs,
            show_default=False,
            help="Id of a job, label, beginning of a run folder's name, folder, log of any framework, or 'latest'."
            " Default: the newest run that lasts.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait for the end.")] = False,
    no_live: Annotated[bool, typer.Option("--no-live", help="Print lines also to a terminal.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between two looks. Default: 1, and 5 for lines.", show_default=False),
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
        raise UsageError("--expect and --expect-s exclude each other", do="give one of them")
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
    write: Callable[[str], None] = say if json else lambda line: print_text(f"{line}\n")
    if not json:
        write(target.title.text)
    yield LineView(write).show


def _print_seen(target: Target, seen: Outlook, *, json: bool) -> None:
    if json:
        print_json(watch_document(target.title, seen, None))
    else:
        print_tables(watch_tables(target.title, seen))


def _end_of_run(target: Target, run: WatchedRun, seen: Outlook, *, json: bool) -> None:
    """The result as ``llmb result`` prints it; raises and exits as the run ended."""
    record, job = run.record, run.job
    result = finished_result(run.folder, record) if record.status not in ("queued", "running") else None
    if json:
        shown = run_document(run.folder, record.plan, result, record.label) if result else None
        print_json(watch_document(target.title, seen, shown))
    code = exit_code([job]) if job and not job.live else 0
    if result is None or code not in (0, RunFailed.exit_code, InvalidRun.exit_code):
        say(f"the run has ended: {seen.circumstances.why or (job and job.state)}")
        raise typer.Exit(code or RunFailed.exit_code)
    if json:
        raise_unless_successful(run.folder, result)
    else:
        print_result(run.folder, record.plan, result, record.label, json=False)


def _end_of_log(target: Target, log: WatchedLog, seen: Outlook, *, live: bool, json: bool) -> None:
    """Raises InvalidRun or RunFailed unless the run has finished by the rules of ``llmb parse``."""
    if live or json:
        _print_seen(target, seen, json=json)
    outcome = parse_file(log.path, "all").outcome
    if outcome.status == "invalid":
        raise InvalidRun(f"the run is invalid: {outcome.reason}", where=str(log.path))
    if outcome.status not in FINISHED:
        raise RunFailed(f"the run has not finished: {outcome.reason}", where=str(log.path))
