# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.catalogue.records import GradReduceDtype
from llmb.catalogue.resolve import Overrides, Request
from llmb.runs.parallelism import DpSharding, PipelineSchedule

LAYOUT = "Layout overrides"

CHECKPOINTS = "Checkpoints"

PARALLELISM = "Parallelism"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SaveCheckpoint = Annotated[
    bool,
    typer.Option(
        "--save-checkpoint",
        help="Save a checkpoint after the last step.",
        envvar="ENABLE_CHECKPOINT",
        rich_help_panel=CHECKPOINTS,
    ),
]
CheckpointDir = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-dir",
        help="Folder below which this run saves, in one of its own. Default: the run's folder.",
        rich_help_panel=CHECKPOINTS,
    ),
]
CheckpointInterval = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-interval",
        help="Save one every N steps as well, while training goes on.",
        rich_help_panel=CHECKPOINTS,
    ),
]
LoadCheckpoint = Annotated[
    Path | None,
    typer.Option(
        "--load-checkpoint",
        help="Go on from a checkpoint, the folder above 'weights', on any number of processes.",
        envvar="LOAD_CHECKPOINT_PATH",
        rich_help_panel=CHECKPOINTS,
    ),
]

GradReduceDtypeOption = Annotated[
    GradReduceDtype | None,
    typer.Option(
        "--grad-reduce-dtype",
        help="What gradients of micro-batches and ranks are added up in. Default: as the recipe says.",
        rich_help_panel="Training",
    ),
]
DpShardingOption = Annotated[
    DpSharding,
    typer.Option(
        "--dp-sharding",
        help="What data-parallel ranks share out: 'full' parameters, gradients and optimizer state (ZeRO-3), "
        "'optimizer' all but the parameters within a step (ZeRO-1), 'none' nothing (DDP).",
        rich_help_panel=PARALLELISM,
    ),
]
DpShardSize = Annotated[
    int | None,
    typer.Option(
        "--dp-shard-size",
        help="Share out within groups of N ranks of DP x CP, each group with a copy. Default: one group.",
        rich_help_panel=PARALLELISM,
    ),
]
PipelineScheduleOption = Annotated[
    PipelineSchedule | None,
    typer.Option(
        "--pipeline-schedule",
        help="Order of work in a pipeline. Default: 1f1b; with VP interleaved. 'zero-bubble' leaves weight gradients "
        "for idle time, 'zero-bubble-v' (VP 2) also lays the stages in a V.",
        rich_help_panel=PARALLELISM,
    ),
]


def recipe_options(
    *,
    workload: Annotated[str, typer.Option("-w", "--workload", help="What is trained; see 'llmb list'.")],
    size: Annotated[str, typer.Option("-s", "--size", help="Model size, such as 8b; 'tiny' trains on a laptop.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8 or, on a CPU, fp32. Default: bf16; on a CPU fp32.")
    ] = None,
    scale: Annotated[int | None, typer.Option(help="Number of GPUs, or of processes on a CPU.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="GPU type of the catalogue, or cpu.")] = None,
    release: Annotated[str | None, typer.Option(help="Release of the source document. Default: the newest.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size.", rich_help_panel=LAYOUT)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline parallel size.", rich_help_panel=LAYOUT)] = None,
    vp: Annotated[int | None, typer.Option(help="Virtual pipeline stages per rank.", rich_help_panel=LAYOUT)] = None,
    cp: Annotated[int | None, typer.Option(help="Context parallel size.", rich_help_panel=LAYOUT)] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size.", rich_help_panel=LAYOUT)] = None,
    etp: Annotated[int | None, typer.Option(help="Tensor parallel size of experts.", rich_help_panel=LAYOUT)] = None,
    mbs: Annotated[int | None, typer.Option(help="Micro batch size.", rich_help_panel=LAYOUT)] = None,
    gbs: Annotated[int | None, typer.Option(help="Global batch size.", rich_help_panel=LAYOUT)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Sequence length in tokens.", rich_help_panel=LAYOUT)] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", rich_help_panel=LAYOUT)] = None,
    first_stage_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the first pipeline stage; others share the rest.", rich_help_panel=LAYOUT),
    ] = None,
    last_stage_layers: Annotated[
        int | None, typer.Option(help="Layers of the last pipeline stage, likewise.", rich_help_panel=LAYOUT)
    ] = None,
    no_sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--no-sequence-parallel",
            help="Tensor parallelism without cutting the sequence between layers.",
            rich_help_panel=LAYOUT,
        ),
    ] = False,
) -> Request:
    """The request that these options make. Every command that takes a recipe has them, by ``takes_recipe``."""
    overrides = Overrides(
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=ep,
        etp=etp,
        mbs=mbs,
        gbs=gbs,
        seq_len=seq_len,
        layers=layers,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        sequence_parallel=False if no_sequence_parallel else None,
    )
    return Request(
        workload=workload,
        size=size,
        dtype=dtype,
        gpu_type=gpu_type,
        scale=scale,
        release=release,
        overrides=overrides,
    )


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of ``recipe_options`` in place of its first parameter, the request they make."""
    shared = inspect.signature(recipe_options).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**options: Any) -> None:  # noqa: ANN401 (whatever the options' types are)
        request = recipe_options(**{name: options.pop(name) for name in shared})
        command(request, **options)

    parameters = [*shared.values(), *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
