# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llmb.catalogue.resolve import Overrides, Request

LAYOUT = "Layout overrides"


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
    """The request that these options make. Every command that takes a recipe has them."""
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


def takes(*makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of each maker in place of its first parameters, the values that they make."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parts = [list(inspect.signature(maker).parameters.values()) for maker in makers]
        own = list(inspect.signature(command).parameters.values())[len(makers) :]

        @functools.wraps(command)
        def with_options(**options: Any) -> None:  # noqa: ANN401 (whatever the options' types are)
            made = [
                maker(**{option.name: options.pop(option.name) for option in part})
                for maker, part in zip(makers, parts, strict=True)
            ]
            command(*made, **options)

        shared = [option for part in parts for option in part]
        parameters = [*shared, *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {option.name: option.annotation for option in parameters}
        return with_options

    return decorate


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """For a command on a recipe."""
    return takes(recipe_options)(command)
