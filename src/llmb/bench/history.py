# SPDX-License-Identifier: Apache-2.0
"""The newest measurement of each case of each node, and how it changed. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmb.bench.records import Measurement, MeasurementFile


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A case of a node: its newest measurement and the one before, if there is one that can be compared."""

    latest: Measurement
    measured_at: str
    previous: Measurement | None
    previous_at: str | None
    times: int
    """How often it was measured."""

    @property
    def speed_pct(self) -> float | None:
        """How much faster (above 0) or slower it became, by its time."""
        return None if self.previous is None else 100 * (self.previous.time_s / self.latest.time_s - 1)


def changes(files: Iterable[MeasurementFile], benchmark: str | None = None) -> list[FigureChange]:
    """files: the oldest first. Sorted by node and benchmark, with cases in the order in which they were measured."""
    seen: dict[tuple[object, ...], list[tuple[str, Measurement]]] = {}
    for file in files:
        for row in file.measurements:
            if benchmark in (None, row.benchmark):
                seen.setdefault((row.node, *row.identity), []).append((file.measured_at, row))
    found = [_change(rows) for rows in seen.values()]
    return sorted(found, key=lambda change: (change.latest.node, change.latest.benchmark))


def _change(rows: list[tuple[str, Measurement]]) -> FigureChange:
    measured_at, latest = rows[-1]
    previous_at, previous = rows[-2] if len(rows) > 1 else (None, None)
    return FigureChange(latest, measured_at, previous, previous_at, len(rows))
