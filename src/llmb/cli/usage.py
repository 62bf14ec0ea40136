# SPDX-License-Identifier: Apache-2.0
"""Groups of commands, and errors of typer's parser as the program's own, with the option that was meant."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperGroup

from llmb.errors import UsageError, closest, unknown


class CommandGroup(TyperGroup):
    """Raises UsageError with the closest command. ``--help-all`` is ``--help``: a group has few options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        return super().parse_args(ctx, ["--help", *args[1:]] if args[:1] == ["--help-all"] else args)

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401
        parameters: list[Any] = super().get_params(ctx)
        for item in parameters:
            item.metavar = item.metavar or ("" if getattr(item, "is_flag", False) else None)
        return parameters

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        commands = self.list_commands(ctx)
        if args and args[0] not in commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise unknown_command(args[0], commands, ctx.command_path)
        return super().resolve_command(ctx, args)


MEANT: dict[str, tuple[str, ...]] = {
    "--scale": (
        *("--nodes", "--num-nodes", "--nnodes", "-N", "--world-size", "--nproc", "--nproc-per-node", "--num-gpus"),
        *("--ngpus", "--processes", "--np", "--job-total-gpus"),
    ),
    "--workload": ("--model", "--model-name", "--recipe", "--task"),
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
"""The options of llmb, and what other programs and people call them."""
EXPECTED = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
"""By pydantic's types of errors."""
ADVICE = {
    "--nodes": "GPUs are counted: --scale is the number of nodes times the GPUs of each",
    "-N": "GPUs are counted: --scale is the number of nodes times the GPUs of each",
    "--fp8": "write --dtype fp8",
    "--bf16": "write --dtype bf16",
    "--fp32": "write --dtype fp32",
    "--csv": "write --format csv",
    "--mem": "write --slurm-arg mem=...",
}


LISTED = ("-s", "--size", "--dtype", "-d", "-n", "--scale", "--gpus")
"""Options that some commands take a list for."""


def check_given_once(command: Any, words: Sequence[str]) -> None:  # noqa: ANN401
    """Raises UsageError for an option of one value with two of them; the parser would take the last."""
    children = getattr(command, "commands", {})
    if words and words[0] in children:
        check_given_once(children[words[0]], words[1:])
        return
    options = {name: item for item in command.params for name in item.opts if item.param_type_name == "option"}
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            return
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        item = options.get(name)
        if item is None or item.is_flag:
            continue
        given = value if equals else next(rest, "")
        before = values.setdefault(spelling(item), given)
        if before != given and not item.multiple:
            listed = f"; where several are possible, write {name} {before},{given}" if name in LISTED else ""
            do = f"give one of them{listed}"
            raise UsageError(f"{spelling(item)} has two values: {before} and {given}", do=do)


def usage_error(error: Any) -> UsageError:  # noqa: ANN401 (typer keeps the classes of its parser private)
    """The error with the command, the valid values and the advice that it has."""
    context = error.ctx
    path = context.command_path if context else "llmb"
    see = f"see '{path} --help'"
    if hasattr(error, "possibilities"):
        return _no_such_option(error.option_name, context.command.params, path)
    parameter = getattr(error, "param", None)
    if parameter is None:
        return UsageError(error.format_message().removesuffix("."), where=path, do=see)
    name = spelling(parameter)
    if hasattr(error, "param_type"):
        return UsageError(f"{name} is not specified", where=path, do=see)
    return UsageError(_invalid(name, error), where=path, do=see)


def _no_such_option(given: str, parameters: Sequence[Any], path: str) -> UsageError:
    options = [item for item in parameters if item.param_type_name == "option"]
    known = [name for item in options for name in (*item.opts, *item.secondary_opts)]
    meant = meant_option(given, known)
    question = f"; did you mean {' or '.join(meant)}?" if meant else ""
    advice = ADVICE.get(given) if meant else None
    return UsageError(
        f"unknown option {given}{question}", where=path, do=advice or f"see '{path} --help-all' for every option"
    )


def meant_option(given: str, known: Iterable[str]) -> list[str]:
    """Names of ``known`` that mean what ``given`` means elsewhere, else names with like letters."""
    names = list(known)
    same = [name for name, others in MEANT.items() if name in names and given in others]
    return same or closest(given, [name for name in names if name.startswith("--")], cutoff=0.65)


def spelling(parameter: Any) -> str:  # noqa: ANN401
    """The name of an option or of an argument in messages."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper()).rstrip(".")
    return str(next((name for name in reversed(parameter.opts) if name.startswith("--")), parameter.opts[0]))


def _invalid(name: str, error: Any) -> str:  # noqa: ANN401
    """The value, and what it must be, as for options in files and variables."""
    from pydantic import ValidationError  # takes as long to load as all else that --help needs

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return f"{name}: {error.message.removesuffix('.')}"
    (detail, *_) = cause.errors()
    expected = EXPECTED.get(detail["type"])
    limit = detail.get("ctx", {}).get("ge")
    if limit is not None:
        expected = f"at least {limit}"
    return f"{name} is '{detail['input']}'; it must be {expected}" if expected else f"{name}: {_reason(detail)}"


def _reason(detail: Mapping[str, Any]) -> str:
    return str(detail.get("ctx", {}).get("error") or detail["msg"]).removesuffix(".")


def unknown_command(name: str, commands: Iterable[str], path: str) -> UsageError:
    error = unknown("command", name, commands, do=f"see '{path} --help'")
    return UsageError(error.what, where=path, choices=error.choices, do=error.do)
