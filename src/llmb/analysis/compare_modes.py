# SPDX-License-Identifier: Apache-2.0
"""What may differ between runs that are compared. Pure but for its data file."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import unknown
from llmb.runs.identity import Value
from llmb.verdict.tolerance import Tolerance

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
