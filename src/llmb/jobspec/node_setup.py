# SPDX-License-Identifier: Apache-2.0
"""What a job's workers find on every node: a container, the GPUs' boost, and the cores and memory of each."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmb.catalogue.records import Record
from llmb.secrets import has_secret

Vboost = Literal["recipe"] | Annotated[int, Field(ge=0, le=4)]
"""Level of ``nvidia-smi boost-slider``; 0 is the driver's default. ``recipe`` is what the published jobs asked for."""
CpuBinding = Literal["none", "cores"] | Annotated[int, Field(ge=1)]
NumaBinding = Literal["none", "local"]


def text_problems(text: str) -> Iterator[str]:
    """Why ``text`` cannot be written into a batch script."""
    if has_secret(text):
        yield "it looks like a secret, and is written into the batch script; use what the nodes have logged in to"
    elif not text.isprintable():
        yield f"{text!r} holds a character that does not print"


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
        problems = [problem for item in self._texts() for problem in text_problems(item)]
        problems += [
            f"the mount '{mount}' holds a comma, which separates mounts" for mount in self.mounts if "," in mount
        ]
        if self.runtime != "none" and not self.image:
            problems.append(f"{self.runtime} needs an image")
        if self.runtime == "none" and self.image:
            problems.append("an image needs a runtime: pyxis or apptainer")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _texts(self) -> Iterator[str]:
        yield from (self.image or "", *self.mounts, self.python)


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
