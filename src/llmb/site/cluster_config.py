# SPDX-License-Identifier: Apache-2.0
"""``cluster_config.yaml`` in the install root: what is particular to one cluster."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llmb.catalogue.data_files import CatalogueError, read_file
from llmb.catalogue.records import Record
from llmb.doc_pages import see
from llmb.errors import UsageError
from llmb.jobspec.container import ContainerSettings, text_problems
from llmb.jobspec.node_setup import Binding, Vboost
from llmb.jobspec.variables import variable_problems
from llmb.runs.folder import CLUSTER_CONFIG

Variables = dict[str, str]


class WorkloadSettings(Record):
    """What one workload's jobs get on this cluster."""

    environment: Variables = Field(default_factory=dict)

    @field_validator("environment", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: object) -> object:
        return texts(value)

    @field_validator("environment")
    @classmethod
    def _variables_can_be_set(cls, value: Variables) -> Variables:
        _raise(list(variable_problems(value)))
        return value


class InstallSettings(Record):
    """What the installer was told, so that it can be repeated and extended; jobs do not depend on it."""

    environment: Literal["uv", "venv", "conda", "existing"] | None = None
    """How the shared Python environment is made."""
    python: str | None = None
    """Version or path of the interpreter that it is made with."""
    image_folder: str | None = None
    """Where container images are kept; None for ``images`` in the root of installation."""
    node_architecture: Literal["x86_64", "aarch64"] | None = None
    workloads: tuple[str, ...] = ()
    """Those that are installed."""


class ClusterConfig(WorkloadSettings):
    """The whole file, but for the sections of schedulers; every key may be left out."""

    cluster_name: str | None = None
    gpu_type: str | None = None
    """Used if a command names none."""
    python: str | None = None
    """The interpreter on the nodes that has llmb and torch; None for the one that submits."""
    fabric: str | None = None
    """The network between nodes, by its name in the catalogue."""
    modules: tuple[str, ...] = ()
    """Loaded with ``module load`` before anything else."""
    profiles: tuple[str, ...] = ()
    """Files that the batch script sources."""
    prolog: tuple[str, ...] = ()
    """Shell commands that every node runs before the workers, outside of the container."""
    vboost: Vboost | None = None
    """Set on every node while the workers train."""
    binding: Binding = Field(default_factory=Binding)
    container: ContainerSettings = Field(default_factory=ContainerSettings)
    install: InstallSettings = Field(default_factory=InstallSettings)
    workloads: dict[str, WorkloadSettings] = Field(default_factory=dict)
    """By workload."""

    @model_validator(mode="after")
    def _every_text_prints(self) -> Self:
        texts = (self.python or "", *self.modules, *self.profiles, *self.prolog)
        _raise([problem for text in texts for problem in text_problems(text)])
        return self

    def environment_of(self, workload: str) -> Variables:
        return self.workloads[workload].environment if workload in self.workloads else {}


def read_cluster_config(install: Path, schema: type[ClusterConfig]) -> ClusterConfig:
    """The settings below ``install``, or the defaults where it has no such file; ``schema`` has all sections.

    Raises UsageError with all that is wrong in it, each with file and line.
    """
    path = install / CLUSTER_CONFIG
    if not path.exists():
        return schema()
    try:
        return read_file(path, schema, foreign=True)
    except CatalogueError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        do = see("run-on-slurm")
        raise UsageError(f"{CLUSTER_CONFIG} cannot be used:\n{lines}", do=do) from error


def texts(value: object) -> object:
    """YAML's numbers as text; anything else is for the schema to judge."""
    if not isinstance(value, dict):
        return value
    return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
