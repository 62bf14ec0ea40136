# SPDX-License-Identifier: Apache-2.0
"""Partitions and the GPUs that they have. Pure."""

from llmb.catalogue.resolve import CPU
from llmb.errors import UsageError
from llmb.schedulers.slurm.settings import SlurmSettings


def site_partition(settings: SlurmSettings, gpu_type: str | None) -> str | None:
    """The cluster's partition for a job that names none: the default, unless another one is for its GPU type."""
    if gpu_type == CPU:
        return settings.cpu_partition or settings.partition
    known = settings.types_of(settings.partition)
    if gpu_type is None or not settings.partitions or gpu_type in known.values():
        return settings.partition
    others = [name for name, partition in settings.partitions.items() if partition.gpu_type == gpu_type]
    if settings.partition is None or known:
        return ",".join(others) or settings.partition
    return settings.partition


def gpu_type_within(settings: SlurmSettings, partition: str | None, asked: str | None, site: str | None) -> str | None:
    """The GPU type of a job in ``partition``, which is None where the job names none: the ``asked`` one, else the
    partition's, else the ``site``'s.

    Raises UsageError where the partition does not have it, or where several partitions have different ones.
    """
    if asked == CPU:
        return asked
    named = partition or settings.partition
    known = settings.types_of(named)
    if asked is None:
        if len(set(known.values())) > 1:
            what = ", ".join(f"{name} has {gpu_type}" for name, gpu_type in known.items())
            raise UsageError(f"the partitions have different GPU types: {what}", do="give --gpu-type, or one partition")
        return next(iter(known.values()), site)
    having = [name for name, item in settings.partitions.items() if item.gpu_type == asked]
    wrong = {name: gpu_type for name, gpu_type in known.items() if gpu_type != asked}
    if wrong and (partition or not having):
        what = ", ".join(f"partition {name} has {gpu_type}" for name, gpu_type in wrong.items())
        do = None if having else f"add the partition with {asked} to slurm.partitions in cluster_config.yaml"
        choices = [f"--partition {name}" for name in having] or [f"--gpu-type {item}" for item in set(wrong.values())]
        raise UsageError(f"{what}, and the job asks for {asked}", choices=choices, do=do)
    return asked
