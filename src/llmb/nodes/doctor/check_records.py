# SPDX-License-Identifier: Apache-2.0
"""Records of the checks of nodes."""

from collections.abc import Iterable
from typing import Literal

from llmb.catalogue.records import Record

Status = Literal["pass", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("pass", "warn", "fail")

ANSWER = "nodes_answer"
"""The only check of an unreachable node."""


class CheckOptions(Record):
    """The command's options for a node; None selects the default."""

    gpu_type: str | None = None
    gpus: int | None = None
    disk_bytes: int
    """Size of the file that is written and read in each file system; 0 for none."""
    only: tuple[str, ...] = ()
    """Names of areas and of checks; all are checked if it is empty."""


class Check(Record):
    """The result of one check."""

    name: str
    """The subject, in a stable word for scripts, such as ``gpu_ecc``."""
    status: Status
    value: str | int | float | bool | None
    """The value, with its unit in the name or the text; None only with ``warn`` or ``fail``."""
    advice: str | None = None
    """The remedy; None for ``pass``."""


class NotChecked(Record):
    """Something that does not exist here or is not visible, which is neither good nor bad."""

    name: str
    reason: str


class NodeReport(Record):
    """All checks of one node."""

    node: str
    checked_at: str
    """The time by the node's own clock, in ISO 8601, in UTC."""
    status: Status
    checks: tuple[Check, ...]
    not_checked: tuple[NotChecked, ...] = ()
    clock_ahead_s: float | None = None
    """The lead of its clock over the one that dates files in the root of installation; None if several nodes were not
    checked together."""
    clock_uncertainty_s: float | None = None
    """The uncertainty of ``clock_ahead_s``, in both directions."""

    @property
    def answered(self) -> bool:
        """Return True if the node itself was checked."""
        return not any(check.name == ANSWER for check in self.checks)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status; ``pass`` for none."""
    return max(statuses, key=SEVERITY.index, default="pass")
