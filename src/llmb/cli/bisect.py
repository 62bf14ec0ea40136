# SPDX-License-Identifier: Apache-2.0
"""``llmb bisect``."""

from typing import Annotated

import typer

from llmb.analysis.bisect import (
    CANDIDATE,
    DEFAULT_NAME,
    LABEL,
    BisectReport,
    BisectState,
    bisect_by_command,
    bisect_report,
    read_candidates,
    read_state,
    state_path,
    write_state,
)
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.cli.common import Json
from llmb.cli.options import takes
from llmb.cli.root import install_here, say
from llmb.cli.usage import CommandGroup
from llmb.errors import InvalidRun, UsageError
from llmb.report.compare_report import bisect_table, bisect_text
from llmb.report.output import print_output
from llmb.secrets import secret_word

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown")

Name = Annotated[str, typer.Option("--name", help="Name of this search, if there are several at a time.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget a search of that name.")]


def _new_search(
    candidates: Annotated[
        str,
        typer.Option(
            metavar="A,B,C|FILE",
            help="Images, drivers or commits, in order: the first is as fast as before, the last is "
            "not. A file has one per line.",
        ),
    ],
    workload: Annotated[str | None, typer.Option("--workload", "-w", help="Workload of the runs.")] = None,
    size: Annotated[str | None, typer.Option("--size", "-s", help="Model size of the runs.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Precision of the runs.")] = None,
    scale: Annotated[int | None, typer.Option("--scale", "-n", min=1, help="GPUs of the runs.")] = None,
    good: Annotated[
        str | None,
        typer.Option(help="Existing runs of the first candidate: a label, or any selection that compare takes."),
    ] = None,
    bad: Annotated[str | None, typer.Option(help="Existing runs of the last candidate.")] = None,
    name: Name = DEFAULT_NAME,
) -> BisectState:
    """What a new search looks for, from its options. Raises UsageError."""
    if workload:
        workload, size = model_of(Catalogue(), workload, size)
    return BisectState(
        name=name,
        candidates=read_candidates(candidates),
        workload=workload,
        size=size,
        dtype=dtype,
        scale=scale,
        good=good,
        bad=bad,
    )


@app.callback()
def bisect() -> None:
    """Which of an ordered list of images, drivers or commits changed the step time, with as few runs as it takes."""


@app.command()
@takes(_new_search)
def start(
    search: BisectState,
    fresh: Fresh = False,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Further options of 'llmb run'; {candidate} is replaced."),
    ] = None,
    json: Json = False,
) -> None:
    """Begin a search, and say what to run first.

    Run what it says with the label that it says, on this cluster or any other that shares the root of installation, and
    call `llmb bisect next`. What is known is kept in a file: any command may be interrupted, and repeated.

    Examples:

    - `llmb bisect start --candidates 570.86,570.124,575.51 -w pretrain_llama3.1 -s 8b --good week-45 --bad week-46`

    - `llmb bisect start --candidates images.txt -w pretrain_llama3.1 -s 8b -- --image {candidate}`
    """
    if place := secret_word(options or ()):
        do = "give it by a variable of your shell, which reaches what the command starts"
        raise UsageError(f"option word {place} looks like a secret, and the search is kept in a file", do=do)
    state = search.model_copy(update={"options": tuple(options or ())})
    install = install_here()
    path = state_path(install, state.name)
    if path.exists() and not fresh:
        do = f"continue with 'llmb bisect next --name {state.name}', or add --fresh, or another --name"
        raise UsageError(f"a bisection named '{state.name}' already exists", where=str(path), do=do)
    report = bisect_report(state, install, say)
    write_state(install, state)
    _finish(report, json=json)


@app.command("next")
def next_(name: Name = DEFAULT_NAME, json: Json = False) -> None:
    """Read the runs that were made since, and say what to run next, or which candidate it is."""
    install = install_here()
    _finish(bisect_report(read_state(install, name), install, say), json=json)


@app.command()
def skip(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="One that cannot be run.")],
    name: Name = DEFAULT_NAME,
    json: Json = False,
) -> None:
    """Do without a candidate that cannot be run, and say what to run next."""
    install = install_here()
    state = read_state(install, name).with_skipped(candidate)
    write_state(install, state)
    _finish(bisect_report(state, install, say), json=json)


@app.command()
@takes(_new_search)
def run(
    search: BisectState,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="Makes one run; {candidate} and {label} are replaced.")
    ],
    fresh: Fresh = False,
    json: Json = False,
) -> None:
    """Search by itself: call COMMAND for each run that is needed.

    The command is started without a shell. It makes one run below the root of installation, and ends when the run has
    ended. Exit code 125 skips the candidate, as in git bisect; a command that makes no measurement is retried once.
    Called again, it resumes where it was interrupted.

    Examples:

    - `llmb bisect run --candidates commits.txt -- ./build_and_run.sh {candidate}`

    - `llmb bisect run --candidates a.sqsh,b.sqsh,c.sqsh -- ./run_image.sh {candidate} {label}`
    """
    if not any(CANDIDATE in word for word in command):
        do = f"write -- COMMAND ... {CANDIDATE} ...; {LABEL} stands for the label of its runs"
        raise UsageError(f"the command has no {CANDIDATE} to replace", do=do)
    install = install_here()
    path = state_path(install, search.name)
    state = read_state(install, search.name) if path.exists() and not fresh else search
    if state.candidates != search.candidates:
        do = "add --fresh to begin again, or another --name"
        raise UsageError(f"the bisection '{search.name}' has other candidates", where=str(path), do=do)
    write_state(install, state)
    _finish(bisect_by_command(state, command, install, say), json=json)


def _finish(report: BisectReport, *, json: bool) -> None:
    """Raises InvalidRun for a search that cannot go further."""
    print_output(report.model_dump(mode="json") if json else bisect_table(report))
    if report.status == "stuck":
        raise InvalidRun(bisect_text(report))
