# SPDX-License-Identifier: Apache-2.0
"""What every command has: options for its result and the messages beside it, these messages, and the complete help."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any

import typer

from llmb.errors import EnvironmentProblem
from llmb.runs.folder import write_atomically
from llmb.shown_text import printable_lines

PANEL = "Output"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Also write the result as JUnit XML, which CI systems show."),
]
Force = Annotated[bool, typer.Option("--force", help="Go on even if a GPU has too little memory for the run.")]


def add_common_options(command: Any) -> None:  # noqa: ANN401 (typer keeps its command types private)
    """Adds them to a command, or to all commands of a group."""
    if hasattr(command, "commands"):
        for child in command.commands.values():
            add_common_options(child)
        return
    app = typer.Typer(add_completion=False)
    app.command()(_common)
    taken = {name for item in command.params for name in item.opts}
    command.params += [item for item in typer.main.get_command(app).params if not taken & set(item.opts)]
    hide_types_of_flags(command.params)


def hide_types_of_flags(parameters: Iterable[Any]) -> None:
    """Typer would show ``<bool>`` as what a flag takes."""
    for item in parameters:
        if getattr(item, "is_flag", False):
            item.metavar = ""


def is_verbose(ctx: typer.Context) -> bool:
    return bool(ctx.meta.get("llmb.verbose"))


def print_message(text: str) -> None:
    """Writes to standard error; on a terminal, long lines are wrapped between words, but no command that is copied."""
    if sys.stderr.isatty():
        width = get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
    sys.stderr.write(printable_lines(f"{text}\n"))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width or "'llmb " in line:
        return line
    label = re.match(r"\s*\w+:\s+", line)
    indent = " " * (label.end() if label else 0)
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _to_file(ctx: typer.Context, path: Path | None) -> None:
    if path is not None:
        _until_the_end(ctx, _result_in(path))


def _quietly(ctx: typer.Context, requested: bool) -> None:
    if requested:
        _until_the_end(ctx, redirect_stderr(StringIO()))


def _until_the_end(ctx: typer.Context, resource: AbstractContextManager[Any]) -> None:
    """Until the program has ended, before it reports an error; a context of typer may stay open at one."""
    stack = ctx.obj
    if isinstance(stack, ExitStack):
        stack.enter_context(resource)
    else:
        ctx.with_resource(resource)


def _verbosely(ctx: typer.Context, requested: bool) -> None:
    ctx.meta["llmb.verbose"] = requested


def _help_all(ctx: typer.Context, requested: bool) -> None:
    """Without panels, in which a terminal of 80 columns has no room for long names of options."""
    if requested:
        ctx.command.rich_markup_mode = None  # type: ignore[attr-defined]
        for item in ctx.command.params:
            item.hidden = False  # type: ignore[attr-defined]
        _help(ctx, requested)


def _help(ctx: typer.Context, requested: bool) -> None:
    if requested:
        typer.echo(ctx.get_help())
        raise typer.Exit


_kept_here = partial(typer.Option, expose_value=False)


def _common(
    common_output: Annotated[
        Path | None,
        _kept_here(
            "--output",
            metavar="FILE",
            help="Write the result to this file. Default: standard output.",
            callback=_to_file,
            rich_help_panel=PANEL,
        ),
    ] = None,
    common_quiet: Annotated[
        bool,
        _kept_here(
            *("-q", "--quiet"),
            help="Print nothing beside the result, except errors.",
            callback=_quietly,
            rich_help_panel=PANEL,
        ),
    ] = False,
    common_verbose: Annotated[
        bool,
        _kept_here(
            *("-v", "--verbose"),
            help="Print more beside the result: the plan of a run, the cause of an error.",
            callback=_verbosely,
            rich_help_panel=PANEL,
        ),
    ] = False,
    help_all: Annotated[
        bool, _kept_here("--help-all", help="Show every option and exit.", callback=_help_all, is_eager=True)
    ] = False,
    common_help: Annotated[
        bool, _kept_here("--help", "-h", help="Show this message and exit.", callback=_help, is_eager=True)
    ] = False,
) -> None:
    """Declares the options, with names that no command's own have; it is never called."""


@contextmanager
def _result_in(path: Path) -> Iterator[None]:
    """Standard output goes to ``path``, which is replaced when the command has ended, if it has printed anything.

    A link is followed, and a device or a pipe is written to. Raises EnvironmentProblem at once if that is impossible,
    not after the work.
    """
    special = path.exists() and not path.is_file()
    target = path if special else Path(os.path.realpath(path))
    may_write = os.access(target, os.W_OK) if special else os.access(target.parent, os.W_OK | os.X_OK)
    if target.is_dir() or not may_write:
        what = "it is a folder" if target.is_dir() else "there is no such folder, or you may not write there"
        raise EnvironmentProblem(f"--output cannot be written: {what}", where=str(path), do="name another file")
    result = TextIOWrapper(BytesIO(), encoding="utf-8", errors="surrogateescape", newline="")
    try:
        with redirect_stdout(result):
            yield
    finally:
        result.flush()
        if text := result.buffer.getvalue().decode("utf-8", "surrogateescape"):
            _write(target, text)


def _write(target: Path, text: str) -> None:
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8", errors="surrogateescape")
        else:
            write_atomically(target, text, errors="surrogateescape")
    except OSError as error:
        do = "name another file with --output"
        raise EnvironmentProblem(f"cannot write the result: {error.strerror}", where=str(target), do=do) from error
