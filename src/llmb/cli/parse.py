# SPDX-License-Identifier: Apache-2.0
"""``llmb parse``, which with ``--compat`` replaces the reference suite's ``parse_train_timing.sh``."""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand

from llmb.base.errors import LlmbError, RunFailed, UsageError
from llmb.base.shown_text import counted
from llmb.catalogue.window import DEFAULT_RULE, DOCUMENTED_STEPS, WINDOW_RULES, check_rule
from llmb.cli.common import Json
from llmb.cli.root import install_here, run_paths, say
from llmb.cli.shared_options import log_options, takes
from llmb.jobs.read_run import parsed_run, run_of_log
from llmb.launch.documents.parse_compat import BRIDGE, FORMATS, NEMO, compat_report, read_samples
from llmb.readers.logs.configuration import document_of_log
from llmb.readers.logs.log_files import LogFiles, find_all_logs, find_logs, read_in_parallel
from llmb.readers.samples.host import usable_cores
from llmb.reports.output import print_output
from llmb.reports.parse_report import (
    ParseReport,
    groups_csv,
    groups_document,
    groups_table,
    parse_csv,
    parse_document,
    parse_report,
    parse_tables,
    scaling_csv,
    scaling_document,
    scaling_tables,
)
from llmb.reports.table import Table
from llmb.runs.analyzed_run import AnalyzedRun, needs_catalogue
from llmb.verdict.copies import with_copies

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
DIRECTORY, WINDOW = Path("experiments"), "35-44"
LOG_FORMATS = (
    "llmb, NeMo 1 and 2, Megatron-LM, -Bridge and -DeepSpeed, Primus, DeepSpeed, torchtitan, MaxText, nanotron or the "
    "Hugging Face Trainer"
)
LAST_STEP = DOCUMENTED_STEPS - 1
MANY_FILES, MANY_BYTES = 500, 1 << 29
Read = TypeVar("Read")
Form = Literal["table", "csv", "json"]


class CompatError(LlmbError):
    """An error with --compat: its exit code is 1, as in the reference suite's script."""

    exit_code = 1

    def __init__(self, error: LlmbError) -> None:
        super().__init__(error.what, where=error.where, choices=error.choices, do=error.do)


class ParseCommand(TyperCommand):
    """A command that, with ``--compat``, exits like the reference suite's script if options are invalid."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (typer keeps its context type private)
        from llmb.cli.main import PARSER_ERROR

        called_as_reference = not {"--compat", "--compat-bridge"}.isdisjoint(args)
        try:
            return super().parse_args(ctx, args)
        except PARSER_ERROR as error:
            if not called_as_reference:
                raise
            from llmb.cli.common import usage_error

            raise CompatError(usage_error(error)) from error


def _print_as_reference(
    folders: list[Path], window: str | None, form: Form, workers: int, *, full_names: bool, bridge: bool
) -> None:
    check_rule(window or WINDOW)
    if window in WINDOW_RULES[:-1]:
        raise UsageError(f"the reference script has no --window {window}", do=f"pass steps, such as --window {WINDOW}")
    if len(folders) > 1:
        raise UsageError("the reference script reads only one folder", do="run the command once per folder")
    folder = folders[0] if folders else DIRECTORY
    if not folder.is_dir():
        raise UsageError(f"'{folder}' is not a folder", do="pass the folder with the logs")
    found = _regular(find_logs(folder))
    window = window or _documented_window(found.logs)
    read = read_in_parallel(found, partial(read_samples, rule=window, sample=bridge), workers)
    samples = list(_with_progress(found, read))
    report = compat_report(str(folder), window, samples, full_names=full_names, form=BRIDGE if bridge else NEMO)
    print_output(FORMATS[form](report))
    if not report.successes:
        raise RunFailed(f"no run logged every step of {window} with finite values", where=str(folder))


def _documented_window(logs: Iterable[Path]) -> str:
    found = sorted({one.window for path in logs if (one := document_of_log(path)) and one.window})
    if len(found) > 1:
        say(f"these logs belong to documents with different windows ({', '.join(found)}): {WINDOW} is used for all")
    window = found[0] if len(found) == 1 else WINDOW
    return f"{LAST_STEP}-{LAST_STEP}" if window == "last" else window


def _regular(found: LogFiles) -> LogFiles:
    """Return only regular files named *.out, because the reference suite's script follows no links."""
    logs = tuple(path for path in found.logs if path.suffix == ".out" and not path.is_symlink())
    return LogFiles(logs, found.total_bytes, found.refused)


Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DIR]...",
        help="Folders with *.out files, logs, archives, or runs by id or label. Default: 'experiments' in the current"
        " folder, else the install root's 'workloads', else the current folder.",
    ),
]
Group = Annotated[
    bool, typer.Option("--group", help="Show one row per group of repeats, with the median and spread of their means.")
]
Scaling = Annotated[
    bool, typer.Option("--scaling", help="Show the scales of each recipe, with efficiency and published figures.")
]
WindowRule = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="Steps to average: reference (a run's own window; for other logs, their document's, or from 70 % to 90 %"
        " of the run), auto (the steady state), last, all, or A-B. Default: reference.",
    ),
]
Compat = Annotated[
    bool, typer.Option("--compat", help="Match the output and exit codes of the suite's parse_train_timing.sh.")
]
CompatBridge = Annotated[
    bool,
    typer.Option(
        "--compat-bridge",
        help="Like --compat, but for parse_train_timing_mbridge.sh: milliseconds, sample standard deviation.",
    ),
]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Number of reader processes. Default: one per core.")]


@app.command(cls=ParseCommand)
@takes(log_options())
def parse(
    stated: dict[str, Any],
    paths: Paths = None,
    form: Annotated[Form, typer.Option("--format", help="Output format.")] = "table",
    group: Group = False,
    scaling: Scaling = False,
    wide: Annotated[bool, typer.Option("--wide", help="All columns, and files that are not training logs.")] = False,
    full_names: Annotated[bool, typer.Option("--full-names", help="Do not shorten file names.")] = False,
    json: Json = False,
    window: WindowRule = None,
    compat: Compat = False,
    compat_bridge: CompatBridge = False,
    jobs: Jobs = None,
) -> None:
    """Print step-time statistics of training logs, and the outcome of every run.

    The command reads logs of llmb, NeMo 1 and 2, Megatron-LM, -Bridge and -DeepSpeed, Primus, DeepSpeed, torchtitan,
    MaxText, nanotron and the Hugging Face Trainer. A run is a success if it logged every step of the window and its
    last step, and its loss was finite throughout. The table has the sample standard deviation, and the 95 % interval of
    the mean. The exit code is 4 if no run was a success.

    With --compat, the command works like the reference suite's script: the default folder is 'experiments', and the
    window is that of the logs' release, else 35-44. The population standard deviation is used. Errors exit with 1.

    Examples:

    - `llmb parse`

    - `llmb parse results --format csv`

    - `llmb parse log-run.out --window 35-44 --format json`

    - `llmb parse before`: the logs of the runs with this label

    - `llmb parse --compat --format=csv experiments`
    """
    form = "json" if json else form
    workers = jobs or usable_cores()
    if compat or compat_bridge:
        try:
            _print_as_reference(paths or [], window, form, workers, full_names=full_names, bridge=compat_bridge)
        except LlmbError as error:
            raise CompatError(error) from error
        return
    rule = window or DEFAULT_RULE
    check_rule(rule)
    if group and scaling:
        raise UsageError("--group and --scaling cannot be combined", do="pass only one")
    roots = run_paths(paths) if paths else [_default_root()]
    found = find_all_logs(roots)
    read = _with_progress(found, read_in_parallel(found, partial(parsed_run, rule=rule), workers))
    runs = _related([*(run_of_log(file, rule) for file in found.refused), *read], stated)
    report = parse_report(roots, rule, runs, full_names=full_names)
    if found.unread:
        say(f"{counted(found.unread, '*.log file')} not read; pass each by name")
    where = ", ".join(str(root.absolute()) for root in roots)
    if form == "table" and all(map(Path.is_file, roots)) and all(run.status == "not_training_log" for run in runs):
        raise RunFailed("the logs have no known format", where=where, do=f"pass a log of {LOG_FORMATS}")
    print_output(_groups(report, form, scaling=scaling) if group or scaling else _logs(report, form, wide=wide))
    if not report.counts["success"]:
        raise RunFailed(f"no successful run in {counted(len(report.runs), 'log')}", where=where)


def _related(read: list[AnalyzedRun], stated: dict[str, Any]) -> list[AnalyzedRun]:
    runs = with_copies(read)
    say(*sorted({run.copy_of for run in runs if run.copy_of}))
    for run in runs:
        if run.unread_record:
            say(f"run {run.id}: its record is ignored: {run.unread_record} ({run.log_path.parent})")
    return _catalogued(runs, stated) if stated or needs_catalogue(runs) else runs


def _catalogued(runs: list[AnalyzedRun], stated: dict[str, Any]) -> list[AnalyzedRun]:
    from llmb.catalogue.catalogue import Catalogue
    from llmb.verdict.catalogue_figures import with_catalogue_figures, with_stated  # slow to load, seldom needed

    catalogue = Catalogue()
    return with_catalogue_figures(with_stated(runs, stated, catalogue), catalogue)


def _with_progress(found: LogFiles, read: Iterable[Read]) -> Iterable[Read]:
    if (len(found.logs) < MANY_FILES and found.total_bytes < MANY_BYTES) or not sys.stderr.isatty():
        return read
    from rich.console import Console
    from rich.progress import track

    return track(read, "Reading", total=len(found.logs), console=Console(stderr=True), transient=True)


def _default_root() -> Path:
    here = Path("experiments")
    here = here if here.is_dir() else install_here() / "workloads"
    return here if here.is_dir() else Path()


def _logs(report: ParseReport, form: Form, *, wide: bool) -> dict[str, Any] | str | list[Table]:
    if form == "json":
        return parse_document(report)
    return parse_csv(report) if form == "csv" else parse_tables(report, wide=wide)


def _groups(report: ParseReport, form: Form, *, scaling: bool) -> dict[str, Any] | str | list[Table]:
    from llmb.catalogue.catalogue import Catalogue
    from llmb.verdict.parsed_scaling import group_runs, scaling_of  # slow to load, seldom needed

    groups = group_runs(report.runs)
    scalings = scaling_of(groups, Catalogue()) if scaling else ()
    if form == "json":
        return parse_document(report, groups_document(groups), scaling_document(scalings) if scaling else None)
    if form == "csv":
        return scaling_csv(scalings) if scaling else groups_csv(groups)
    return scaling_tables(report, scalings) if scaling else [groups_table(report, groups)]
