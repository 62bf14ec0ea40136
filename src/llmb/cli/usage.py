# SPDX-License-Identifier: Apache-2.0
"""Groups of commands, and errors of typer's parser as the program's own, with the option that was meant."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup

from llmb.cli.common import hide_types_of_flags
from llmb.errors import UsageError, closest


class CommandGroup(TyperGroup):
    """``--help-all`` is ``--help``: a group has few options."""

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


def usage_error(error: Any) -> UsageError:  # noqa: ANN401 (typer keeps the classes of its parser private)
    """The error with the command, and the option that was meant or where options are explained."""
    path = error.ctx.command_path if error.ctx else "llmb"
    if not hasattr(error, "possibilities"):
        what = error.format_message().removesuffix(".").replace("Value error, ", "")
        commands = error.ctx.command.list_commands(error.ctx) if what.startswith("No such command") else ()
        return UsageError(what, where=path, choices=commands, do=f"see '{path} --help'")
    known = [name for item in error.ctx.command.params for name in (*item.opts, *item.secondary_opts)]
    meant = meant_option(error.option_name, known)
    question = f"; did you mean {' or '.join(meant)}?" if meant else ""
    do = f"see '{path} --help-all' for every option"
    return UsageError(f"no such option: {error.option_name}{question}", where=path, do=do)


def meant_option(given: str, known: Iterable[str]) -> list[str]:
    """Names of ``known`` that mean what ``given`` means elsewhere, else names with like letters."""
    options = [name for name in known if name.startswith("--")]
    same = [name for name, others in MEANT.items() if name in options and given in others]
    return same or closest(given, options, cutoff=0.65)
