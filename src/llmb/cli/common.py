# SPDX-License-Identifier: Apache-2.0
"""Code that all commands share: common options, messages, groups, the complete help, and usage errors with advice."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmb.base.errors import EnvironmentProblem, UsageError, closest, unknown
from llmb.base.shown_text import printable_lines

PANEL = "Output"
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


def _check_folder(path: Path | None) -> Path | None:
    """Raise UsageError if the folder of ``path`` does not exist: the result may be written hours later."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError("the folder of --junit does not exist", where=str(path), do="create it, or pass another file")
    return path


Junit = Annotated[
    Path | None,
    typer.Option(
        "--junit", metavar="FILE", callback=_check_folder, help="Also write the result as JUnit XML, for CI systems."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the jobs or their batch scripts; start nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Start without asking for confirmation.")]
Force = Annotated[bool, typer.Option("--force", help="Start even if 'llmb memory' counts more memory than a GPU has.")]


def add_common_options(command: Any) -> None:  # noqa: ANN401 (typer keeps its command types private)
    """Add the common options to a command, or to all commands of a group."""
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
    """Hide the type ``<bool>`` that typer shows for flags."""
    for item in parameters:
        if getattr(item, "is_flag", False):
            item.metavar = ""


def is_verbose(ctx: typer.Context) -> bool:
    return bool(ctx.meta.get("llmb.verbose"))


def print_message(text: str) -> None:
    """Write to standard error. On a terminal, long lines are wrapped, unless they contain a command to copy."""
    if sys.stderr.isatty():
        width = get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
    sys.stderr.write(printable_lines(f"{text}\n"))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width or re.search(r"('|^\s+)llmb ", line):
        return line
    label = re.match(r"\s*((\w+:|-)\s+)?", line)
    indent = " " * (label.end() if label else 0)
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _to_file(ctx: typer.Context, path: Path | None) -> None:
    if path is not None:
        _until_the_end(ctx, _result_in(path))


def _quietly(ctx: typer.Context, requested: bool) -> None:
    if requested:
        _until_the_end(ctx, redirect_stderr(StringIO()))


def _until_the_end(ctx: typer.Context, resource: AbstractContextManager[Any]) -> None:
    """Enter ``resource``, and leave it before the command's error is printed; typer may leave contexts open then."""
    stack = ctx.obj
    if isinstance(stack, ExitStack):
        stack.enter_context(resource)
    else:
        ctx.with_resource(resource)


def _verbosely(ctx: typer.Context, requested: bool) -> None:
    ctx.meta["llmb.verbose"] = requested


def _help_all(ctx: typer.Context, requested: bool) -> None:
    """Print the complete help without panels, which are too narrow for long option names on 80 columns."""
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
            *("-q", "--quiet"), help="Print only the result and errors.", callback=_quietly, rich_help_panel=PANEL
        ),
    ] = False,
    common_verbose: Annotated[
        bool,
        _kept_here(
            *("-v", "--verbose"),
            help="Print more: all values of a result, a run's plan, or an error's cause.",
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
    """Declare the common options. Nothing calls this function. No command may have parameters of the same names."""


@contextmanager
def _result_in(path: Path) -> Iterator[None]:
    """Collect standard output and, unless it is empty, write it to ``path``; raise EnvironmentProblem if that fails."""
    from llmb.runs.folder import write_atomically  # the help of a command must not load it

    special = path.exists() and not path.is_file()
    target = path if special else Path(os.path.realpath(path))
    may_write = os.access(target, os.W_OK) if special else os.access(target.parent, os.W_OK | os.X_OK)
    if target.is_dir() or not may_write:
        what = "it is a folder" if target.is_dir() else "its folder does not exist, or is not writable"
        raise EnvironmentProblem(f"--output cannot be written: {what}", where=str(path), do="pass another --output")
    result = TextIOWrapper(BytesIO(), encoding="utf-8", errors="surrogateescape", newline="")
    try:
        with redirect_stdout(result):
            yield
    finally:
        result.flush()
        if text := result.buffer.getvalue().decode("utf-8", "surrogateescape"):
            try:
                if target.exists() and not target.is_file():
                    target.write_text(text, encoding="utf-8", errors="surrogateescape")
                else:
                    write_atomically(target, text, errors="surrogateescape")
            except OSError as error:
                what, do = f"the result cannot be written: {error.strerror}", "pass another file with --output"
                raise EnvironmentProblem(what, where=str(target), do=do) from error


class CommandGroup(TyperGroup):
    """A group of commands. Its ``--help-all`` prints the same as ``--help``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (typer keeps its context type private)
        return super().parse_args(ctx, ["--help", *args[1:]] if args[:1] == ["--help-all"] else args)

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401
        parameters: list[Any] = super().get_params(ctx)
        hide_types_of_flags(parameters)
        return parameters


MEANT: dict[str, tuple[str, ...]] = {
    "--scale": (
        *("--nodes", "--num-nodes", "--nnodes", "-N", "--world-size", "--nproc", "--nproc-per-node", "--num-gpus"),
        *("--ngpus", "--processes", "--np", "--job-total-gpus"),
    ),
    "--workload": ("--model", "--model-name", "--recipe", "--task"),
    "--model-config": ("--model", "--config", "--hf-config"),
    "--size": ("--model-size",),
    "--dtype": ("--precision", "--fp8", "--bf16", "--fp32", "--compute-dtype"),
    "--gpu-type": ("--gpu", "--device", "--hardware", "--accelerator", "--arch"),
    "--release": ("--version", "--document", "--nemo-version"),
    "--tp": ("--tensor-parallel", "--tensor-parallel-size", "--tensor-model-parallel-size"),
    "--pp": ("--pipeline-parallel", "--pipeline-parallel-size", "--pipeline-model-parallel-size"),
    "--vp": ("--virtual-pipeline", "--virtual-pipeline-model-parallel-size"),
    "--cp": ("--context-parallel", "--context-parallel-size"),
    "--ep": ("--expert-parallel", "--expert-parallel-size", "--expert-model-parallel-size"),
    "--mbs": ("--micro-batch-size", "--micro-batch"),
    "--gbs": ("--global-batch-size", "--global-batch", "--batch-size", "--batch"),
    "--seq-len": ("--seq-length", "--sequence-length", "--seqlen", "--context-length"),
    "--layers": ("--num-layers", "--n-layers"),
    "--steps": ("--max-steps", "--num-steps", "--iterations", "--iters", "--train-iters"),
    "--lr": ("--learning-rate",),
    "--recompute": ("--activation-checkpointing", "--recompute-granularity"),
    "--save-checkpoint": ("--save", "--checkpoint", "--enable-checkpoint"),
    "--load-checkpoint": ("--load", "--resume", "--resume-from", "--load-checkpoint-path"),
    "--profile": ("--enable-profile", "--nsys"),
    "--time-limit": ("--time", "-t", "--walltime"),
    "--slurm-arg": ("--mem", "--exclusive", "--mail-user", "--comment"),
    "--output": ("--out", "-o", "--outfile", "--output-file"),
    "--quiet": ("--silent", "--no-progress"),
    "--verbose": ("--debug", "-vv"),
    "--json": ("--output-format", "--as-json"),
    "--format": ("--csv", "--table"),
    "--window": ("--steps", "--range"),
    "--dry-run": ("--plan", "--print-only", "--no-run", "--check"),
}
"""Options of llmb, each with the names that users and other programs use instead."""


def usage_error(error: Any, command: Sequence[str] = ()) -> UsageError:  # noqa: ANN401 (of typer's parser)
    """Convert a parser error to UsageError with advice: the option probably meant, valid commands, or a help page."""
    path = error.ctx.command_path if error.ctx else " ".join(("llmb", *command))
    if not hasattr(error, "possibilities"):
        what = error.format_message().removesuffix(".").replace("Value error, ", "")
        for problem in getattr(error.__cause__, "errors", list)():  # pydantic's, without the value
            must = problem["msg"].partition(", unable")[0].removeprefix("Input should ").replace("a valid", "a")
            must = re.sub(r"Value error, .* is not one of (.*)\.", r"be one of \1", must)
            what = f"{error.param.opts[-1]} is '{problem['input']}'; it must {must.replace('integer', 'whole number')}"
        if what.startswith("No such command"):  # typer suggests 'list' for 'bisect'
            return unknown("command", what.split("'")[1], error.ctx.command.list_commands(error.ctx))
        return UsageError(what, where=path, do=f"see '{path} --help'")
    known = [name for item in error.ctx.command.params for name in (*item.opts, *item.secondary_opts)]
    meant = meant_option(error.option_name, known)
    what = f"no such option: {error.option_name}" + (f"; did you mean {' or '.join(meant)}?" if meant else "")
    return UsageError(what, where=path, do=f"see '{path} --help-all' for every option")


def meant_option(given: str, known: Iterable[str]) -> list[str]:
    """Return the options in ``known`` that other programs call ``given``, else options with a similar spelling."""
    options = [name for name in known if name.startswith("--")]
    same = [name for name, others in MEANT.items() if name in options and given in others]
    return same or closest(given, options, cutoff=0.65)
