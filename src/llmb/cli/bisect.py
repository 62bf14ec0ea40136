# SPDX-License-Identifier: Apache-2.0
"""``llmb bisect``."""

from collections.abc import Sequence
from typing import Annotated

import typer

from llmb.analysis.bisect_command import bisect_by_command, check_command
from llmb.analysis.bisect_runs import BisectReport, bisect_report
from llmb.analysis.bisect_state import DEFAULT_NAME, BisectState, read_candidates, read_state, state_path, write_state
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of, split_model
from llmb.catalogue.resolve import find_workload, sizes_of
from llmb.cli.options import Json
from llmb.cli.root import install_here, say
from llmb.cli.usage import CommandGroup
from llmb.errors import InvalidRun, UsageError, unknown
from llmb.report.compare_report import bisect_table, bisect_text
from llmb.report.output import print_output
from llmb.secrets import secret_word

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown")

Name = Annotated[str, typer.Option("--name", help="Name of this search, if there are several at a time.")]
Candidates = Annotated[
    str,
    typer.Option(
        metavar="A,B,C|FILE",
        help="Images, drivers or commits, in order: the first is as fast as before, the last is "
        "not. A file has one per line.",
    ),
]
Workload = Annotated[str | None, typer.Option("--workload", "-w", help="Workload of the runs.", show_default=False)]
Size = Annotated[str | None, typer.Option("--size", "-s", help="Model size of the runs.", show_default=False)]
DtypeOfRuns = Annotated[str | None, typer.Option("--dtype", help="Precision of the runs.", show_default=False)]
Scale = Annotated[int | None, typer.Option("--scale", "-n", min=1, help="GPUs of the runs.", show_default=False)]
Good = Annotated[
    str | None, typer.Option(help="Existing runs of the first candidate: a label, or any selection that compare takes.")
]
Bad = Annotated[str | None, typer.Option(help="Existing runs of the last candidate.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget a search of that name.")]


@app.callback()
def bisect() -> None:
    """Which of an ordered list of images, drivers or commits changed the step time, with as few runs as it takes."""


@app.command()
def start(
    candidates: Candidates,
    workload: Workload = None,
    size: Size = None,
    dtype: DtypeOfRuns = None,
    scale: Scale = None,
    good: Good = None,
    bad: Bad = None,
    name: Name = DEFAULT_NAME,
    fresh: Fresh = False,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]", help="Further options of 'llmb run'; {candidate} is replaced.", show_default=False
        ),
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
    install = install_here()
    state = _state(candidates, workload, size, dtype, scale, good, bad, name, options or ())
    if state_path(install, name).exists() and not fresh:
        do = f"continue with 'llmb bisect next --name {name}', or add --fresh, or another --name"
        raise UsageError(f"a bisection named '{name}' already exists", where=str(state_path(install, name)), do=do)
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
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND", help="Makes one run; {candidate} and {label} are replaced.", show_default=False
        ),
    ],
    candidates: Candidates,
    workload: Workload = None,
    size: Size = None,
    dtype: DtypeOfRuns = None,
    scale: Scale = None,
    good: Good = None,
    bad: Bad = None,
    name: Name = DEFAULT_NAME,
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
    check_command(command)
    install = install_here()
    state = _state(candidates, workload, size, dtype, scale, good, bad, name)
    if state_path(install, name).exists() and not fresh:
        known = read_state(install, name)
        if known.candidates != state.candidates:
            do = "add --fresh to begin again, or another --name"
            raise UsageError(
                f"the bisection '{name}' has other candidates", where=str(state_path(install, name)), do=do
            )
        state = known
    write_state(install, state)
    _finish(bisect_by_command(state, command, install, say), json=json)


def _state(
    candidates: str,
    workload: str | None,
    size: str | None,
    dtype: str | None,
    scale: int | None,
    good: str | None,
    bad: str | None,
    name: str,
    options: Sequence[str] = (),
) -> BisectState:
    """What a new search looks for. Raises UsageError, also for what may be a secret: all of it is kept in a file."""
    kept = {"--candidates": [candidates], "--good": [good or ""], "--bad": [bad or ""], "after --": options}
    for where, words in kept.items():
        _check_kept(where, words)
    workload, size = _model(workload, size)
    return BisectState(
        name=name,
        candidates=read_candidates(candidates),
        workload=workload,
        size=size,
        dtype=dtype,
        scale=scale,
        good=good,
        bad=bad,
        options=tuple(options),
    )


def _check_kept(where: str, words: Sequence[str]) -> None:
    if place := secret_word(words):
        do = "give it by a variable of your shell, which reaches what the command starts"
        raise UsageError(f"word {place} looks like a secret, and the search is kept in a file", where=where, do=do)


def _model(workload: str | None, size: str | None) -> tuple[str | None, str | None]:
    """Which may be in one word, or not specified.

    Raises UsageError for two sizes, and for names that no run can have: a search would wait for it forever.
    """
    if not workload:
        return None, size
    named, own_size = split_model(Catalogue(), workload)
    if not own_size and not size:
        return named, None
    named, found = model_of(Catalogue(), workload, size)
    sizes = sizes_of(find_workload(Catalogue(), named))
    if found not in sizes:
        raise unknown("size", found, sizes)
    return named, found


def _finish(report: BisectReport, *, json: bool) -> None:
    """Raises InvalidRun for a search that cannot go further."""
    print_output(report.model_dump(mode="json") if json else bisect_table(report))
    if report.status == "stuck":
        raise InvalidRun(bisect_text(report))
