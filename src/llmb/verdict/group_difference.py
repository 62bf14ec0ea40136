# SPDX-License-Identifier: Apache-2.0
"""The difference in step time between groups of runs: medians of logarithms, with intervals by Student's t or Welch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

from llmb.base.shown_text import listed
from llmb.base.statistics import student_t

ERROR_RATE = 0.01
"""Probability that any node is reported although no node has an effect."""
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class RunMean:
    mean_s: float
    ci95_s: tuple[float, float] | None = None
    """95 % confidence interval of the mean of the run's steps."""
    nodes: tuple[str, ...] = ()


def node_effect(before: Sequence[RunMean], after: Sequence[RunMean]) -> str | None:
    """Describe nodes that may explain a difference; None if there are none, or if a run's nodes are unknown."""
    runs = (*before, *after)
    if not all(run.nodes for run in runs):
        return None
    used = [{node for run in group for node in run.nodes} for group in (before, after)]
    said = []
    if not used[0] & used[1]:
        nodes_of = "; ".join(listed(sorted(nodes), MOST_NAMED) for nodes in used)
        said.append(f"the groups ran on different nodes ({nodes_of}), which may differ")
    elif used[0] != used[1]:
        only = [
            f"only the {which} group ran on {listed(sorted(nodes), MOST_NAMED)}"
            for which, nodes in (("first", used[0] - used[1]), ("second", used[1] - used[0]))
            if nodes
        ]
        said.append(" and ".join(only))
    return "; ".join((*said, *_slow_nodes(before, after))) or None


def _slow_nodes(before: Sequence[RunMean], after: Sequence[RunMean]) -> list[str]:
    from scipy.special import stdtr

    runs = (*before, *after)
    nodes = sorted({node for run in runs for node in run.nodes})
    said = []
    for node in nodes:
        strata = [
            ([math.log(run.mean_s) for run in group if node in run.nodes],
             [math.log(run.mean_s) for run in group if node not in run.nodes])
            for group in (before, after)
        ]  # fmt: skip
        informative = [(own, others) for own, others in strata if own and others]
        effect, error, freedom = _common_effect(informative)
        if freedom < 1 or not error:
            continue
        if 2 * float(stdtr(freedom, -abs(effect) / error)) < ERROR_RATE / len(nodes):
            word = "slower" if effect > 0 else "faster"
            said.append(f"runs on {node} were {abs(100 * math.expm1(effect)):.1f} % {word} than others of their group")
    return said[:MOST_NAMED]


def _common_effect(strata: Sequence[tuple[list[float], list[float]]]) -> tuple[float, float, int]:
    cells = [cell for stratum in strata for cell in stratum]
    freedom = sum(len(cell) - 1 for cell in cells)
    if freedom < 1:
        return 0.0, 0.0, 0
    variance = math.fsum((value - fmean(cell)) ** 2 for cell in cells for value in cell) / freedom
    weights = [1 / (1 / len(own) + 1 / len(others)) for own, others in strata]
    differences = [fmean(own) - fmean(others) for own, others in strata]
    effect = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
    return effect, math.sqrt(variance / sum(weights)), freedom


DecisionName = Literal["pass", "regressed", "improved", "inconclusive"]
MOST_MORE_RUNS = 40
MOST_DIGITS = 4
POWER = 0.8
"""Probability that the smallest visible change shows, and that the suggested number of runs settles a verdict."""
REPEATS = 3
"""Suggested number of runs per group if the spread between runs is unknown."""
FEWEST_EARLIER = 3
"""Minimum number of runs to estimate the spread between repeats from."""
ASSUMED_SPREAD_PCT = 1.0
"""Assumed standard deviation between repeats: chips, or one chip at different temperatures, differ by as much."""
NORMAL_QUANTILE = 1.959963984540054
SPREAD_POWER = 0.9
"""Probability that ``_spread_seen`` bounds the observed spread: half of the error of ``POWER`` is left for it."""
POWER_QUANTILE = 0.8416212335729143
"""Normal quantile of ``POWER``."""
SINGLE_RUNS = f"one run on each side: the spread of repeats is unknown and assumed to be {ASSUMED_SPREAD_PCT:g} %"
NO_INTERVAL = "the mean of a run of a single step has no interval"


@dataclass(frozen=True, slots=True)
class RunSpread:
    """The spread between repeats: the standard deviation of the logarithms of the means of ``runs`` other runs."""

    spread: float
    runs: int


@dataclass(frozen=True, slots=True)
class GroupDifference:
    n_before: int
    n_after: int
    before_s: float
    """Median of the run means."""
    after_s: float
    delta_pct: float
    """``after_s`` relative to ``before_s``; above 0 is slower."""
    ci95_pct: tuple[float, float] | None
    """95 % confidence interval; None if runs of a single step prevent one."""
    smallest_visible_change_pct: float | None
    """The smallest slowdown that these runs would have shown with probability ``POWER``; None without ``ci95_pct``."""
    noise_pct: float | None
    """Standard deviation between repeats, in percent; None if it is assumed: any decision is then soft."""
    node_effect: str | None
    """A description of nodes that may explain the difference."""
    earlier_runs: int = 0
    """Number of other runs that determine the noise, if each side has a single run."""


@dataclass(frozen=True, slots=True)
class Decision:
    verdict: DecisionName
    more_runs: int | None
    """Number of runs to add, first to the smaller group; None if clear, or if runs cannot settle it."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Precision:
    """The precision of a difference between medians: the spread between runs, standard error and degrees of freedom."""

    spread: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        return student_t(self.freedom, 0.975) * self.error

    @property
    def smallest_change(self) -> float:
        """Return the smallest true difference for which the interval excludes 0 with probability ``POWER``."""
        return self.half_width + student_t(self.freedom, POWER) * self.error


def run_spread(means_s: Sequence[float]) -> RunSpread | None:
    """Return the spread of ``means_s``; None for fewer than ``FEWEST_EARLIER``, or if one is not above 0 and finite."""
    if len(means_s) < FEWEST_EARLIER or not all(0 < mean < math.inf for mean in means_s):
        return None
    return RunSpread(stdev(map(math.log, means_s)), len(means_s))


def group_difference(
    before: Sequence[RunMean], after: Sequence[RunMean], known: RunSpread | None = None
) -> GroupDifference:
    """Return the difference of two groups; ``known`` is for single runs.

    Raise ValueError unless there are positive finite means.
    """
    if not before or not after or not all(0 < run.mean_s < math.inf for run in (*before, *after)):
        raise ValueError("both groups need runs, with finite step times above 0")
    logs = [[math.log(run.mean_s) for run in group] for group in (before, after)]
    center = median(logs[1]) - median(logs[0])
    precision, used = _precision(*logs), 0
    if precision is None and known:
        precision, used = _Precision(known.spread, known.spread * math.sqrt(2), known.runs - 1), known.runs
    half = precision.half_width if precision else _half_width_alone(before[0], after[0])
    if {run.ci95_s is None for run in (*before, *after)} == {True, False}:
        half = None
    smallest = None if half is None else precision.smallest_change if precision else smallest_change(half)
    return GroupDifference(
        n_before=len(before),
        n_after=len(after),
        before_s=math.exp(median(logs[0])),
        after_s=math.exp(median(logs[1])),
        delta_pct=_percent(center),
        ci95_pct=None if half is None else (_percent(center - half), _percent(center + half)),
        smallest_visible_change_pct=None if smallest is None else _percent(smallest),
        noise_pct=_percent(precision.spread) if precision else None,
        earlier_runs=used,
        node_effect=node_effect(before, after),
    )


def smallest_change(half_width: float) -> float:
    """Return the smallest change that would have shown with probability ``POWER``; normal quantiles overestimate it
    slightly.
    """
    return half_width * (1 + POWER_QUANTILE / NORMAL_QUANTILE)


def clear_decision(
    delta_pct: float, ci95_pct: tuple[float, float], smallest_visible_change_pct: float, tolerance_pct: float
) -> DecisionName | None:
    """Return the verdict if it is clear, else None; fewer than 5 % of equal groups are called different."""
    low, high = ci95_pct
    if low > 0 and delta_pct > tolerance_pct:
        return "regressed"
    if high < 0 and delta_pct < -tolerance_pct:
        return "improved"
    seen = not unseen(ci95_pct, smallest_visible_change_pct, tolerance_pct)
    return "pass" if high <= tolerance_pct and seen else None


def unseen(ci95_pct: tuple[float, float], smallest_visible_change_pct: float, tolerance_pct: float) -> str | None:
    """Return why an interval around 0 proves little: a change of the tolerance would not show; else None."""
    low, high = ci95_pct
    if not low <= 0 <= high <= tolerance_pct < smallest_visible_change_pct:
        return None
    smallest = f"{smallest_visible_change_pct:.{_digits_above(smallest_visible_change_pct, tolerance_pct)}f}"
    return f"a change below {smallest} % would not have shown; the tolerance is {tolerance_pct:g} %"


def _digits_above(value: float, limit: float) -> int:
    return next((n for n in range(1, MOST_DIGITS) if round(value, n) > limit), MOST_DIGITS)


def decide(difference: GroupDifference, tolerance_pct: float) -> Decision:
    """Decide whether the second group is slower or faster than the first by more than the tolerance."""
    interval, smallest = difference.ci95_pct, difference.smallest_visible_change_pct
    if interval is None or smallest is None:
        return Decision("inconclusive", 2 * (REPEATS - 1), NO_INTERVAL)
    notes = [note for note in (spread_note(difference), difference.node_effect) if note]
    if clear := clear_decision(difference.delta_pct, interval, smallest, tolerance_pct):
        return Decision(clear, None, "; ".join(notes) or None)
    why = unseen(interval, smallest, tolerance_pct) or _possible(interval, tolerance_pct)
    return Decision("inconclusive", more_runs(difference, tolerance_pct), "; ".join([why, *notes]))


def _possible(ci95_pct: tuple[float, float], tolerance_pct: float) -> str:
    digits = _digits_above(ci95_pct[1], tolerance_pct)
    ends = (f"{round(end, digits) + 0.0:.{digits}f}" for end in ci95_pct)
    return f"{' to '.join(ends)} % slower is possible; the tolerance is {tolerance_pct:g} %"


def spread_note(difference: GroupDifference) -> str | None:
    """Return the caveat about two single runs; None if a group has several runs."""
    if difference.earlier_runs:
        return f"one run on each side: repeats differ as much as {difference.earlier_runs} earlier runs did"
    return SINGLE_RUNS if difference.noise_pct is None else None


def more_runs(difference: GroupDifference, tolerance_pct: float) -> int | None:
    """Return how many more runs should settle the verdict with probability ``POWER``; None if more than
    ``MOST_MORE_RUNS``.
    """
    if difference.noise_pct is None:
        return 2 * (REPEATS - 1)
    delta, tolerance = math.log1p(difference.delta_pct / 100), math.log1p(tolerance_pct / 100)
    needed = abs(delta) if abs(delta) > tolerance else tolerance - max(delta, 0)
    spread = math.log1p(difference.noise_pct / 100)
    sizes = [difference.n_before, difference.n_after]
    for more in range(1, MOST_MORE_RUNS + 1):
        sizes[sizes.index(min(sizes))] += 1
        shown = _precision_of(spread, sizes).smallest_change
        passes = abs(delta) <= tolerance  # then a change of the tolerance has to show, with the observed spread
        if shown <= needed and not (passes and shown * _spread_seen(sum(sizes) - 2) > tolerance):
            return more
    return None


def _spread_seen(freedom: int) -> float:
    from scipy.special import chdtri

    return math.sqrt(float(chdtri(freedom, 1 - SPREAD_POWER)) / freedom)


def _precision_of(spread: float, sizes: Sequence[int]) -> _Precision:
    return _Precision(spread, spread * math.sqrt(sum(map(_variance_of_median, sizes))), sum(sizes) - 2)


def _precision(before: Sequence[float], after: Sequence[float]) -> _Precision | None:
    freedoms = [len(group) - 1 for group in (before, after)]
    if not sum(freedoms):
        return None
    squares = [math.fsum((value - fmean(group)) ** 2 for value in group) for group in (before, after)]
    weights = [_variance_of_median(len(group)) for group in (before, after)]
    spread = math.sqrt(sum(squares) / sum(freedoms))
    if freedoms[0] == freedoms[1] or not all(freedoms) or not spread:
        return _Precision(spread, spread * math.sqrt(sum(weights)), sum(freedoms))
    parts = [weight * square / freedom for weight, square, freedom in zip(weights, squares, freedoms, strict=True)]
    freedom = sum(parts) ** 2 / sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return _Precision(spread, math.sqrt(sum(parts)), freedom)


def _variance_of_median(count: int) -> float:
    """Within 2 % for odd counts, up to 22 % too high for even ones, which avoids false alarms."""
    return math.pi / (2 * count + math.pi - 2)


def _half_width_alone(before: RunMean, after: RunMean) -> float | None:
    widths = [(run.ci95_s[1] - run.ci95_s[0]) / (2 * run.mean_s) for run in (before, after) if run.ci95_s is not None]
    between = NORMAL_QUANTILE * math.sqrt(2) * math.log1p(ASSUMED_SPREAD_PCT / 100)
    return math.hypot(*widths, between) if len(widths) == 2 else None


def _percent(log: float) -> float:
    return 100 * math.expm1(log)
