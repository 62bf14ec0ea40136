# SPDX-License-Identifier: Apache-2.0
"""The section ``slurm`` of cluster_config.yaml."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llmb.catalogue.records import Record
from llmb.jobspec.options import StartMode
from llmb.schedulers.slurm.flags import LEFT_OUT, flag_problems
from llmb.site.cluster_config import texts
from llmb.site.site import Site

GpuRequest = Literal["gpus-per-node", "gres", "none"]


def partition_names(text: str | None) -> list[str]:
    """The partitions that are named with commas."""
    return [name.strip() for name in (text or "").split(",")]


def _name_of_gres(value: str | None) -> str | None:
    if value and not value.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"'{value}' is not a name such as h100")
    return value


class PartitionSettings(Record):
    """How a partition differs; None is as in the section ``slurm``."""

    gpu_type: str | None = None
    """GPU type of its nodes."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    gpu_request: GpuRequest | None = None
    gres_type: str | None = None

    _gres_type_is_a_name = field_validator("gres_type")(_name_of_gres)


class SlurmSettings(Record):
    """How jobs of this cluster are asked for."""

    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    """For jobs without GPUs; None for ``partition``."""
    partitions: dict[str, PartitionSettings] = Field(default_factory=dict)
    """By name, where partitions have different GPUs or count them differently."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """None for the catalogue's number of the GPU type."""
    gpu_request: GpuRequest = "gpus-per-node"
    gres_type: str | None = None
    """The type in ``--gres=gpu:TYPE:N``; None leaves it out."""
    start: StartMode = "torchrun"
    retries: int = Field(default=0, ge=0)
    """How often a run may be started again after failures that are not its own, where a command does not say."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """Any other flag of sbatch by its long name; None for one without a value."""
    srun_flags: dict[str, str | None] = Field(default_factory=dict)
    """Flags of srun, for the workers' step."""

    _gres_type_is_a_name = field_validator("gres_type")(_name_of_gres)

    def types_of(self, partition: str | None) -> dict[str, str]:
        """The GPU type of each of the partitions that are named with commas, as far as it is known."""
        names = partition_names(partition)
        found = {name: self.partitions[name].gpu_type for name in names if name in self.partitions}
        return {name: gpu_type for name, gpu_type in found.items() if gpu_type}

    def within(self, partition: str | None) -> Self:
        """With what is particular to the first of the partitions that has something particular."""
        names = partition_names(partition)
        own = next((self.partitions[name] for name in names if name in self.partitions), PartitionSettings())
        given = own.model_dump(exclude={"gpu_type"}, exclude_none=True)
        return self.model_copy(update=given)

    @field_validator("flags", "srun_flags", mode="before")
    @classmethod
    def _values_are_text(cls, value: object) -> object:
        """Numbers as text; true is a flag without a value, false leaves one out."""
        found = texts(value)
        if not isinstance(found, dict):
            return found
        return {key: {True: None, False: LEFT_OUT}[item] if type(item) is bool else item for key, item in found.items()}

    @model_validator(mode="after")
    def _flags_can_be_given(self) -> Self:
        own = {"account": self.account, "partition": self.partition}
        names = {"partition": ",".join(filter(None, (self.cpu_partition, *self.partitions)))}
        problems = [
            *flag_problems({**self.flags, **{name: value for name, value in own.items() if value}}),
            *(flag_problems(names)),
            *(f"{name} is a setting of its own" for name in own if name in self.flags),
            *flag_problems({f"srun-{name}": value for name, value in self.srun_flags.items()}),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def settings_of(site: Site) -> SlurmSettings:
    found = getattr(site.config, "slurm", None)
    return found if isinstance(found, SlurmSettings) else SlurmSettings()
