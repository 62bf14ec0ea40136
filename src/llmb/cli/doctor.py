# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor``."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.cli.completion import gpu_types
from llmb.cli.doctor_nodes import (
    MAX_WAIT_MIN,
    TIME_LIMIT_MIN,
    Chosen,
    Limits,
    doctor_nodes,
    raise_unless_fit,
    show_last,
)
from llmb.cli.json_option import Json
from llmb.cli.progress import PhaseProgress
from llmb.cli.root import install_here
from llmb.errors import UsageError, UserInterrupt, did_you_mean
from llmb.health.check_nodes import utc_now
from llmb.health.kept_checks import NodesRequest
from llmb.health.node import DISK_BYTES, Request, check_node
from llmb.health.rules import AREAS, rules
from llmb.health.wanted import named_places, wanted_of
from llmb.report.doctor_report import doctor_document, node_tables
from llmb.report.output import print_json, print_tables
from llmb.schedulers.lookup import read_cluster_site

SEVERAL = "Several nodes"
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
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Check these nodes of a Slurm cluster in place of this one, such as node[1-4,7].",
            rich_help_panel=SEVERAL,
            show_default=False,
        ),
    ] = None,
    nodelist_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The nodes that a file lists.", rich_help_panel=SEVERAL, show_default=False),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--partition",
            help="All usable nodes of this partition; with --nodes, the partition of the jobs.",
            rich_help_panel=SEVERAL,
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All usable nodes of the cluster.", rich_help_panel=SEVERAL)
    ] = False,
    account: Annotated[
        str | None,
        typer.Option(
            "-A",
            "--account",
            help="Slurm account. Default: SBATCH_ACCOUNT, or cluster_config.yaml.",
            rich_help_panel=SEVERAL,
            show_default=False,
        ),
    ] = None,
    slurm_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE]",
            help="Any other flag of sbatch, such as reservation=maint; 'KEY=' leaves one out. Repeatable.",
            rich_help_panel=SEVERAL,
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[
        int,
        typer.Option(metavar="MINUTES", min=1, help="Of the check of one node.", rich_help_panel=SEVERAL),
    ] = TIME_LIMIT_MIN,
    max_wait: Annotated[
        float,
        typer.Option(metavar="MINUTES", min=0, help="How long to wait for busy nodes.", rich_help_panel=SEVERAL),
    ] = MAX_WAIT_MIN,
    last: Annotated[
        bool,
        typer.Option("--last", help="Show the last check of several nodes again.", rich_help_panel=SEVERAL),
    ] = False,
    json: Json = False,
) -> None:
    """Check whether this node, or a list of nodes, is fit to train, with advice on what is not.

    GPUs, CPUs, memory, kernel, limits, network, Slurm, containers, file systems, whether Python, torch, CUDA, driver
    and NCCL fit together, and the clock. Each check passes, warns or fails; what does not exist here is listed as not
    checked, with the reason. Nothing is changed; on each file system, a file is written and removed.

    A list of nodes is checked through Slurm, by a job for each that waits for no other. A node that is down, does not
    answer or dies is unfit, with the reason; so the others are reported all the same. Nodes unlike most are named. The
    result is kept, and `llmb submit --exclude unfit` leaves its unfit nodes out.

    Exit codes: 0 every check passes or warns, 4 one fails.

    Examples:

    - `llmb doctor`

    - `llmb doctor --gpu-type h100 --gpus 8`

    - `llmb doctor --only gpu,network`

    - `llmb doctor --only disk --disk-size 4096 --json`

    - `llmb doctor --nodes node[1-64] --only gpu,network`

    - `llmb doctor --partition batch --max-wait 5`

    - `llmb doctor --last --nodes node7`

    `llmb docs checks` lists every check with its thresholds.
    """
    names = tuple(name.strip() for text in only or () for name in text.split(",") if name.strip())
    known = (*AREAS, *(rule.name for rule in rules().values() if rule.area in AREAS))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            do = "give an area, or a check by its name; 'llmb docs checks' lists all"
            raise UsageError(f"unknown area or check '{name}'{hint}", choices=AREAS, do=do)
    if no_disk and disk_size != DISK_BYTES // MIB:
        raise UsageError("--no-disk and --disk-size exclude each other", do="give one of them")
    install, catalogue = install_here(), Catalogue()
    chosen = Chosen(nodes=nodes, file=nodelist_file, partition=partition, every=every)
    if last:
        show_last(install, chosen, json=json)
        return
    if chosen.any:
        asked = NodesRequest(
            started_at=utc_now(),
            nodes=(),
            gpu_type=gpu_type,
            gpus=gpus,
            disk_bytes=0 if no_disk else disk_size * MIB,
            only=names,
        )
        flags = {"account": account, "partition": partition, "slurm_arg": tuple(slurm_arg or ())}
        doctor_nodes(install, chosen, asked, flags, Limits(time_limit, max_wait), json=json)
        return
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
