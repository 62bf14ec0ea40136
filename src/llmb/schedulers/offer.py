# SPDX-License-Identifier: Apache-2.0
"""What a scheduler offers its user."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nodes that a scheduler keeps together. None is unknown, or has none of it."""

    name: str
    is_default: bool = False
    nodes: int = 0
    gpus_per_node: int | None = None
    """GPUs of most of its nodes; None if the scheduler does not count GPUs there."""
    gres_type: str | None = None
    architecture: str | None = None
    """As the kernel names it: x86_64, aarch64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a scheduler offers this user."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] | None = None
    """None if it has no accounting, or does not answer."""
    default_account: str | None = None

    def partition(self, name: str | None) -> Partition | None:
        return next((item for item in self.partitions if item.name == name), None)
