# SPDX-License-Identifier: Apache-2.0
"""What is done on every node of a job for its workers: commands before them, and where each of them may compute."""

from typing import Annotated, Literal

from pydantic import Field

from llmb.catalogue.records import Record

Vboost = Literal["recipe"] | Annotated[int, Field(ge=0, le=4)]
"""Level of ``nvidia-smi boost-slider``; 0 is the driver's default. ``recipe`` is what the published jobs asked for."""
CpuBinding = Literal["none", "cores"] | Annotated[int, Field(ge=1)]
NumaBinding = Literal["none", "local"]


class Boost(Record):
    """The level of ``nvidia-smi boost-slider`` while the workers train."""

    level: int
    required: bool = True
    """Whether a node where it cannot be set fails the job."""


class Binding(Record):
    """Which CPU cores and which memory the worker processes of a node use."""

    cpu: CpuBinding = "none"
    """``cores`` gives each worker an equal share of the cores for itself, a number so many."""
    numa: NumaBinding = "none"
    """``local`` keeps each worker to the cores and the memory of its GPU's NUMA node."""

    @property
    def binds(self) -> bool:
        return self != Binding()
