# SPDX-License-Identifier: Apache-2.0
"""What a user asks of one job beside the run itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from llmb.catalogue.records import Record

Flags = Mapping[str, str | None]
"""A scheduler's own flags by long name. None is a flag without a value; an empty value leaves out a layer's below."""

StartMode = Literal["torchrun", "task-per-gpu"]
FrameworkName = Literal["megatron_bridge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What was asked for; None leaves a choice to the cluster's settings."""

    flags: Flags = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus_per_node: int | None = None
    start: StartMode | None = None
    retries: int | None = None
    """How often the run may be started again after failures that are not its own."""
    python: str = "python3"
    """The interpreter on the nodes, where the cluster's settings name none."""


class FrameworkOptions(Record):
    """Which program trains, and what it is given. None is llmb's own engine."""

    framework: FrameworkName | None = None
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """Added to those of the cluster's settings."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """Of the framework's script, by name."""
