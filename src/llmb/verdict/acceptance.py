# SPDX-License-Identifier: Apache-2.0
"""Sets of recipes by which a cluster is accepted. Pure but for their data file."""

from functools import cache
from pathlib import Path

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Dtype, Record
from llmb.errors import unknown
from llmb.verdict.judgement import Tolerance

DATA = Path(__file__).with_name("acceptance.yaml")


class AcceptanceRecipe(Record):
    """A recipe that has to be measured."""

    workload: str
    size: str
    dtype: Dtype
    scale: int

    @property
    def name(self) -> str:
        return f"{self.workload} {self.size} {self.dtype}"


class AcceptanceSet(Record):
    """All that a cluster of one GPU type has to pass."""

    name: str
    title: str
    gpu_type: str
    pass_at_pct: float = Field(gt=0, le=100)
    """Percentage of the published throughput."""
    valid_months: int | None = None
    """How long the result holds; None if that is not specified."""
    recipes: tuple[AcceptanceRecipe, ...]

    @property
    def tolerance(self) -> Tolerance:
        slower_pct = 100 * (100 / self.pass_at_pct - 1)
        return Tolerance(slower_pct, f"acceptance set {self.name}: {self.pass_at_pct:g} % of the published throughput")


class AcceptanceFile(Record):
    """``acceptance.yaml``."""

    sets: tuple[AcceptanceSet, ...]


@cache
def acceptance_sets() -> dict[str, AcceptanceSet]:
    """By name."""
    return {one.name: one for one in read_file(DATA, AcceptanceFile, wrap="sets").sets}


def find_acceptance_set(name: str) -> AcceptanceSet:
    """Raises UsageError for a name that does not exist."""
    sets = acceptance_sets()
    if name not in sets:
        raise unknown("acceptance set", name, sets)
    return sets[name]
