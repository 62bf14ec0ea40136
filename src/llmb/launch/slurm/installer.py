# SPDX-License-Identifier: Apache-2.0
"""What an installation asks on a cluster that Slurm manages, and the settings that follow from the answers."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from llmb.base.options import Option
from llmb.base.shown_text import counted
from llmb.catalogue.records import Record
from llmb.launch.scheduler_port import NONE, Choice, InstallerPart, Offer, Partition, SchedulerQuestion
from llmb.launch.slurm.settings import GpuRequest, partition_names

_cluster = partial(Option, panel="Cluster")


class SlurmAnswers(Record):
    """The answers that only Slurm needs."""

    account: Annotated[str | None, _cluster(help="Slurm account, or none.", set_by=("SBATCH_ACCOUNT",))] = None
    gpu_partition: Annotated[
        str | None, _cluster(help="Partition of the nodes that train.", set_by=("SBATCH_PARTITION",))
    ] = None
    cpu_partition: Annotated[
        str | None, _cluster(help="Partition for jobs that need no GPU, or none for the other one.")
    ] = None
    gpu_request: Annotated[
        GpuRequest | None,
        _cluster(help="How jobs request GPUs: a flag of sbatch, or none if Slurm does not count them."),
    ] = None
    gres_type: Annotated[
        str | None, _cluster(help="Type in --gres=gpu:TYPE:N, or none. Default: none.", metavar="TYPE")
    ] = None


class SlurmQuestion(SchedulerQuestion):
    answers: SlurmAnswers

    @property
    def partition(self) -> Partition | None:
        return training_partition(self.answers, self.offer)

    def partitions(self) -> list[Choice]:
        return [Choice(item.name, _partition_text(item)) for item in self.offer.partitions]


class Account(SlurmQuestion):
    name, text = "account", "Slurm account"

    def choices(self) -> list[Choice]:
        names = self.offer.accounts
        return [] if names is None else [*map(Choice, names), Choice(NONE, "Slurm's own default")]

    def assumed(self) -> str | None:
        return self.offer.default_account or (NONE if not self.offer.accounts else None)


class GpuPartition(SlurmQuestion):
    name, text = "gpu_partition", "Partition of the nodes that train"
    several = True

    def choices(self) -> list[Choice]:
        return self.partitions()

    def assumed(self) -> str | None:
        """The only one with GPUs, or the only one."""
        found = self.offer.partitions
        with_gpus = [item for item in found if item.gpus_per_node] or list(found)
        return with_gpus[0].name if len(with_gpus) == 1 else None


class CpuPartition(SlurmQuestion):
    name, text = "cpu_partition", "Partition for jobs that need no GPU"
    several = True

    def choices(self) -> list[Choice]:
        return [*self.partitions(), Choice(NONE, f"the same, {self.answers.gpu_partition}")]

    def assumed(self) -> str:
        return NONE


class GpuRequests(SlurmQuestion):
    name, text = "gpu_request", "How jobs ask Slurm for GPUs"
    after = "gpus_per_node"

    def choices(self) -> list[Choice]:
        count = (self.partition and self.partition.gpus_per_node) or "N"
        return [
            Choice("gpus-per-node", f"--gpus-per-node={count}"),
            Choice("gres", f"--gres=gpu:{count}"),
            Choice(NONE, "no flag: Slurm counts no GPUs here, and jobs get whole nodes"),
        ]

    def assumed(self) -> str:
        return "gpus-per-node" if self.partition and self.partition.gpus_per_node else NONE

    def check(self, value: str) -> str | None:
        if value != NONE and self.partition and not self.partition.gpus_per_node:
            return f"the nodes of {self.partition.name} have no generic resource 'gpu': Slurm would reject every job"
        return None


def training_partition(answers: SlurmAnswers, offer: Offer) -> Partition | None:
    """The partition of the nodes that train, of several the first."""
    return offer.partition(partition_names(answers.gpu_partition)[0])


def _partition_text(item: Partition) -> str:
    gpus = f"{item.gpus_per_node} x {item.gres_type or 'GPU'} each" if item.gpus_per_node else "no GPUs counted"
    nodes = counted(item.nodes, "node")
    return ", ".join(filter(None, (nodes, gpus, item.architecture, "the default" if item.is_default else None)))


class SlurmInstaller(InstallerPart):
    """What Slurm brings to an installation."""

    answers = SlurmAnswers
    questions = (Account, GpuPartition, CpuPartition, GpuRequests)
    runtimes = (Choice("pyxis", "Slurm's plugin, with Enroot"), Choice("apptainer"))
    comments = MappingProxyType(
        {
            "partition": "of jobs that train",
            "cpu_partition": "of jobs without GPUs",
            "gpu_request": "gpus-per-node, gres, or none",
            "gres_type": "type in --gres=gpu:TYPE:N",
        }
    )

    def training_nodes(self, answers: SlurmAnswers, offer: Offer) -> Partition | None:
        return training_partition(answers, offer)

    def section(self, answers: SlurmAnswers, gpus_per_node: int | None) -> dict[str, Any]:
        found = {
            "account": answers.account,
            "partition": answers.gpu_partition,
            "cpu_partition": answers.cpu_partition,
            "gpus_per_node": gpus_per_node,
            "gres_type": answers.gres_type,
        }
        given = {key: value for key, value in found.items() if value not in (None, NONE)}
        # 'none' is a way to ask for GPUs; elsewhere it is not a value.
        return {**given, "gpu_request": answers.gpu_request} if answers.gpu_request else given

    def answers_in(self, section: Mapping[str, Any]) -> dict[str, Any]:
        same = ("account", "cpu_partition", "gpus_per_node", "gres_type")
        found = {name: section[name] for name in same if section.get(name) is not None}
        if section.get("partition"):
            found |= {"gpu_partition": section["partition"], "gpu_request": section["gpu_request"]}
        return found
