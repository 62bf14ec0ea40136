# SPDX-License-Identifier: Apache-2.0
"""Reads the rules of checks, with thresholds and advice, from ``rules.yaml``, and formats findings."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from llmb.base.errors import UsageError, did_you_mean
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.nodes.doctor.check_records import Check, NotChecked, Status

SAME_PCT = 2.0
DATA = Path(__file__).with_name("rules.yaml")
Area = Literal[
    "gpu",
    "cpu",
    "memory",
    "kernel",
    "limits",
    "network",
    "scheduler",
    "container",
    "disk",
    "software",
    "clock",
    "nodes",
]
BETWEEN: Area = "nodes"
"""The area of checks that are made from outside a node or by comparing nodes."""
AREAS: tuple[Area, ...] = tuple(area for area in get_args(Area) if area != BETWEEN)
"""The areas of checks that a node makes itself."""
TITLES: dict[Area, str] = {
    "gpu": "GPUs",
    "cpu": "CPUs",
    "memory": "memory",
    "kernel": "kernel",
    "limits": "limits",
    "network": "network",
    "scheduler": "scheduler",
    "container": "containers",
    "disk": "file systems",
    "software": "software",
    "clock": "clock",
    "nodes": "comparison of nodes",
}
Finding = Check | NotChecked


class Thresholds(Record):
    """The thresholds of a value; the thresholds for ``fail`` take precedence."""

    fail_above: float | None = None
    fail_below: float | None = None
    warn_above: float | None = None
    warn_below: float | None = None

    def status(self, figure: float) -> Status:
        for status, above, below in (
            ("fail", self.fail_above, self.fail_below),
            ("warn", self.warn_above, self.warn_below),
        ):
            if (above is not None and figure > above) or (below is not None and figure < below):
                return "fail" if status == "fail" else "warn"
        return "pass"


class Rule(Record):
    """The rule of a check, which may be made at several places, such as folders."""

    name: str
    area: Area
    title: str
    """The display name of the property that is checked."""
    advice: str | None = None
    """The remedy if the check does not pass; None if it always passes."""
    advice_for: dict[str, str] = Field(default_factory=dict)
    """Different advice for particular cases."""
    thresholds: Thresholds = Field(default_factory=Thresholds)
    limits: dict[str, float] = Field(default_factory=dict)
    """Thresholds by name, such as of a counter or of a folder, if there are several."""
    same: bool = False
    """True if the value should be equal on all nodes; numbers may differ by ``SAME_PCT`` percent."""
    kinds: frozenset[str] = frozenset()
    """The kinds of things that pass, such as types of file systems."""
    fails_if: str | None = None
    """The condition for ``fail``, for display; None if the check never fails."""
    warns_if: str | None = None
    source: str | None = None
    """The source of the thresholds, if any."""

    def passed(self, value: str | float, of: str = "") -> Check:
        return self.check("pass", value, of=of)

    def check(self, status: Status, value: str | float | None, case: str = "", of: str = "") -> Check:
        """Return the result of the check. ``case`` selects the advice; ``of`` is the place, if there are several."""
        advice = None if status == "pass" else self.advice_for.get(case, self.advice)
        return Check(name=self._name(of), status=status, value=value, advice=advice)

    def measured(self, figure: float, value: str, case: str = "", of: str = "") -> Check:
        """Return the result of comparing ``figure`` with the thresholds; ``value`` is the text for display."""
        return self.check(self.thresholds.status(figure), value, case, of)

    def skipped(self, reason: str, of: str = "") -> NotChecked:
        return NotChecked(name=self._name(of), reason=reason)

    def _name(self, of: str) -> str:
        return f"{self.name}_{of}" if of else self.name


class RuleFile(Record):
    """The content of ``rules.yaml``."""

    rules: tuple[Rule, ...]


@cache
def rules() -> dict[str, Rule]:
    """Read ``rules.yaml``; return its rules by name."""
    return {rule.name: rule for rule in read_file(DATA, RuleFile, wrap="rules").rules}


def rule(name: str) -> Rule:
    return rules()[name]


def rule_of(check: str) -> Rule:
    """Return the rule of a check with a name that may end with a place; raise KeyError if there is none."""
    name = check
    while name not in rules() and "_" in name:
        name = name.rpartition("_")[0]
    return rules()[name]


def skipped(names: Iterable[str], reason: str) -> list[Finding]:
    return [rule(name).skipped(reason) for name in names]


def names_of(area: Area) -> list[str]:
    return [rule.name for rule in rules().values() if rule.area == area]


GIB = 2**30


def indexes(indices: Iterable[int]) -> str:
    """Format the indexes of GPUs, such as ``GPU 0`` or ``GPUs 0, 1``."""
    numbers = sorted(indices)
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))}"


def gib(size: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is less than 1 GiB."""
    if size >= GIB:
        return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB"


def gb(size: float) -> str:
    """Format a number of bytes in GB or TB, as is usual for disks."""
    number, unit = (size / 1e12, "TB") if size >= 1e12 else (size / 1e9, "GB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def parse_checks(texts: Iterable[str]) -> tuple[str, ...]:
    """Parse lists of areas and checks that are separated by commas; raise UsageError if one is unknown."""
    known = (*AREAS, *(rule.name for rule in rules().values() if rule.area in AREAS))
    names = tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            do = "pass an area, or a check that 'llmb doctor --json' lists (for disk_space_install: disk_space)"
            raise UsageError(f"unknown area or check '{name}'{did_you_mean(name, known)}", choices=AREAS, do=do)
    return names
