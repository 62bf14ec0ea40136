# SPDX-License-Identifier: Apache-2.0
"""The options of every command that trains: one for each field of ``Choices``, under its name."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from llmb.catalogue.records import Record
from llmb.cli.options import recipe_options, takes
from llmb.runs.choices import Choices
from llmb.runs.parallelism import Parallelism
from llmb.runs.profiling import Profiling

_training = partial(typer.Option, rich_help_panel="Training")
_checkpoint = partial(typer.Option, rich_help_panel="Checkpoints")
_parallelism = partial(typer.Option, rich_help_panel="Parallelism")
_profiling = partial(typer.Option, rich_help_panel="Profiling")

OPTIONS: Mapping[str, OptionInfo] = MappingProxyType(
    {
        "steps": _training("--steps", help="Training steps. Default: 50; 1 with --load-checkpoint."),
        "window": typer.Option("--window", help="Steps to take statistics over: auto, last, all or A-B."),
        "seed": _training("--seed", help="Of initial values and data. Default: 1234."),
        "peak_lr": _training("--lr", help="Peak learning rate."),
        "warmup_steps": _training("--warmup-steps", help="Warm-up of the learning rate."),
        "document_tokens": _training(
            "--document-tokens",
            help="Pack sequences from documents of N tokens on average. Default: as the recipe; LoRA packs.",
        ),
        "grad_reduce_dtype": _training(
            "--grad-reduce-dtype",
            help="What gradients of micro-batches and ranks are added up in. Default: as the recipe says.",
        ),
        "fp8_recipe": _training(
            "--fp8-recipe",
            help="Where FP8 tensors' scales come from: 'delayed' the largest values of earlier steps, 'current' the "
            "tensor itself, with the first and last layer in bf16. Default with --dtype fp8: delayed.",
        ),
        "emulate_fp8": _training(
            "--emulate-fp8", help="Cast to FP8, but multiply in bf16: for GPUs without FP8. Says nothing of its speed."
        ),
        "recompute": _training("--recompute", help="Activation checkpointing."),
        "compiled": _training(
            "--compile/--no-compile",
            help="Compile the model's blocks with torch.compile. Default: on a GPU yes, but for zero-bubble schedules.",
        ),
        "keep_logits": _training(
            "--keep-logits",
            help="Keep a micro-batch's logits whole for the backward pass, which otherwise computes them again in"
            " pieces: less work for more memory.",
        ),
        "attention_backend": _training(
            "--attention-backend",
            help="torch's attention kernel. 'auto': on a GPU the quickest at this run's shapes, timed before the first "
            "step; on a CPU flash. 'cudnn' and 'efficient' need a GPU.",
        ),
        "force_load_balancing": _training(
            "--force-load-balancing",
            help="Give every expert as many tokens as any other, whatever the router says.",
        ),
        "stall_limit_s": _training(
            "--stall-limit",
            help="Seconds within which a run without progress is ended; 4 times as many before the first step, 12"
            " times while saving or writing a profile. 0: never.",
        ),
        "dp_sharding": _parallelism(
            "--dp-sharding",
            help="What data-parallel ranks share out: 'full' parameters, gradients and optimizer state (ZeRO-3), "
            "'optimizer' all but the parameters within a step (ZeRO-1), 'none' nothing (DDP). Default: full; optimizer "
            "where there is nobody to share with.",
        ),
        "dp_shard_size": _parallelism(
            "--dp-shard-size",
            help="Share out within groups of N ranks of DP x CP, each group with a copy. Default: one group.",
        ),
        "pipeline_schedule": _parallelism(
            "--pipeline-schedule",
            help="Order of work in a pipeline. Default: 1f1b; with VP interleaved. 'zero-bubble' leaves weight "
            "gradients for idle time, 'zero-bubble-v' (VP 2) also lays the stages in a V.",
        ),
        "save_checkpoint": _checkpoint(
            "--save-checkpoint", help="Save a checkpoint after the last step.", envvar="ENABLE_CHECKPOINT"
        ),
        "checkpoint_interval": _checkpoint(
            "--checkpoint-interval", help="Save one every N steps as well, while training goes on."
        ),
        "checkpoint_dir": _checkpoint(
            "--checkpoint-dir",
            metavar="FOLDER",
            help="Folder below which this run saves, in one of its own. Default: the run's folder.",
        ),
        "load_checkpoint": _checkpoint(
            "--load-checkpoint",
            metavar="FOLDER",
            help="Go on from a checkpoint, the folder above 'weights', on any number of processes.",
            envvar="LOAD_CHECKPOINT_PATH",
        ),
        "profile": _profiling(
            "--profile", help="Profile some steps, and tell where the time of one went.", envvar="ENABLE_PROFILE"
        ),
        "profiler": _profiling(
            "--profiler",
            help="nsys (Nsight Systems; GPUs only) or torch (PyTorch's profiler). auto: nsys where it is on the PATH.",
        ),
        "profile_start_step": _profiling(
            "--profile-start-step",
            help="First step profiled, from 0. Default: the last tenth of the steps, 45 of 50.",
            envvar="PROFILE_START_STEP",
        ),
        "profile_stop_step": _profiling(
            "--profile-stop-step",
            help="First step profiled no more. Default: the end; without --steps also the number of steps.",
            envvar="PROFILE_STOP_STEP",
        ),
        "profile_ranks": _profiling(
            "--profile-ranks", help="Ranks profiled, such as 0,4-7. Default: the first 8.", envvar="PROFILE_RANKS"
        ),
        "profile_gpu_metrics": _profiling(
            "--profile-gpu-metrics",
            help="Nsight Systems also samples the GPU of the first rank profiled; drivers may allow this to root only.",
            envvar="ENABLE_GPU_METRICS",
        ),
        "nccl_trace": _profiling(
            "--nccl-trace",
            help="Keep NCCL's log of every collective; 5 steps unless --steps says otherwise. GPUs only.",
            envvar="ENABLE_NCCLTRACE",
        ),
    }
)


def training_options(**given: Any) -> Choices:  # noqa: ANN401 (whatever the options' types are)
    """The choices that the options make. Folders become absolute: workers may start elsewhere."""
    parallelism = Parallelism(**{name: given.pop(name) for name in Parallelism.model_fields})
    profiling = Profiling(**{name: given.pop(name) for name in Profiling.model_fields})
    for name in ("checkpoint_dir", "load_checkpoint"):
        given[name] = str(Path(given[name]).absolute()) if given[name] else None
    return Choices(**given, parallelism=parallelism, profiling=profiling)


def option_parameters() -> list[inspect.Parameter]:
    """One for each name of ``OPTIONS``, in that order, with type and default of its field."""
    fields = fields_of(Choices) | fields_of(Parallelism) | fields_of(Profiling)
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=fields[name][1], annotation=Annotated[fields[name][0], option]
        )
        for name, option in OPTIONS.items()
    ]


def fields_of(record: type[Record]) -> dict[str, tuple[Any, Any]]:
    """Type and default of each field."""
    return {name: (field.annotation, field.default) for name, field in record.model_fields.items()}


training_options.__signature__ = inspect.Signature(option_parameters())  # type: ignore[attr-defined]


def takes_choices(command: Callable[..., None]) -> Callable[..., None]:
    """For a command that trains: its first two parameters are the request and the choices."""
    return takes(recipe_options, training_options)(command)
