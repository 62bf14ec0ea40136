# SPDX-License-Identifier: Apache-2.0
"""``llmb report``, ``llmb export``, ``llmb archive`` and ``llmb import``: pages, files and archives of runs."""

import sys
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from llmb.base.errors import UsageError, unknown
from llmb.base.shown_text import counted
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.common import Json
from llmb.cli.root import install_here, say, write_named
from llmb.cli.shared_options import complete_run, log_options, takes
from llmb.jobs.archive import ENDINGS, check_library, default_ending, write_archive
from llmb.jobs.find_runs import find_all_runs
from llmb.jobs.imported import import_archive
from llmb.jobs.judge_runs import Against
from llmb.reports.export import FORMS, write_export
from llmb.reports.output import print_output
from llmb.reports.verdict_report import left_out_lines
from llmb.verdict.catalogue_figures import with_stated

if TYPE_CHECKING:
    from llmb.runs.analyzed_run import RunSet

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN...]",
        autocompletion=complete_run,
        help="Runs, selected as for `llmb judge`. Default: all runs of this install root.",
    ),
]
AgainstRuns = Annotated[
    str | None,
    typer.Option("--against", metavar="RUNS", help="Judge against these runs. Default: as for `llmb judge`."),
]
Format = Literal["html", "md", "pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = get_args(Format)


@app.command()
@takes(log_options())
def report(
    stated: dict[str, Any],
    runs: Runs = None,
    against: AgainstRuns = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("-o", "--output"),
            metavar="FILE",
            help="File to write. Default: report.FORMAT; for a plot, NAME.FORMAT; for md, standard output.",
        ),
    ] = None,
    chosen: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Format; pdf needs a browser; svg and png, --plot. Default: from the name of --output, else html.",
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="NAME", help="Write only this plot, by its name in the page's links."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show home folders, and names of users and hosts, but never secrets.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the file in a browser.")] = False,
) -> None:
    """Write a page about runs that have ended: verdicts, plots, tables and settings, in one file for offline use.

    The newest measurement of each recipe is judged and shown; with `--against`, all runs of a recipe are judged
    together. The page can be shared: it has no secrets and, without `--full`, no home folders, user or host names.

    Examples:

    - `llmb report latest --open`

    - `llmb report -o all.html`

    - `llmb report driver-580 --against driver-570 --format md`

    - `llmb report latest --plot step-times --format svg`
    """
    form = format_of(chosen, output)
    if show and form == "md":
        raise UsageError("--open requires a page or a plot, not Markdown", do="omit --open, or choose another format")
    if (plot is None) == (form in ("svg", "png")):
        what = f"a plot cannot be written as {form}" if plot else f"{form} requires a plot"
        raise UsageError(what, do="choose svg or png, or omit --plot" if plot else "add --plot, or choose html")
    found, content = report_on(runs, against, install_here(), say, form, plot or "", stated, full=full)
    if form == "md" and output is None:
        print_output(str(content))
        return
    path = output or Path(f"{plot or 'report'}.{form}")
    write_named(path, content, "-o")
    sys.stderr.write(f"{counted(len(found.runs), 'run')} in {path}, {path.stat().st_size / 1000:,.0f} kB\n")
    if show and not webbrowser.open(path.absolute().as_uri()):
        say(f"no browser was found here; open {path.absolute()} on a machine with a browser")


def format_of(chosen: Format | None, output: Path | None) -> Format:
    """Return the format of a report: the chosen one, else the extension of the file, else HTML. Raise UsageError if the
    first two differ."""
    named = next((each for each in FORMATS if output and output.suffix.lower() == f".{each}"), None)
    if chosen and named and chosen != named:
        raise UsageError(f"--format is {chosen}, but --output ends in .{named}", do="omit --format, or rename the file")
    return chosen or named or "html"


def report_on(
    selectors: list[str] | None,
    against: str | None,
    install: Path,
    on_message: Callable[[str], None],
    form: Format = "html",
    plot: str = "",
    stated: Mapping[str, Any] = MappingProxyType({}),
    *,
    full: bool,
) -> "tuple[RunSet, str | bytes]":
    """Return runs and their page or plot; raise UsageError if no run has ended, EnvironmentProblem if drawing fails."""
    from llmb.reports.page.contents import gather  # takes longer to load than the help of every command may take
    from llmb.reports.page.render import full_text, page_html, page_markdown, page_pdf, plot_file, public_text

    found = find_all_runs(selectors, install, on_message)
    if stated:
        found = replace(found, runs=with_stated(found.runs, stated, Catalogue()))
    if not found.runs:
        lines = "".join(f"\n  {line}" for line in left_out_lines(found.left_out))
        what = f"no run has ended{f' in {found.title}' if selectors else ''}{lines}"
        raise UsageError(what, do="see 'llmb runs' for all runs")
    contents = gather(found, Against(runs=against, logs=stated), install, on_message)
    shown = full_text if full else public_text(found.runs, install)
    if form == "svg" or form == "png":
        return found, plot_file(contents, plot, form, shown)
    if form == "md":
        return found, page_markdown(contents, shown)
    page = page_html(contents, shown)
    return found, page_pdf(page) if form == "pdf" else page


Selection = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        autocompletion=complete_run,
        help="Run folder, folder of runs, archive, label, campaign, id, 'latest' or dates. Default: all.",
    ),
]


@app.command()
def export(
    runs: Selection = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Format: csv, parquet, jsonl, openmetrics, tensorboard, mlflow or wandb, or several separated by"
            " commas. Repeatable. Default: csv.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the files.")] = Path(
        "llmb-export"
    ),
    json: Json = False,
) -> None:
    """Write results and steps of runs as files for other tools. Files of an earlier export are replaced.

    Results are those of `llmb result --json`, steps those of `metrics.jsonl`, with the same names in every format.
    Unknown values are empty. The names of the files are printed.

    Examples:

    - `llmb export`

    - `llmb export latest --format tensorboard -o logs`

    - `llmb export my-campaign --format csv,parquet -o results`

    - `llmb export --format openmetrics -o /var/lib/node_exporter`
    """
    chosen = [name.strip().lower() for text in (formats or ["csv"]) for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in FORMS:
            raise unknown("format", name, FORMS)
    folders = _recorded_runs(runs)
    written = [str(path) for path in write_export(folders, chosen, output)]
    print_output({"runs": len(folders), "files": written} if json else "".join(f"{path}\n" for path in written))


def _recorded_runs(selectors: list[str] | None) -> list[Path]:
    found = find_all_runs(selectors, install_here(), say)
    say(*left_out_lines(found.left_out))
    folders = [run.path for run in found.runs if run.record]
    if logs := len(found.runs) - len(folders):
        say(f"skipped {counted(logs, 'log')} without a record; use 'llmb parse --format csv' for logs")
    if not folders:
        raise UsageError(f"no run{f' in {found.title}' if selectors else ''} has a record", do="see 'llmb runs'")
    return folders


@app.command()
def archive(
    runs: Selection = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("-o", "--output"),
            metavar="FILE",
            help=f"New {' or '.join(ENDINGS)} file. Default: llmb-runs{ENDINGS[0]}, or {ENDINGS[1]} without zstandard.",
        ),
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces", help="Also include profiles and NCCL's logs, which are large and not redacted.")
    ] = False,
    json: Json = False,
) -> None:
    """Pack runs into one file for `llmb import`, `llmb judge` and `llmb compare` on another machine.

    The archive contains records, steps, logs and samples, with checksums, but no checkpoints, batch scripts or
    specifications of jobs. Log lines that may contain a secret are redacted.

    Examples:

    - `llmb archive my-campaign -o campaign.tar.zst`

    - `llmb archive latest --traces -o slow-run.tar.zst`
    """
    output = output or Path(f"llmb-runs{default_ending()}")
    if not output.name.endswith(ENDINGS):
        do = f"pass -o {output}{default_ending()}"
        raise UsageError(f"the name does not end with {' or '.join(ENDINGS)}", where=str(output), do=do)
    check_library(output)
    if output.exists():
        raise UsageError("the file already exists", where=str(output), do="pass another name, or remove the file")
    written = write_archive(_recorded_runs(runs), output, traces=traces)
    if written.hidden:
        say(f"redacted in the archive: {counted(written.hidden, 'log line')} that may contain a secret")
    count, size = len(written.manifest.runs), output.stat().st_size
    document = {"archive": str(output), "runs": count, "files": len(written.manifest.files), "size_bytes": size}
    text = f"{output}: {counted(count, 'run')}, {size:,} bytes\n"
    print_output({**document, "hidden_lines": written.hidden} if json else text)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive written by 'llmb archive'.")], json: Json = False
) -> None:
    """Add the runs of an archive to those of this machine. Existing runs are not changed.

    The archive is checked first: it is rejected if it contains files that do not belong to runs, has wrong checksums,
    or expands too much. `llmb jobs show` shows the origin of a run.

    Example:

    - `llmb import campaign.tar.zst`
    """
    done = import_archive(file, install_here(), say)
    document = {"added": [str(path) for path in done.added], "known": [str(path) for path in done.present]}
    there = f"; {len(done.present)} were already there" if done.present else ""
    were = "1 run was" if len(done.added) == 1 else f"{len(done.added)} runs were"
    print_output(document if json else f"{were} added{there}\n")
