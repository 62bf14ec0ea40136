# SPDX-License-Identifier: Apache-2.0
"""``llmb runs`` and ``llmb result``, and the printing of results for every command that waits for a run."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from llmb.cli import completion
from llmb.cli.jobs import DEFAULT_LIMIT, listed_jobs
from llmb.cli.options import Json
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.jobs.find import LATEST, find_run, parse_since
from llmb.jobs.history import read_history
from llmb.jobs.local_run import raise_unless_successful
from llmb.jobs.store import Filter
from llmb.programs.conclude import finished_result
from llmb.report.jobs_report import runs_document, runs_table
from llmb.report.output import print_json, print_output, print_table
from llmb.report.run_report import run_document, run_table
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record, unreadable_record
from llmb.runs.result import Result
from llmb.runs.short_id import short_id

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def runs(
    label: Annotated[
        str | None, typer.Option("--label", autocompletion=completion.labels, help="Only runs with this label.")
    ] = None,
    workload: Annotated[str | None, typer.Option("-w", "--workload", help="Only this workload.")] = None,
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Status of the run, such as success. Repeatable.")
    ] = None,
    campaign: Annotated[str | None, typer.Option("--campaign", help="Only runs of this campaign.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Started since: 30m, 12h, 7d, 2026-11-21, 2026-11-21T14:00.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="The newest runs, at most this number; 0: all.")
    ] = DEFAULT_LIMIT,
    no_refresh: Annotated[
        bool, typer.Option("--no-refresh", help="Show the last known states, query no scheduler.")
    ] = False,
    json: Json = False,
) -> None:
    """The runs of this install root, the newest last: on this machine and on a cluster.

    The id, or its beginning, names a run for `llmb result` and `llmb jobs show`; `latest` is the newest run. A run
    that was retried is shown once.

    Examples:

    - `llmb runs`

    - `llmb runs --label driver-580 --since 7d`

    - `llmb runs -w pretrain_llama3.1 --status success --limit 0 --json`
    """
    query = Filter(
        states=tuple(status or ()),
        workload=workload,
        campaign=campaign,
        label=label,
        since_s=parse_since(since, time.time()) if since else None,
        runs_only=True,
        limit=limit or None,
    )
    found, total = listed_jobs(query, refresh=not no_refresh)
    print_output(runs_document(found, total) if json else runs_table(found, total))


@app.command()
def result(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=completion.runs,
            help="Id of a run or a job, or its beginning; 'latest'; beginning of the run folder's name; or folder.",
        ),
    ],
    json: Json = False,
) -> None:
    """Print again the result of a run that has ended.

    The exit code is that of the run: 0 success, 4 failed, 6 invalid.

    Examples:

    - `llmb result latest`

    - `llmb result 4711`

    - `llmb result kqxt --json`
    """
    print_run(_folder_of(run), json=json)


def print_run(folder: RunFolder, *, json: bool) -> None:
    """Raises UsageError if the run has not ended, InvalidRun or RunFailed if it was not successful."""
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
    if record.status in ("queued", "running"):
        do = "'llmb jobs wait' waits for it; 'llmb jobs refresh' updates its state"
        raise UsageError(f"the run has no result yet: it is {record.status}", where=str(folder.path), do=do)
    print_result(folder, record.plan, finished_result(folder, record), record.label, json=json)


def print_result(folder: RunFolder, plan: Plan, result: Result, label: str | None, *, json: bool) -> None:
    """Raises InvalidRun or RunFailed if the run was not successful."""
    if json:
        print_json(run_document(folder, plan, result, label))
    elif result.status == "success":
        print_table(run_table(plan, result))
        sys.stderr.write(f"run {short_id(folder.path)}, saved to {folder.path}\n")
    raise_unless_successful(folder, result)


def _folder_of(text: str) -> RunFolder:
    """A run folder, or the only run folder in a folder; else the run folder of the job of that name."""
    path = Path(text).expanduser().absolute()
    if path.is_dir() and text != LATEST:
        path = path.resolve()  # of a link such as the install root's 'latest', whose own name is not that of a run
        below = sorted(found.parent for found in path.glob("*/run.json"))
        return RunFolder(below[0] if not (path / "run.json").exists() and len(below) == 1 else path)
    if "/" in text:
        do = "name the folder with run.json, or a job; 'llmb jobs list' shows all"
        raise UsageError(f"there is no folder '{text}'", where=str(path), do=do)
    with read_history(install_here(), say) as store:
        return RunFolder(Path(find_run(store, text).run_dir))
