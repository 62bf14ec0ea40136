# SPDX-License-Identifier: Apache-2.0
"""``llmb export``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.analyzed_run import FoundRuns
from llmb.analysis.find_runs import find_all_runs
from llmb.cli.common import Json
from llmb.cli.completion import runs as complete_runs
from llmb.cli.root import install_here, say
from llmb.errors import UsageError, unknown
from llmb.exchange.export import ExportFormat, write_export
from llmb.report.output import print_output

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Selection = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        autocompletion=complete_runs,
        help="Run folder, folder of runs, label, campaign, id, 'latest', date(s). Default: every run.",
    ),
]


@app.command()
def export(
    runs: Selection = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="csv, parquet, jsonl, openmetrics, mlperf, tensorboard, mlflow or wandb. Repeatable; several are"
            " separated by commas. Default: csv.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the files are written.")
    ] = Path("llmb-export"),
    json: Json = False,
) -> None:
    """Write results and steps of runs for other tools. Files of an earlier export are replaced.

    Results are those of `llmb result --json`, steps those of `metrics.jsonl`, under the same names in every form: what
    is not known is empty. The names of the files that were written are printed.

    Examples:

    - `llmb export`

    - `llmb export latest --format tensorboard -o logs`

    - `llmb export my-campaign --format csv,parquet -o results`

    - `llmb export --format openmetrics -o /var/lib/node_exporter`
    """
    chosen = _formats(formats or [ExportFormat.CSV])
    found = recorded_only(select_runs(runs))
    folders = [run.path for run in found.runs]
    written = [str(path) for path in write_export(folders, chosen, output)]
    print_output({"runs": len(folders), "files": written} if json else "".join(f"{path}\n" for path in written))


def _formats(texts: list[str]) -> list[ExportFormat]:
    names = [name.strip().lower() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(ExportFormat):
            raise unknown("format", name, ExportFormat)
    return [ExportFormat(name) for name in names]


def select_runs(selectors: list[str] | None) -> FoundRuns:
    """The runs that were selected, else every one; says which are left out."""
    found = find_all_runs(selectors, install_here(), say)
    for one in found.left_out:
        say(f"left out: {one.run}: {one.reason}")
    return found


def recorded_only(found: FoundRuns) -> FoundRuns:
    """The runs with a record; of others only a log is known. Raises UsageError if none has one."""
    runs = tuple(run for run in found.runs if run.record)
    if logs := len(found.runs) - len(runs):
        say(f"left out: {logs} without a record; 'llmb parse --format csv' has the figures of logs")
    if not runs:
        raise UsageError(f"no run with a record in {found.title}", do="'llmb runs' shows all")
    return FoundRuns(found.title, runs, found.left_out)
