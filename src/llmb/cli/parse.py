# SPDX-License-Identifier: Apache-2.0
"""``llmb parse``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.cli.install import install_here
from llmb.cli.json_option import Json
from llmb.cli.parse_compat import Format, ParseCommand, print_as_reference
from llmb.cli.parse_progress import reading_progress
from llmb.errors import RunFailed
from llmb.logs.files import find_logs
from llmb.logs.parallel_reader import parse_logs
from llmb.metrics.window import check_rule
from llmb.report.output import print_json, print_table, print_text
from llmb.report.parse_report import ParseReport, parse_csv, parse_document, parse_report, parse_table
from llmb.runs.record import origin_beside
from llmb.site.machine import usable_cores

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(cls=ParseCommand)
def parse(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Folder searched for *.out files, or one log. Default: 'experiments' here, else the install folder.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TABLE,
    full_names: Annotated[bool, typer.Option("--full-names", help="Do not shorten file names.")] = False,
    json: Json = False,
    window: Annotated[
        str | None,
        typer.Option(
            help="Steps to average: auto (70 % to 90 % of the run), last, all, or A-B, numbered from 0. Default: auto.",
            show_default=False,
        ),
    ] = None,
    compat: Annotated[
        bool,
        typer.Option("--compat", help="The output and the exit codes of the reference suite's parse_train_timing.sh."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Number of reader processes. Default: one per core.", show_default=False),
    ] = None,
) -> None:
    """Step-time statistics of training logs, and the outcome of every run.

    Reads the step lines of NeMo 2 and of llmb ("Training epoch 0, iteration 49/49 | ..."). A run is a success if it
    logged every step of the window and its last one, and its loss was finite throughout. Statistics use the sample
    standard deviation; the interval is that of the mean, 95 %, by Student's t. Exit code 4: no run was a success.

    With --compat a log is read as the reference suite's script does: default folder 'experiments', window 35-44,
    standard deviation of the population, exit code 1 for every error.

    Examples:

    - `llmb parse`

    - `llmb parse results --format csv`

    - `llmb parse log-run.out --window 35-44 --format json`

    - `llmb parse --compat --format=csv experiments`
    """
    form = Format.JSON if json else form
    if compat:
        folders = [directory] if directory else []
        print_as_reference(folders, window, form, jobs or usable_cores(), full_names=full_names)
        return
    window = window or "auto"
    check_rule(window)
    root = directory or _default_root()
    found = find_logs(root)
    files = reading_progress(parse_logs(found, window, jobs or usable_cores()), found)
    report = parse_report(root, window, files, full_names=full_names, origin_of=origin_beside)
    _print(report, form)
    if not report.counts["success"]:
        raise RunFailed(f"none of {len(report.files)} logs is from a successful run", where=str(root.absolute()))


def _default_root() -> Path:
    """Default folder of logs: ``experiments`` in the current folder, else where ``llmb run`` saves results."""
    here = Path("experiments")
    if here.is_dir():
        return here
    kept = install_here() / "workloads"
    return kept if kept.is_dir() else Path()


def _print(report: ParseReport, output: Format) -> None:
    match output:
        case Format.TABLE:
            print_table(parse_table(report))
        case Format.CSV:
            print_text(parse_csv(report))
        case Format.JSON:
            print_json(parse_document(report))
