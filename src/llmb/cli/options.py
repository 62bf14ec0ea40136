# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from typing import Annotated

import typer

from llmb.catalogue.resolve import Overrides, Request

LAYOUT = "Layout overrides"

Workload = Annotated[str, typer.Option("-w", "--workload", help="What is trained; see 'llmb list'.")]
Size = Annotated[str, typer.Option("-s", "--size", help="Model size, for example 8b; 'tiny' trains on a laptop.")]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="bf16, fp8, or fp32 on a CPU. Default: bf16; on a CPU fp32.")
]
Scale = Annotated[int | None, typer.Option("--scale", help="Number of GPUs (CPU: processes).")]
GpuType = Annotated[str | None, typer.Option("--gpu-type", help="GPU type of the catalogue, or cpu.")]
Release = Annotated[str | None, typer.Option("--release", help="Release of the source document. Default: the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

Tp = Annotated[int | None, typer.Option("--tp", help="Tensor parallel size.", rich_help_panel=LAYOUT)]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline parallel size.", rich_help_panel=LAYOUT)]
Vp = Annotated[int | None, typer.Option("--vp", help="Virtual pipeline stages per rank.", rich_help_panel=LAYOUT)]
Cp = Annotated[int | None, typer.Option("--cp", help="Context parallel size.", rich_help_panel=LAYOUT)]
Ep = Annotated[int | None, typer.Option("--ep", help="Expert parallel size.", rich_help_panel=LAYOUT)]
Etp = Annotated[int | None, typer.Option("--etp", help="Tensor parallel size of experts.", rich_help_panel=LAYOUT)]
Mbs = Annotated[int | None, typer.Option("--mbs", help="Micro batch size.", rich_help_panel=LAYOUT)]
Gbs = Annotated[int | None, typer.Option("--gbs", help="Global batch size.", rich_help_panel=LAYOUT)]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Sequence length in tokens.", rich_help_panel=LAYOUT)]
Layers = Annotated[int | None, typer.Option("--layers", help="Number of layers.", rich_help_panel=LAYOUT)]


def request_from(options: dict[str, object]) -> Request:
    """The request of a command whose parameters carry the names above; other parameters are ignored."""
    overrides = Overrides.model_validate({name: options[name] for name in Overrides.model_fields})
    fields = ("workload", "size", "dtype", "gpu_type", "scale", "release")
    return Request(**{name: options[name] for name in fields}, overrides=overrides)  # type: ignore[arg-type]
