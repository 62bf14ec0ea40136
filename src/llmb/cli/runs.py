# SPDX-License-Identifier: Apache-2.0
"""``llmb runs``. It reads only the history, unless states of jobs have to be queried first."""

import time
from typing import Annotated

import typer

from llmb.cli.completion import labels
from llmb.cli.jobs import DEFAULT_LIMIT, listed_jobs
from llmb.cli.json_option import Json
from llmb.jobs.find import parse_since
from llmb.jobs.store import Filter
from llmb.report.jobs_report import runs_document, runs_table
from llmb.report.output import print_json, print_table

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def runs(
    label: Annotated[
        str | None, typer.Option("--label", autocompletion=labels, help="Only runs with this label.")
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
    wanted = Filter(
        states=tuple(status or ()),
        workload=workload,
        campaign=campaign,
        label=label,
        since_s=parse_since(since, time.time()) if since else None,
        runs_only=True,
        limit=limit or None,
    )
    found, total = listed_jobs(wanted, refresh=not no_refresh)
    if json:
        print_json(runs_document(found, total))
    else:
        print_table(runs_table(found, total))
