# SPDX-License-Identifier: Apache-2.0
"""The options of ``llmb doctor``."""

from pathlib import Path
from typing import Annotated

import typer

from llmb.cli.completion import gpu_types
from llmb.health.rules import AREAS

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
NoDisk = Annotated[bool, typer.Option("--no-disk", help="Write no file: no rates of file systems.")]
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
    int, typer.Option(metavar="MINUTES", min=1, help="Of the check of one node.", rich_help_panel=SEVERAL)
]
MaxWait = Annotated[
    float, typer.Option(metavar="MINUTES", min=0, help="How long to wait for busy nodes.", rich_help_panel=SEVERAL)
]
Last = Annotated[
    bool, typer.Option("--last", help="Show the last check of several nodes again.", rich_help_panel=SEVERAL)
]
