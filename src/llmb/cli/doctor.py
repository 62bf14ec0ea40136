# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor``."""

import os
import sys
from collections.abc import Iterable, Iterator
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
from llmb.cli.options import Json
from llmb.cli.progress import PhaseProgress
from llmb.cli.root import install_here
from llmb.errors import UsageError, UserInterrupt, did_you_mean
from llmb.health.check_nodes import utc_now
from llmb.health.kept_checks import NodesRequest
from llmb.health.node import DISK_BYTES, CheckRequest, check_node
from llmb.health.rules import AREAS, rules
from llmb.health.wanted import named_places, wanted_of
from llmb.report.doctor_report import doctor_document, node_tables
from llmb.report.output import print_output
from llmb.schedulers.lookup import read_cluster_site

SEVERAL = "Several nodes"

Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help=f"Only these areas or checks, separated by commas; may be repeated. Areas: {', '.join(AREAS)}.",
        show_default=False,
    ),
]
GpuType = Annotated[
    str | None,
    typer.Option(
        help="GPU type that the node should have. Default: that of cluster_config.yaml.",
        autocompletion=gpu_types,
        show_default=False,
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="GPUs that the node should have. Default: those of cluster_config.yaml, or of the GPU type.",
        show_default=False,
    ),
]
DiskSize = Annotated[
    int, typer.Option(metavar="MIB", min=4, help="Size of the file that is written and read on each file system.")
]
NoDisk = Annotated[bool, typer.Option("--no-disk", help="Write no file, and measure no rates of file systems.")]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Check these nodes of a Slurm cluster in place of this one, such as node[1-4,7].",
        rich_help_panel=SEVERAL,
        show_default=False,
    ),
]
NodelistFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The nodes that a file lists.", rich_help_panel=SEVERAL, show_default=False),
]
Partition = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--partition",
        help="All usable nodes of this partition; with --nodes, the partition of the jobs.",
        rich_help_panel=SEVERAL,
        show_default=False,
    ),
]
Every = Annotated[bool, typer.Option("--all", help="All usable nodes of the cluster.", rich_help_panel=SEVERAL)]
Account = Annotated[
    str | None,
    typer.Option(
        "-A",
        "--account",
        help="Slurm account. Default: SBATCH_ACCOUNT, or cluster_config.yaml.",
        rich_help_panel=SEVERAL,
        show_default=False,
    ),
]
SlurmArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY[=VALUE]",
        help="Any other flag of sbatch, such as reservation=maint; 'KEY=' leaves one out. Repeatable.",
        rich_help_panel=SEVERAL,
        show_default=False,
    ),
]
TimeLimit = Annotated[
    int, typer.Option(metavar="MINUTES", min=1, help="Time limit of the check of one node.", rich_help_panel=SEVERAL)
]
MaxWait = Annotated[
    float, typer.Option(metavar="MINUTES", min=0, help="How long to wait for busy nodes.", rich_help_panel=SEVERAL)
]
Last = Annotated[
    bool, typer.Option("--last", help="Show the last check of several nodes again.", rich_help_panel=SEVERAL)
]

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
MIB = 2**20


@app.command()
def doctor(
    only: Only = None,
    gpu_type: GpuType = None,
    gpus: Gpus = None,
    disk_size: DiskSize = DISK_BYTES // MIB,
    no_disk: NoDisk = False,
    nodes: Nodes = None,
    nodelist_file: NodelistFile = None,
    partition: Partition = None,
    every: Every = False,
    account: Account = None,
    slurm_arg: SlurmArg = None,
    time_limit: TimeLimit = TIME_LIMIT_MIN,
    max_wait: MaxWait = MAX_WAIT_MIN,
    last: Last = False,
    json: Json = False,
) -> None:
    """Check whether this node, or a list of nodes, is fit to train, with advice on what is not.

    GPUs, CPUs, memory, kernel, limits, network, Slurm, containers, file systems, whether Python, torch, CUDA, driver
    and NCCL fit together, and the clock. Each check passes, warns or fails; what does not exist here is listed as not
    checked, with the reason. Nothing is changed; on each file system, a file is written and removed.

    A list of nodes is checked through Slurm, by a job for each that waits for no other. A node that is down, does not
    answer or dies is unfit, with the reason; so the others are reported all the same. Nodes unlike most are named. The
    result is kept, and `llmb submit --exclude unfit` leaves its unfit nodes out.

    Exit codes: 0 every check passes or warns, 4 one fails. `llmb docs checks` lists every check with its thresholds.

    Examples:

    - `llmb doctor`

    - `llmb doctor --gpu-type h100 --gpus 8`

    - `llmb doctor --only disk --disk-size 4096 --json`

    - `llmb doctor --nodes node[1-64] --only gpu,network`

    - `llmb doctor --partition batch --max-wait 5`

    - `llmb doctor --last --nodes node7`
    """
    names = tuple(_known_names(only or ()))
    if no_disk and disk_size != DISK_BYTES // MIB:
        raise UsageError("--no-disk and --disk-size cannot be combined", do="give one of them")
    disk_bytes = 0 if no_disk else disk_size * MIB
    install = install_here()
    chosen = Chosen(nodes=nodes, file=nodelist_file, partition=partition, every=every)
    if last:
        show_last(install, chosen, json=json)
    elif chosen.any:
        what = {"gpu_type": gpu_type, "gpus": gpus, "disk_bytes": disk_bytes, "only": names}
        check_request = NodesRequest(started_at=utc_now(), nodes=(), **what)
        flags = {"account": account, "partition": partition, "slurm_arg": tuple(slurm_arg or ())}
        doctor_nodes(install, chosen, check_request, flags, Limits(time_limit, max_wait), json=json)
    else:
        _check_here(install, gpu_type, gpus, disk_bytes, names, json=json)


def _known_names(texts: Iterable[str]) -> Iterator[str]:
    """Areas and checks. Raises UsageError for one that is unknown."""
    known = (*AREAS, *(rule.name for rule in rules().values() if rule.area in AREAS))
    for name in (name.strip() for text in texts for name in text.split(",") if name.strip()):
        if name not in known:
            do = "give an area, or a check by its name; 'llmb docs checks' lists all"
            raise UsageError(f"unknown area or check '{name}'{did_you_mean(name, known)}", choices=AREAS, do=do)
        yield name


def _check_here(
    install: Path, gpu_type: str | None, gpus: int | None, disk_bytes: int, names: tuple[str, ...], *, json: bool
) -> None:
    catalogue = Catalogue()
    site = read_cluster_site(catalogue, install, os.environ)
    request = CheckRequest(
        wanted=wanted_of(catalogue, site, gpu_type, gpus),
        places=named_places(site, os.environ),
        python=site.config.python or sys.executable,
        disk_bytes=disk_bytes,
        only=names,
    )
    try:
        with PhaseProgress("checking") as progress:
            report = check_node(request, say=progress.phase)
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; nothing was changed") from error
    print_output(doctor_document([report]) if json else node_tables(report))
    raise_unless_fit([report])
