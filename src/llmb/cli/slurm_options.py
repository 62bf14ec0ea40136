# SPDX-License-Identifier: Apache-2.0
"""The options of every command that queues jobs."""

import os
import sys
from functools import partial
from typing import Annotated, Literal

import typer

from llmb.jobspec.options import JobOptions
from llmb.jobspec.variables import parse_variables
from llmb.schedulers.lookup import job_flags, shell_gpus_per_node

_slurm = partial(typer.Option, rich_help_panel="Slurm")


def slurm_options(
    *,
    account: Annotated[str | None, _slurm("--account", help="Slurm account.")] = None,
    partition: Annotated[str | None, _slurm("--partition", help="Partition, or several with commas.")] = None,
    qos: Annotated[str | None, _slurm("--qos", help="Quality of service.")] = None,
    time_limit: Annotated[
        str | None, _slurm("--time-limit", help="Minutes, hh:mm:ss or d-hh:mm:ss. Default: of the recipe.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        _slurm("--gpus-per-node", help="GPUs, or processes on a CPU. Default: of the GPU type.", min=1),
    ] = None,
    nodelist: Annotated[str | None, _slurm("--nodelist", help="Nodes that have to be among the job's.")] = None,
    exclude: Annotated[str | None, _slurm("--exclude", help="Nodes that must not be.")] = None,
    constraint: Annotated[str | None, _slurm("--constraint", help="Features that the nodes need.")] = None,
    reservation: Annotated[str | None, _slurm("--reservation", help="Reservation to run in.")] = None,
    nice: Annotated[int | None, _slurm("--nice", help="Lowers the priority.")] = None,
    segment: Annotated[
        int | None,
        _slurm("--segment", help="Nodes that lie in one NVLink domain. Default on GB200, GB300: as many as divide."),
    ] = None,
    dependency: Annotated[str | None, _slurm("--dependency", help="Such as afterok:1234.")] = None,
    array: Annotated[
        str | None, _slurm("--array", help="Runs of the same recipe, such as 0-3, or 0-9%2 for two at a time.")
    ] = None,
    requeue: Annotated[bool, _slurm("--requeue", help="Queue again after preemption or the loss of a node.")] = False,
    retries: Annotated[
        int | None,
        _slurm(
            "--retries",
            min=0,
            help="Start again, from the last checkpoint, so many times after preemption, the loss of a node and other "
            "failures of the infrastructure. Default: cluster_config.yaml, else 0.",
        ),
    ] = None,
    signal_before: Annotated[
        int | None, _slurm("--signal-before", help="End the workers N seconds before the time limit.", min=1)
    ] = None,
    slurm_arg: Annotated[
        list[str] | None,
        _slurm(
            "--slurm-arg", metavar="KEY[=VALUE]", help="Any other flag of sbatch; 'KEY=' leaves one out. Repeatable."
        ),
    ] = None,
    env: Annotated[
        list[str] | None, _slurm("--env", metavar="NAME=VALUE", help="Variable of the workers. Repeatable.")
    ] = None,
    start: Annotated[
        Literal["torchrun", "task-per-gpu"] | None,
        _slurm("--start", help="torchrun on each node, or one Slurm task per GPU. Default: torchrun."),
    ] = None,
) -> JobOptions:
    """What these options ask for, above the shell's variables. Raises UsageError with all that is wrong."""
    texts = {
        "account": account,
        "partition": partition,
        "qos": qos,
        "time": time_limit,
        "nodelist": nodelist,
        "exclude": exclude,
        "constraint": constraint,
        "reservation": reservation,
        "nice": nice,
        "segment": segment,
        "dependency": dependency,
        "array": array,
        "signal": f"B:USR1@{signal_before}" if signal_before else None,
    }
    own: dict[str, str | None] = {name: str(value) for name, value in texts.items() if value is not None}
    if requeue:
        own["requeue"] = None
    return JobOptions(
        flags=job_flags(own, slurm_arg or (), os.environ),
        variables=parse_variables(env or ()),
        gpus_per_node=gpus_per_node or shell_gpus_per_node(os.environ),
        start=start,
        retries=retries,
        python=sys.executable,
    )
