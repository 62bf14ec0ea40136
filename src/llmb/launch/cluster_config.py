# SPDX-License-Identifier: Apache-2.0
"""``cluster_config.yaml`` in the install root: what is particular to one cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llmb.catalogue.data_files import CatalogueError, read_file
from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.launch.slurm.flags import LEFT_OUT, flag_problems
from llmb.launch.variables import variable_problems
from llmb.runs.folder import CLUSTER_CONFIG

StartMode = Literal["torchrun", "task-per-gpu"]
GpuRequest = Literal["gpus-per-node", "gres", "none"]

Variables = dict[str, str]


class SlurmSettings(Record):
    """How jobs of this cluster are asked for."""

    account: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = Field(default=None, ge=1)
    """Null for the catalogue's number of the GPU type."""
    gpu_request: GpuRequest = "gpus-per-node"
    gres_type: str | None = None
    """The type in ``--gres=gpu:TYPE:N``; null leaves it out."""
    start: StartMode = "torchrun"
    retries: int = Field(default=0, ge=0)
    """How often a run may be started again after failures that are not its own, where a command does not say."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """Any other flag of sbatch by its long name; null for one without a value."""
    srun_flags: dict[str, str | None] = Field(default_factory=dict)
    """The same of srun, for the workers' step."""

    @field_validator("flags", "srun_flags", mode="before")
    @classmethod
    def _values_are_text(cls, value: object) -> object:
        """Numbers as text; true is a flag without a value, false leaves one out."""
        texts = _texts(value)
        if not isinstance(texts, dict):
            return texts
        return {key: {True: None, False: LEFT_OUT}[item] if type(item) is bool else item for key, item in texts.items()}

    @model_validator(mode="after")
    def _flags_can_be_given(self) -> Self:
        own = {"account": self.account, "partition": self.partition}
        problems = [
            *flag_problems({**self.flags, **{name: value for name, value in own.items() if value}}),
            *(f"{name} is a setting of its own" for name in own if name in self.flags),
            *flag_problems({f"srun-{name}": value for name, value in self.srun_flags.items()}),
        ]
        if self.gres_type and not self.gres_type.replace("_", "").replace("-", "").isalnum():
            problems.append(f"gres_type is '{self.gres_type}'; it is a name such as h100")
        _raise(problems)
        return self


class ContainerSettings(Record):
    """What the workers run in."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """``path`` or ``path:path inside[:options]``; the install root and the checkpoints' folders are always mounted."""
    python: str = "python3"
    """The interpreter inside that has llmb and torch."""

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        problems = [
            f"{item!r} holds a character that does not print" for item in self._texts() if not item.isprintable()
        ]
        problems += [
            f"the mount '{mount}' holds a comma, which separates mounts" for mount in self.mounts if "," in mount
        ]
        if self.runtime != "none" and not self.image:
            problems.append(f"{self.runtime} needs an image")
        if self.runtime == "none" and self.image:
            problems.append("an image needs a runtime: pyxis or apptainer")
        _raise(problems)
        return self

    def _texts(self) -> Iterator[str]:
        yield from (self.image or "", *self.mounts, self.python)


class WorkloadSettings(Record):
    """What one workload's jobs get on this cluster."""

    environment: Variables = Field(default_factory=dict)

    @field_validator("environment", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: object) -> object:
        return _texts(value)

    @field_validator("environment")
    @classmethod
    def _variables_can_be_set(cls, value: Variables) -> Variables:
        _raise(list(variable_problems(value)))
        return value


class ClusterConfig(WorkloadSettings):
    """The whole file; every key may be left out."""

    cluster_name: str | None = None
    gpu_type: str | None = None
    """Taken where a command names none."""
    python: str | None = None
    """The interpreter on the nodes that has llmb and torch; null for the one that submits."""
    fabric: str | None = None
    """The network between nodes, by its name in the catalogue."""
    modules: tuple[str, ...] = ()
    """Loaded with ``module load`` before anything else."""
    profiles: tuple[str, ...] = ()
    """Files that the batch script sources."""
    slurm: SlurmSettings = Field(default_factory=SlurmSettings)
    container: ContainerSettings = Field(default_factory=ContainerSettings)
    workloads: dict[str, WorkloadSettings] = Field(default_factory=dict)
    """By workload."""

    @model_validator(mode="after")
    def _every_text_prints(self) -> Self:
        texts = (self.python or "", *self.modules, *self.profiles)
        _raise([f"{text!r} holds a character that does not print" for text in texts if not text.isprintable()])
        return self

    def environment_of(self, workload: str) -> Variables:
        return self.workloads[workload].environment if workload in self.workloads else {}


def read_cluster_config(install: Path) -> ClusterConfig:
    """The settings below ``install``, or the defaults where it has no such file.

    Raises UsageError with all that is wrong in it, each with file and line.
    """
    path = install / CLUSTER_CONFIG
    if not path.is_file() or not path.read_text().strip():
        return ClusterConfig()
    try:
        return read_file(path, ClusterConfig)
    except CatalogueError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        do = "see docs/how-to/run-on-slurm.md"
        raise UsageError(f"{CLUSTER_CONFIG} cannot be used:\n{lines}", do=do) from error


def _texts(value: object) -> object:
    """YAML's numbers as text; anything else is for the schema to judge."""
    if not isinstance(value, dict):
        return value
    return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
