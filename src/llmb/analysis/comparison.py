# SPDX-License-Identifier: Apache-2.0
"""What a comparison varies, and its result, whose keys are a contract."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import unknown
from llmb.runs.identity import Difference, Value
from llmb.verdict.conditions import VerdictName
from llmb.verdict.judgement import Tolerance

DATA = Path(__file__).with_name("compare_modes.yaml")


class Mode(Record):
    """A word for several keys that differ together."""

    name: str
    title: str
    keys: tuple[str, ...]
    order: tuple[str, ...] = ()
    tolerance_pct: float | None = None
    """None for that of repeats."""
    tolerance_source: str = ""


class ModesFile(Record):
    """``compare_modes.yaml``, which says what the fields mean."""

    work_per_token: tuple[str, ...]
    modes: tuple[Mode, ...]


@cache
def modes_file() -> ModesFile:
    return read_file(DATA, ModesFile)


@dataclass(frozen=True, slots=True)
class Varied:
    """The keys of a configuration that may differ between the two sides."""

    patterns: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    first: str | None = None
    """The key that ``order`` holds for."""
    tolerance: Tolerance | None = None
    """None for that of repeats."""

    def __contains__(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.patterns)

    def place(self, configuration: dict[str, Value]) -> tuple[object, ...]:
        """Sorts the groups of one selection, the one that the others are compared with first."""
        keys = sorted((key for key in configuration if key in self), key=lambda key: (key != self.first, key))
        return tuple(_place(configuration[key], self.order) for key in keys)


def varied(names: Iterable[str], known_keys: Iterable[str]) -> Varied:
    """``names`` are modes or keys that some of the runs have. Raises UsageError for any other."""
    modes = {mode.name: mode for mode in modes_file().modes}
    keys = set(known_keys)
    chosen = []
    for name in names:
        if name not in modes and name not in keys:
            others = (key for key in sorted(keys) if key.replace("_", "-") not in modes)
            raise unknown("--vary", name, [*modes, *others])
        chosen.append(modes.get(name) or Mode(name=name, title="", keys=(name,)))
    return Varied(
        patterns=tuple(key for mode in chosen for key in mode.keys),
        order=chosen[0].order if chosen else (),
        first=chosen[0].keys[0] if chosen else None,
        tolerance=max((one for one in map(_tolerance, chosen) if one), default=None),
    )


def _tolerance(mode: Mode) -> Tolerance | None:
    return None if mode.tolerance_pct is None else Tolerance(mode.tolerance_pct, mode.tolerance_source)


def changes_work_per_token(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in modes_file().work_per_token)


def _place(value: Value, order: tuple[str, ...]) -> tuple[int, int, float, str]:
    if isinstance(value, int | float):
        return (0, 0, float(value), "")
    text = str(value)
    return (1, order.index(text) if text in order else len(order), 0.0, text)


Measure = Literal["step_time", "gpu_time_per_token"]
Scaling = Literal["weak", "strong", "mixed"]


class Row(Record):
    """One recipe. Times are medians of the runs' means."""

    recipe: str
    n_before: int
    n_after: int
    before_s: float
    """Seconds per step."""
    after_s: float
    delta_pct: float | None
    """Change of what ``measure`` says, in percent of that before; above 0 is slower. None if it is not comparable."""
    ci95_pct: tuple[float, float] | None
    """95 % confidence interval of ``delta_pct``."""
    smallest_visible_change_pct: float | None
    """The smallest slow-down that these runs would have shown, in 80 of 100 cases; None without an interval."""
    noise_pct: float | None
    """Standard deviation between repeats; None if it is not known, and assumed for the interval."""
    earlier_runs: int
    """From which the noise is known, if each side has a single run."""
    verdict: VerdictName
    soft: bool
    """Nothing is known of how much repeats differ, or there was other work on the machine."""
    reason: str | None
    """Why the verdict is not clear, or what has to be known beside it."""
    more_runs: int | None
    """How many more runs, of both sides together, are expected to decide; None if runs would not."""
    tolerance_pct: float
    tolerance_source: str
    measure: Measure
    """``gpu_time_per_token`` if a step is not the same work on both sides."""
    speed_up: float | None
    """How many times as many tokens a GPU trains in a second as before."""
    scaling: Scaling | None
    """How the global batch size grows where the numbers of GPUs differ."""
    before_runs: tuple[str, ...]
    after_runs: tuple[str, ...]


class Unmatched(Record):
    """A recipe that was run on one side only."""

    side: Literal["before", "after"]
    recipe: str
    runs: tuple[str, ...]
    differs: tuple[Difference, ...]
    """From the most similar recipe of the other side; empty if that has none."""
    reason: str | None
    """Why the other side has no measurement of it, if it was run there."""


class LeftOutRun(Record):
    run: str
    reason: str
    side: Literal["before", "after"]


class Comparison(Record):
    before: str
    """The selection, as the user named it."""
    after: str
    vary: tuple[str, ...]
    verdict: VerdictName
    """The worst of all rows."""
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    """Between all runs of the rows, on either side; several values of one side are joined with commas."""
    unmatched: tuple[Unmatched, ...]
    left_out: tuple[LeftOutRun, ...]
