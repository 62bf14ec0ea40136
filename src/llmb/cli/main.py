# SPDX-License-Identifier: Apache-2.0
"""The top-level command: lists all commands, loads only the one that is called, and prints errors."""

import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from llmb import __version__
from llmb.base.errors import EnvironmentProblem, LlmbError, UsageError, UserInterrupt
from llmb.base.secrets import has_secret
from llmb.cli.common import CommandGroup, add_common_options, print_message, usage_error
from llmb.runs.source_version import source_version

PANELS = {
    "Start": {
        "accept": (
            "llmb.cli.accept",
            "Check whether this machine, or each of several nodes, is as fast as it should be.",
        ),
        "list": ("llmb.cli.recipe", "List the workloads, sizes, dtypes, GPU types and scales of the catalogue."),
        "show": ("llmb.cli.recipe", "Show one recipe in full: model, layout, FLOPs, published figures."),
        "run": ("llmb.cli.run", "Train on this machine, now, and print the result."),
        "runs": ("llmb.cli.runs", "List the runs of this machine and of jobs, with their results."),
        "result": ("llmb.cli.runs", "Print the result of a finished run."),
        "docs": ("llmb.cli.docs", "Print a page of the documentation."),
    },
    "Judge": {
        "judge": ("llmb.cli.judge", "Judge whether runs are as fast as they should be, and why not."),
        "compare": ("llmb.cli.judge", "Compare two groups of runs, recipe by recipe."),
        "report": ("llmb.cli.share", "Write a page about runs, with verdicts, plots and tables, in one file."),
        "parse": ("llmb.cli.parse", "Print step-time statistics of training logs."),
        "predict": ("llmb.cli.predict", "Predict the time of a step, broken down by cause, before anything is queued."),
        "plan": ("llmb.cli.predict", "Find the fastest layouts that fit in memory, before anything is queued."),
        "memory": ("llmb.cli.predict", "Count the memory, FLOPs and collectives of a rank, before anything is queued."),
        "metrics": ("llmb.cli.recipe", "Compute throughput, TFLOPS, MFU and time to train from a step time."),
    },
    "Share": {
        "export": ("llmb.cli.share", "Write results and steps as files for other tools."),
        "archive": ("llmb.cli.share", "Pack runs into one file for another machine, without checkpoints or secrets."),
        "import": ("llmb.cli.share", "Add the runs of an archive to those of this machine."),
    },
    "Cluster": {
        "install": (
            "llmb.cli.install",
            "Install on a cluster or a machine: environment, settings, launch scripts, data.",
        ),
        "config": ("llmb.cli.config", "Show and change the settings of this cluster and your own."),
        "submit": ("llmb.cli.submit", "Queue a run on a cluster."),
        "bulk": ("llmb.cli.submit", "Queue the jobs of a file on a cluster."),
        "jobs": ("llmb.cli.jobs", "List jobs and their results; print logs, wait, cancel, find slow nodes."),
        "watch": ("llmb.cli.watch", "Follow the log of a run as it grows, with its pace and the time left."),
    },
    "Prepare": {
        "prepare": ("llmb.cli.prepare", "Prepare data and weights for fine-tuning."),
        "checkpoint": ("llmb.cli.checkpoint", "Show checkpoints; export and import weights for Hugging Face."),
    },
    "Diagnose": {
        "doctor": ("llmb.cli.doctor", "Check whether this node is fit to train: GPUs, host, network, disks, software."),
        "bench": ("llmb.cli.bench", "Measure the speed of parts of this machine: GEMMs, attention, memory, launches."),
        "trace": ("llmb.cli.traces", "Break down the time of profiled steps by activity."),
        "nccl": ("llmb.cli.traces", "Show collectives in NCCL's logs, and bandwidths from nccl-tests."),
    },
    "Compatibility": {
        "launch": ("llmb.cli.submit", "Queue a run that the environment variables of the reference documents describe.")
    },
}
"""The commands by panel of ``--help``, each with its module and help text."""
COMMANDS = {name: command for commands in PANELS.values() for name, command in commands.items()}

ALIASES = {"single": "submit"}
"""Command names of the reference suite's launcher."""
VERBOSE, QUIET = ("-v", "--verbose"), ("-q", "--quiet")
ANYWHERE = (*VERBOSE, *QUIET, "--json")
PARSER_ERROR: Any = typer.BadParameter.__bases__[0]
"""Typer's error for arguments that cannot be parsed, which typer does not export."""

EPILOG = """Examples:

- `llmb list`: all recipes

- `llmb run -w pretrain_llama3.1 -s tiny`: a first result on this machine

- `llmb prepare sample small -w finetune_llama3`: small data and a small model, to fine-tune on this machine

- `llmb show -w pretrain_llama3.1 -s 8b --scale 8`: one recipe with its published figures

Exit codes: 0 ok, 2 usage, 3 environment, 4 run failed, 5 regressed, 6 invalid, 7 infrastructure, 130 interrupted.
Results go to stdout, everything else to stderr.
"""


class LazyGroup(CommandGroup):
    """Lists commands from a table, and imports a command's module only to run it, so that ``--help`` is fast."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 (typer's own settings)
        super().__init__(**settings)
        for panel, commands in PANELS.items():
            for name, (_, meaning) in commands.items():
                self.commands[name] = TyperCommand(name, help=meaning, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        name, stub, rest = super().resolve_command(ctx, [ALIASES.get(word, word) for word in args[:1]] + args[1:])
        return name, stub and load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command, with Ctrl-C raised as UserInterrupt; before this call, ``llmb.__main__`` handles Ctrl-C."""
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise UserInterrupt("interrupted") from None


def load_command(name: str) -> Any:  # noqa: ANN401
    """Return one command of a module, without building the options of the others, which takes time."""
    shared: typer.Typer = import_module(COMMANDS[name][0]).app
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    named = {one.name or getattr(one.callback, "__name__", ""): one for one in shared.registered_commands}
    alone.registered_commands = [named[name]] if name in named else []
    command: Any = typer.main.get_command(alone if alone.registered_commands else shared)
    command.name = name
    add_common_options(command)
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"llmb {__version__} ({source_version().text()})")
        raise typer.Exit


@app.callback()
def llmb(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and the commit."),
    ] = False,
) -> None:
    """Measure how fast a machine or a cluster trains large language models."""


def main() -> NoReturn:
    """Run the command in this process's arguments, and exit with its code."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (it stays open)
    if sys.stdout is None:
        do = "redirect standard output to a file or to /dev/null"
        error = EnvironmentProblem("the result cannot be written: standard output is closed", do=do)
        sys.exit(_report(error, as_json=False))
    try:
        exit_code = exit_code_of(app, as_spoken(sys.argv[1:]))
    except KeyboardInterrupt:  # a second Ctrl-C while the first is reported
        exit_code = _report(UserInterrupt("interrupted"), as_json=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # else the interpreter would fail to flush again at exit, and print that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(exit_code)


def install_main() -> NoReturn:
    """Run ``llmb install``: the entry point of ``llmb-install``."""
    sys.argv.insert(1, "install")
    main()


def as_spoken(arguments: list[str]) -> list[str]:
    """Replace the commands ``help`` and ``version`` with options, and move leading common options after the command."""
    first = next((place for place, word in enumerate(arguments) if word not in ANYWHERE), 0)
    if first and not arguments[first].startswith("-"):
        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = [*arguments[first:end], *arguments[:first], *arguments[end:]]
    match arguments:
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
    return arguments


def exit_code_of(program: typer.Typer, arguments: list[str]) -> int:
    """Run a command and return its exit code. Errors are printed, as JSON if the result would be JSON."""
    as_json = "--json" in arguments or "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
    try:
        _check_arguments(arguments)
        with ExitStack() as stack:
            code = program(arguments, prog_name="llmb", standalone_mode=False, obj=stack)
    except LlmbError as error:
        if {*VERBOSE} & {*arguments} and error.__cause__:
            traceback.print_exception(error.__cause__)
        if isinstance(error, UsageError) and not (error.do or error.choices):
            error = UsageError(error.what, where=error.where, do=f"see 'llmb {' '.join(arguments[:1])} --help'")
        return _report(error, as_json=as_json)
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # the help
            return int(error.exit_code)
        return _report(usage_error(error, arguments[:1]), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _report(UserInterrupt("interrupted"), as_json=as_json)
    except BrokenPipeError:
        return 0  # the reader has exited, as in 'llmb list | head'
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            return 0
        raise
    return code if isinstance(code, int) else 0


def _check_arguments(arguments: list[str]) -> None:
    """Raise UsageError for contradicting options, or a secret, which all users of a machine can see in an argument."""
    if not ({*VERBOSE}.isdisjoint(arguments) or {*QUIET}.isdisjoint(arguments)):
        raise UsageError("--quiet and --verbose cannot be combined", do="pass only one")
    for place, argument in enumerate(arguments, start=1):
        if has_secret(argument, settings=False):
            what = f"argument {place} looks like a secret, which other users could see"
            do = "pass it in an environment variable, such as HF_TOKEN, or in the program's credentials file"
            raise UsageError(what, do=do)


def _report(error: LlmbError, *, as_json: bool) -> int:
    if as_json:
        sys.stderr.write(f"{json.dumps(error.document())}\n")
    else:
        print_message(f"llmb: {error.heading}: {error}")
    return error.exit_code


if __name__ == "__main__":
    main()
