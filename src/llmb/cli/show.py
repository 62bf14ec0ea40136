# SPDX-License-Identifier: Apache-2.0
"""``llmb show``."""

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
from llmb.report.catalogue_report import recipe_document, recipe_tables
from llmb.report.output import print_json, print_table

app = typer.Typer(add_completion=False)


@app.command()
def show(
    workload: Workload,
    size: Size,
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
    """One recipe, fully resolved: model, layout, FLOPs and what is published of it.

    Examples: llmb show -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11;
    llmb show -w pretrain_nemotron4 -s 15b --dtype fp8 --scale 64 --json
    """
    recipe = resolve(Catalogue(), request_from(locals()))
    if json:
        print_json(recipe_document(recipe))
    else:
        for table in recipe_tables(recipe):
            print_table(table)
