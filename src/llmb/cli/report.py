# SPDX-License-Identifier: Apache-2.0
"""``llmb report``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmb.cli.completion import runs as complete_runs
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.report.output import print_output
from llmb.runs.folder import write_atomically, writing

if TYPE_CHECKING:
    from llmb.analysis.analyzed_run import FoundRuns

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN...]",
        autocompletion=complete_runs,
        help="Runs, named as for `llmb judge`. Default: every run of this install root.",
    ),
]
AgainstRuns = Annotated[
    str | None,
    typer.Option("--against", metavar="RUNS", help="Judge against these runs. Default: as `llmb judge` without it."),
]
Format = Literal["html", "md", "pdf", "svg", "png"]


@app.command()
def report(
    runs: Runs = None,
    against: AgainstRuns = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: report.html or NAME.svg here; Markdown: stdout."),
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="pdf: printed by a browser; svg, png: --plot."),
    ] = "html",
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="NAME", help="Only this plot, named as in the page's links.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show home folders, and names of users and hosts. Never secrets.")
    ] = False,
) -> None:
    """Make a page of runs that ended: verdicts, plots, tables, settings, in one file that needs no network.

    Of each recipe the newest measurement is judged and shown, or with `--against` all its runs are judged together.
    The page can be sent to others: it has no secrets, and without `--full` no home folders, user or host names.

    Examples:

    - `llmb report latest`

    - `llmb report -o all.html`

    - `llmb report driver-580 --against driver-570 --format md`

    - `llmb report latest --plot step-times --format svg`
    """
    if (plot is None) == (form in ("svg", "png")):
        raise UsageError("--plot and --format svg or png belong together", do="give both, or neither")
    install = install_here()
    from llmb.analysis.find_runs import find_all_runs

    found = find_all_runs(runs, install, say)
    if not found.runs:
        from llmb.report.verdict_report import left_out_lines

        lines = "".join(f"\n  {line}" for line in left_out_lines(found.left_out))
        raise UsageError(f"no run has ended{f' in {found.title}' if runs else ''}{lines}", do="'llmb runs' shows all")
    content = _content(found, against, install, form, plot or "", full=full)
    if form == "md" and output is None:
        print_output(str(content))
        return
    path = output or Path(f"{plot or 'report'}.{form}")
    with writing(path):
        write_atomically(path, content)
    count = len(found.runs)
    sys.stderr.write(f"{count} {'run' if count == 1 else 'runs'} in {path}, {path.stat().st_size / 1000:,.0f} kB\n")


def _content(
    found: "FoundRuns", against: str | None, install: Path, form: Format, plot: str, *, full: bool
) -> str | bytes:
    from llmb.page.contents import gather  # takes longer to load than the help of every command may take
    from llmb.page.render import full_text, page_html, page_markdown, page_pdf, plot_file, public_text

    contents = gather(found, against, install, say)
    shown = full_text if full else public_text(found.runs, install)
    match form:
        case "svg" | "png":
            return plot_file(contents, plot, form, shown)
        case "md":
            return page_markdown(contents, shown)
        case "pdf":
            return page_pdf(page_html(contents, shown))
        case "html":
            return page_html(contents, shown)
