# SPDX-License-Identifier: Apache-2.0
"""Defines the records of node checks."""

from collections.abc import Iterable
from typing import Literal

from llmb.catalogue.records import Record

Status = Literal["pass", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("pass", "warn", "fail")

ANSWER = "nodes_answer"
"""The only check in the report of a node that did not answer."""


class CheckOptions(Record):
    """The options of a check for each node; None selects the default."""

    gpu_type: str | None = None
    gpus: int | None = None
    disk_bytes: int
    """Maximum size in bytes of the file that is written and read in each file system; 0 for none."""
    only: tuple[str, ...] = ()
    """Names of areas and checks to run; empty for all."""


class Check(Record):
    """The result of one check."""

    name: str
    """The stable name of the check, such as ``gpu_ecc_errors``, which scripts can use."""
    status: Status
    value: str | int | float | bool | None
    """The value, with the unit in its text or in ``name``; None only with ``warn`` or ``fail``."""
    advice: str | None = None
    """The remedy; None for ``pass``."""


class NotChecked(Record):
    """A check that was skipped, with the reason."""

    name: str
    reason: str


class NodeReport(Record):
    """The results of the checks of one node."""

    node: str
    checked_at: str
    """The time in ISO 8601 format in UTC, by the node's own clock if it answered."""
    status: Status
    checks: tuple[Check, ...]
    not_checked: tuple[NotChecked, ...] = ()
    clock_ahead_s: float | None = None
    """Seconds that the node's clock is ahead of the clock that timestamps files in the install root; None if that
    was not measured."""
    clock_uncertainty_s: float | None = None
    """The uncertainty of ``clock_ahead_s`` in both directions, in seconds."""

    @property
    def answered(self) -> bool:
        """Return whether the node itself made the checks; False if the report only records that it did not answer."""
        return not any(check.name == ANSWER for check in self.checks)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status; ``pass`` if there are none."""
    return max(statuses, key=SEVERITY.index, default="pass")
