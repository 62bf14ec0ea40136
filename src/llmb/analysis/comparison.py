# SPDX-License-Identifier: Apache-2.0
"""The result of comparing two groups of runs. Its keys are a contract."""

from typing import Literal

from llmb.catalogue.records import Record
from llmb.runs.identity import Difference
from llmb.verdict.records import VerdictName

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
