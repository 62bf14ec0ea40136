# SPDX-License-Identifier: Apache-2.0
"""The top-level command: lists all commands, loads only the one that is called, prints errors."""

import gc
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from llmb import __version__
from llmb.cli.unset_options import skip_unset_options
from llmb.errors import LlmbError, UserInterrupt, unknown

COMMANDS = {
    "list": ("llmb.cli.list", "Workloads, sizes, dtypes, GPU types and scales of the catalogue."),
    "show": ("llmb.cli.show", "One recipe, fully resolved: model, layout, FLOPs, published figures."),
    "metrics": ("llmb.cli.metrics", "Throughput, TFLOPS, MFU and time to train for a given step time."),
    "run": ("llmb.cli.run", "Train on this machine, now, and print the result."),
    "submit": ("llmb.cli.submit", "Queue a run on a Slurm cluster."),
    "single": ("llmb.cli.submit", "The same as submit."),
    "bulk": ("llmb.cli.bulk", "Queue the jobs of a file on a Slurm cluster."),
    "launch": ("llmb.cli.launch", "Queue a run that the environment variables of the reference documents describe."),
    "result": ("llmb.cli.result", "The result of a finished run."),
    "jobs": ("llmb.cli.jobs", "Submitted jobs and their results; logs, waiting, cancelling, slow nodes."),
    "checkpoint": ("llmb.cli.checkpoint", "Show checkpoints; export and import weights for Hugging Face."),
    "parse": ("llmb.cli.parse", "Step-time statistics of training logs."),
    "trace": ("llmb.cli.trace", "The time of profiled steps by activity."),
    "nccl": ("llmb.cli.nccl", "Collectives in NCCL's logs, and bandwidths from nccl-tests."),
}

EPILOG = """Examples:

- `llmb list`: all recipes

- `llmb run -w pretrain_llama3.1 -s tiny`: a first result on this machine

- `llmb show -w pretrain_llama3.1 -s 8b --scale 8`: one recipe with its published figures

Exit codes: 0 ok, 2 usage, 3 environment, 4 run failed, 6 invalid, 7 infrastructure, 130 interrupted.
Results go to stdout, everything else to stderr.
"""


class LazyGroup(TyperGroup):
    """Lists commands from a table and imports a command's module only to run it, so that ``--help`` is fast."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 (typer keeps its context type private)
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:  # noqa: ANN401, ARG002
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown("command", args[0], COMMANDS)
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub and load_command(str(name)), rest


def load_command(name: str) -> Any:  # noqa: ANN401
    module, _ = COMMANDS[name]
    command = typer.main.get_command(import_module(module).app)
    command.name = name
    skip_unset_options(command)
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmb {__version__}")
        raise typer.Exit


@app.callback()
def llmb(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measures how fast a machine or a cluster trains large language models."""


def main() -> NoReturn:
    """Entry point of the console scripts."""
    # Start-up allocates much and frees little: garbage collection would take 7 % of the time of 'llmb list'.
    gc.set_threshold(200_000)
    # pydantic would look for plugins in the metadata of every installed distribution, which takes as long as reading
    # the catalogue.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    exit_code = _run_app()
    sys.stderr.flush()
    # Results are flushed. Finalizing the interpreter would take a fifth of the time of 'llmb list'.
    os._exit(exit_code)


def was_interrupted(end: SystemExit) -> bool:
    """True if it was caused by Ctrl-C, which click turns into exit code 1."""
    error: BaseException | None = end
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _run_app() -> int:
    try:
        app()
    except SystemExit as end:
        if was_interrupted(end):
            return UserInterrupt.exit_code
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except LlmbError as error:
        sys.stderr.write(f"llmb: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("llmb: interrupted\n")
        return UserInterrupt.exit_code
    except BrokenPipeError:
        return 0  # the reader has exited, as in 'llmb list | head'
    return 0


if __name__ == "__main__":
    main()
