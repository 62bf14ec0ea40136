# SPDX-License-Identifier: Apache-2.0
"""What the shell's variables and a partition change of the cluster's settings, to be shown. Pure."""

from collections.abc import Iterator, Mapping

from llmb.schedulers.port import Overlay
from llmb.schedulers.slurm.asked import ADDITIONAL, FLAG_NAMES, shell_flags, shell_gpus_per_node, variable_of
from llmb.schedulers.slurm.flags import GPU_FLAGS, LEFT_OUT, parse_additional
from llmb.schedulers.slurm.partitions import site_partition
from llmb.schedulers.slurm.settings import PartitionSettings, SlurmSettings

OWN = ("account", "partition")
"""Flags that are settings by themselves."""


def overlays(
    settings: SlurmSettings, environ: Mapping[str, str], partition: str | None, gpu_type: str | None
) -> Iterator[Overlay]:
    """Raises UsageError for variables that cannot be used."""
    yield from _of_shell(environ)
    if partition:
        yield Overlay(key="slurm.partition", value=partition, source="option", place="--partition")
    chosen = partition or shell_flags(environ).get("partition") or site_partition(settings, gpu_type)
    for name in (item.strip() for item in (chosen or "").split(",")):
        if name in settings.partitions:
            yield from _of_partition(name, settings.partitions[name])
            return


def _of_shell(environ: Mapping[str, str]) -> Iterator[Overlay]:
    names = {flag: name for name, flag in FLAG_NAMES.items()}
    for flag, value in shell_flags(environ).items():
        if flag in GPU_FLAGS:
            continue
        variable = str(variable_of(names[flag], environ))
        yield Overlay(key=_key(flag), value=value, source="shell", place=variable)
    counted = variable_of("gpus_per_node", environ)
    if all(shell_flags(environ).get(flag) == LEFT_OUT for flag in GPU_FLAGS):
        yield Overlay(key="slurm.gpu_request", value="none", source="shell", place=str(counted))
    elif count := shell_gpus_per_node(environ):
        yield Overlay(key="slurm.gpus_per_node", value=count, source="shell", place=str(counted))
    for flag, value in parse_additional(environ.get(ADDITIONAL, "")).items():
        yield Overlay(key=_key(flag), value=True if value is None else value, source="shell", place=ADDITIONAL)


def _of_partition(name: str, partition: PartitionSettings) -> Iterator[Overlay]:
    for field, value in partition.model_dump(exclude_none=True).items():
        key = field if field == "gpu_type" else f"slurm.{field}"
        yield Overlay(key=key, value=value, source="setting", place=f"slurm.partitions.{name}.{field}")


def _key(flag: str) -> str:
    return f"slurm.{flag}" if flag in OWN else f"slurm.flags.{flag}"
