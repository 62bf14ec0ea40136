# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor``."""

import os
import sys
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.cli.completion import gpu_types
from llmb.cli.json_option import Json
from llmb.cli.progress import PhaseProgress
from llmb.cli.root import install_here
from llmb.errors import RunFailed, UsageError, UserInterrupt, did_you_mean
from llmb.health.node import DISK_BYTES, Request, check_node
from llmb.health.records import NodeReport
from llmb.health.rules import AREAS, rules
from llmb.health.wanted import named_places, wanted_of
from llmb.report.doctor_report import doctor_document, node_tables
from llmb.report.output import print_json, print_tables
from llmb.schedulers.lookup import read_cluster_site

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
MIB = 2**20


@app.command()
def doctor(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help=f"Only these areas or checks, separated by commas; may be repeated. Areas: {', '.join(AREAS)}.",
            show_default=False,
        ),
    ] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(
            help="GPU type that the node should have. Default: that of cluster_config.yaml.",
            autocompletion=gpu_types,
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="GPUs that the node should have. Default: those of cluster_config.yaml, or of the GPU type.",
            show_default=False,
        ),
    ] = None,
    disk_size: Annotated[
        int, typer.Option(metavar="MIB", min=4, help="Size of the file that is written and read on each file system.")
    ] = DISK_BYTES // MIB,
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Write no file: no rates of file systems.")] = False,
    json: Json = False,
) -> None:
    """Check whether this node is fit to train, with advice on what is not.

    GPUs, CPUs, memory, kernel, limits, network, Slurm, containers, file systems, whether Python, torch, CUDA, driver
    and NCCL fit together, and the clock. Each check passes, warns or fails; what does not exist here is listed as not
    checked, with the reason. Nothing is changed; on each file system, a file is written and removed.

    Exit codes: 0 every check passes or warns, 4 one fails.

    Examples:

    - `llmb doctor`

    - `llmb doctor --gpu-type h100 --gpus 8`

    - `llmb doctor --only gpu,network`

    - `llmb doctor --only disk --disk-size 4096 --json`

    `llmb docs checks` lists every check with its thresholds.
    """
    names = tuple(name.strip() for text in only or () for name in text.split(",") if name.strip())
    for name in names:
        if name not in (*AREAS, *rules()):
            hint = did_you_mean(name, (*AREAS, *rules()))
            do = "give an area, or a check by its name; 'llmb docs checks' lists all"
            raise UsageError(f"unknown area or check '{name}'{hint}", choices=AREAS, do=do)
    if no_disk and disk_size != DISK_BYTES // MIB:
        raise UsageError("--no-disk and --disk-size exclude each other", do="give one of them")
    install, catalogue = install_here(), Catalogue()
    site = read_cluster_site(catalogue, install, os.environ)
    request = Request(
        wanted=wanted_of(catalogue, site, gpu_type, gpus),
        places=named_places(site, os.environ),
        python=site.config.python or sys.executable,
        disk_bytes=0 if no_disk else disk_size * MIB,
        only=names,
    )
    try:
        with PhaseProgress("checking") as progress:
            report = check_node(request, say=progress.phase)
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; nothing was changed") from error
    if json:
        print_json(doctor_document([report]))
    else:
        print_tables(node_tables(report))
    raise_unless_fit([report])


def raise_unless_fit(reports: list[NodeReport]) -> None:
    """Raises RunFailed if a check of a node fails."""
    for report in reports:
        failed = [check.name for check in report.checks if check.status == "fail"]
        if failed:
            count = "1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail"
            raise RunFailed(f"{report.node} is not fit: {count}: {', '.join(failed)}")
