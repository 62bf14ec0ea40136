# SPDX-License-Identifier: Apache-2.0
"""``llmb metrics``."""

from dataclasses import asdict
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import resolve
from llmb.cli.options import (
    Cp,
    DtypeOption,
    Ep,
    Etp,
    Gbs,
    GpuType,
    Json,
    Layers,
    Mbs,
    Pp,
    Release,
    Scale,
    SeqLen,
    Size,
    Tp,
    Vp,
    Workload,
    request_from,
)
from llmb.errors import UsageError
from llmb.metrics.throughput import throughput
from llmb.report.catalogue_report import throughput_table
from llmb.report.output import print_json, print_table

app = typer.Typer(add_completion=False)


@app.command()
def metrics(
    workload: Workload,
    size: Size,
    step_time: Annotated[float, typer.Option("--step-time", help="Seconds per training step.")],
    dtype: DtypeOption = None,
    scale: Scale = None,
    gpu_type: GpuType = None,
    release: Release = None,
    tp: Tp = None,
    pp: Pp = None,
    vp: Vp = None,
    cp: Cp = None,
    ep: Ep = None,
    etp: Etp = None,
    mbs: Mbs = None,
    gbs: Gbs = None,
    seq_len: SeqLen = None,
    layers: Layers = None,
    json: Json = False,
) -> None:
    """Throughput, TFLOPS per GPU, MFU and time to train for a given step time.

    MFU is printed in every FLOP convention: 'published' as the source document counts, 'full' with the whole attention
    square, 'causal' with the half that is needed.

    Example: llmb metrics -w pretrain_llama3.1 -s 8b --dtype bf16 --scale 8 --gpu-type h100 --step-time 12.27
    """
    if not step_time > 0:
        raise UsageError(f"a step time of {step_time} s is not possible", do="give --step-time in seconds, above 0")
    recipe = resolve(Catalogue(), request_from(locals()))
    result = throughput(recipe, step_time)
    if json:
        print_json(asdict(result))
    else:
        print_table(throughput_table(recipe, result))
