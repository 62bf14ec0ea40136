# SPDX-License-Identifier: Apache-2.0
"""How much slower than its reference a run may be, and why that much. Pure but for its data file."""

from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.verdict.records import ReferenceKind

DATA = Path(__file__).with_name("tolerances.yaml")


class Tolerance(NamedTuple):
    """In percent of the reference's step time; it holds in both directions."""

    pct: float
    source: str


class ToleranceEntry(Record):
    """A default."""

    kind: ReferenceKind
    same_nodes: bool = False
    """Only where the run and its reference have the same nodes."""
    tolerance_pct: float = Field(gt=0)
    source: str


class ToleranceFile(Record):
    """``tolerances.yaml``."""

    defaults: tuple[ToleranceEntry, ...]


@cache
def _defaults() -> tuple[ToleranceEntry, ...]:
    return read_file(DATA, ToleranceFile, wrap="defaults").defaults


def given_tolerance(pct: float | None, name: str) -> Tolerance | None:
    """That of the option or argument ``name``, if it is given. Raises UsageError unless it is a percentage above 0."""
    if pct is None:
        return None
    if not 0 < pct < inf:
        raise UsageError(f"{name} {pct:g} is invalid", do="give a percentage above 0")
    return Tolerance(pct, name)


def default_tolerance(kind: ReferenceKind, *, same_nodes: bool = False) -> Tolerance:
    """``same_nodes``: the run and its reference are known to have had the same nodes."""
    entry = next(entry for entry in _defaults() if entry.kind == kind and (same_nodes or not entry.same_nodes))
    return Tolerance(entry.tolerance_pct, entry.source)
