# SPDX-License-Identifier: Apache-2.0
"""Calibration of verdicts: how often intervals contain the truth, and how often equal groups of runs seem to differ.

Runs are simulated: steps that are independent, autocorrelated (AR(1) with 0.5) or skewed (exponential), and steps
resampled from real runs in benchmarks/data/step_series.json: an autoregression fitted to each series, with the steps'
own residuals drawn at random, which keeps autocorrelation and skewness and has a known mean. The same seed gives the
same figures. Exit code 1: a target was missed.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmb.base.statistics import describe
from llmb.verdict.group_difference import RunMean, RunSpread, decide, group_difference, run_spread

DATA = Path(__file__).parent / "data" / "step_series.json"
SEED = 1234
CV = 0.005
"""Of the steps of a run, and between runs where they differ."""
LENGTHS = (10, 34, 200, 1000)
"""Of windows, in steps."""
TOLERANCE_PCT = 1.0
"""Of repeats on the same nodes."""
SLOWER = 1.03
ORDER = 5
"""Steps that an autoregression looks back."""
START = 60
"""Steps before the first one, so that it is like the others."""
BETWEEN, WITHIN = (0.003, 0.01), (CV, 0.02)
"""Spreads of runs and of steps in the grid."""
Floats = NDArray[Any]
Noise = Callable[[np.random.Generator, int, int], Floats]
"""From a number of runs and of steps to noise of mean 0 and about unit variance, one run per row."""


class Cell(NamedTuple):
    """Runs on each side, and earlier runs from which their spread is known."""

    name: str
    before: int
    after: int
    earlier: int = 0


GRID = (
    Cell("1 and 1 runs, soft", 1, 1),
    Cell("1 and 1 runs, 3 earlier ones", 1, 1, 3),
    Cell("1 and 1 runs, 5 earlier ones", 1, 1, 5),
    Cell("1 and 3 runs", 1, 3),
    Cell("1 and 5 runs", 1, 5),
    Cell("3 and 3 runs", 3, 3),
    Cell("3 and 5 runs", 3, 5),
    Cell("5 and 5 runs", 5, 5),
)


SPREADS = (0.003, 0.01, 0.03)
"""Between runs, where it is asked what would have shown."""
SIZES = (Cell("1 and 1 runs, 5 earlier ones", 1, 1, 5), Cell("3 and 3 runs", 3, 3), Cell("5 and 5 runs", 5, 5))
FOUND = (0.75, 0.9)
"""Share of the smallest changes that has to be found, where 80 % are aimed at."""


@dataclass(frozen=True)
class Case:
    """A share of ``repeats`` simulations, and the share that it has to be; None if there is no target."""

    question: str
    case: str
    share: float
    repeats: int
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        return (self.least or 0) <= self.share <= (1 if self.most is None else self.most)

    @property
    def error(self) -> float:
        """Standard error of ``share``."""
        return math.sqrt(max(self.share * (1 - self.share), 1 / self.repeats) / self.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10_000, help="simulations of each case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random numbers (default: %(default)s)")
    parser.add_argument("--grid", action="store_true", help="only the tables of numbers of runs and spreads")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    cases = []
    for case in (measure_tables if options.grid else measure)(options.repeats, options.seed):
        cases.append(case)
        if not options.json:
            sys.stdout.write(f"{_row(case)}\n")
            sys.stdout.flush()
    if options.json:
        document = {"seed": options.seed, "cases": [{**asdict(case), "met": case.met} for case in cases]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if all(case.met for case in cases) else 1)


def _row(case: Case) -> str:
    bounds = [f">= {case.least:.0%}" if case.least else "", f"<= {case.most:.0%}" if case.most is not None else ""]
    target = " and ".join(filter(None, bounds)) or "-"
    return f"{case.question:34} {case.case:72} {case.share:7.2%}  {target:18} {'ok' if case.met else 'MISSED'}"


def measure(repeats: int, seed: int = SEED, lengths: Sequence[int] = LENGTHS) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    yield from _intervals_of_a_mean(rng, repeats, lengths)
    yield from _intervals_of_a_difference(rng, repeats)
    yield from _false_alarms(rng, repeats)
    yield from _slow_downs(rng, repeats)
    yield from measure_tables(max(1, repeats // 2), seed)
    yield from _suggested_runs(rng, max(1, repeats // 4))


def _noises() -> dict[str, Noise]:
    return {
        "independent": partial(_ar1, phi=0.0, skewed=False),
        "autocorrelated (0.5)": partial(_ar1, phi=0.5, skewed=False),
        "skewed": partial(_ar1, phi=0.0, skewed=True),
        "real steps, resampled": partial(
            _resampled, fits=[_fit(series) for series in json.loads(DATA.read_text())["step_times_s"]]
        ),
    }


def _intervals_of_a_mean(rng: np.random.Generator, repeats: int, lengths: Sequence[int]) -> Iterator[Case]:
    beyond: dict[str, Noise] = {
        "skewed and autocorrelated (0.5)": partial(_ar1, phi=0.5, skewed=True),
        "autocorrelated (0.7)": partial(_ar1, phi=0.7, skewed=False),
    }
    for steps in lengths:
        runs = repeats if steps < 200 else max(1, repeats // 2)
        for name, noise in {**_noises(), **beyond}.items():
            found = [describe((100 + row).tolist()).ci95 for row in noise(rng, runs, steps)]
            share = sum(ci is not None and ci[0] <= 100 <= ci[1] for ci in found) / runs
            bounds = {} if name in beyond else {"least": 0.93, "most": 0.97}
            yield Case("interval contains the mean", f"{name}, {steps} steps", share, runs, **bounds)


def _intervals_of_a_difference(rng: np.random.Generator, repeats: int) -> Iterator[Case]:
    for name, noise in _noises().items():
        for before, after in ((3, 3), (5, 5), (1, 5), (2, 5)):
            share, true = 0, 100 * (SLOWER - 1)
            for groups in _pairs(rng, noise, repeats, before, after, between=CV, factor=SLOWER):
                low, high = group_difference(*groups).ci95_pct or (math.nan, math.nan)
                share += low <= true <= high
            case = f"{name}, {before} and {after} runs"
            yield Case("interval contains the difference", case, share / repeats, repeats, 0.93, 0.97)


def _false_alarms(rng: np.random.Generator, repeats: int) -> Iterator[Case]:
    for name, noise in _noises().items():
        for runs in (2, 3, 5):
            for between in (0.0, CV):
                alarms = 0
                for groups in _pairs(rng, noise, repeats, runs, runs, between=between):
                    alarms += decide(group_difference(*groups), 0.0).verdict in ("regressed", "improved")
                case = f"{name}, {runs} and {runs} runs, {100 * between:g} % apart"
                yield Case("false alarm, tolerance 0", case, alarms / repeats, repeats, most=0.05)


def _slow_downs(rng: np.random.Generator, repeats: int) -> Iterator[Case]:
    for name, noise in _noises().items():
        for between in (0.0, CV):
            found = 0
            for groups in _pairs(rng, noise, repeats, 3, 3, between=between, factor=SLOWER):
                found += decide(group_difference(*groups), TOLERANCE_PCT).verdict == "regressed"
            case = f"{name}, 3 and 3 runs, {100 * between:g} % apart"
            yield Case("slow-down of 3 % found", case, found / repeats, repeats, least=0.95)


def measure_tables(repeats: int, seed: int = SEED) -> Iterator[Case]:
    yield from measure_grid(repeats, seed)
    yield from measure_power(repeats, seed)


def measure_power(repeats: int, seed: int = SEED) -> Iterator[Case]:
    """The smallest change that is stated, added to the second side: of the very runs that it is stated of, and of
    others like them."""
    rng = np.random.default_rng(seed)
    for cell, spread in product(SIZES, SPREADS):
        same = other = 0
        for groups, known in _drawn(rng, cell, repeats, spread):
            factor = 1 + (group_difference(*groups, known=known).smallest_visible_change_pct or math.nan) / 100
            same += _seems_slower(*groups, factor, known)
            others, others_known = next(_drawn(rng, cell, 1, spread))
            other += _seems_slower(*others, factor, others_known)
        case = f"{cell.name}, {100 * spread:g} % apart"
        yield Case("smallest change found, same runs", case, same / repeats, repeats, *FOUND)
        yield Case("smallest change found, others", case, other / repeats, repeats)


def _seems_slower(before: Sequence[RunMean], after: Sequence[RunMean], factor: float, known: RunSpread | None) -> bool:
    slower = [RunMean(run.mean_s * factor) for run in after]
    return (group_difference(before, slower, known).ci95_pct or (0.0,))[0] > 0


def _drawn(
    rng: np.random.Generator, cell: Cell, repeats: int, spread: float
) -> Iterator[tuple[tuple[list[RunMean], list[RunMean]], RunSpread | None]]:
    """Two groups of run means, and what earlier runs tell of their spread."""
    for _ in range(repeats):
        count = cell.before + cell.after
        means = 10 * np.exp(spread * rng.standard_normal(count + cell.earlier))
        runs = [RunMean(float(mean)) for mean in means[:count]]
        known = run_spread(means[count:].tolist()) if cell.earlier else None
        yield (runs[: cell.before], runs[cell.before :]), known


def measure_grid(repeats: int, seed: int = SEED) -> Iterator[Case]:
    """By number of runs and by spread: equal sides that seem to differ, and slow-downs that are found."""
    rng = np.random.default_rng(seed)
    for cell in GRID:
        for noise in ("independent", "autocorrelated (0.5)"):
            for between, cv in product(BETWEEN, WITHIN):
                case = f"{cell.name}, {noise}, {100 * between:g} % apart, CV {100 * cv:g} %"
                decide_all = partial(_decisions, rng, cell, _noises()[noise], repeats, between, cv)
                equal, slower = decide_all(1.0), decide_all(SLOWER)
                alarms = sum(name in ("regressed", "improved") for name in equal) / repeats
                yield Case("equal, seem to differ", case, alarms, repeats, most=0.05)
                found = sum(name == "regressed" for name in slower) / repeats
                yield Case("3 % slower, found", case, found, repeats)


def _decisions(
    rng: np.random.Generator, cell: Cell, noise: Noise, repeats: int, between: float, cv: float, factor: float
) -> Iterator[str]:
    alone = cell.before == cell.after == 1
    earlier = _pairs(rng, noise, repeats, cell.earlier, 0, between=between, cv=cv) if cell.earlier else None
    for groups in _pairs(
        rng, noise, repeats, cell.before, cell.after, between=between, factor=factor, cv=cv, with_intervals=alone
    ):
        known = run_spread([run.mean_s for run in next(earlier)[0]]) if earlier else None
        yield decide(group_difference(*groups, known=known), TOLERANCE_PCT).verdict


def _suggested_runs(rng: np.random.Generator, repeats: int) -> Iterator[Case]:
    """How many inconclusive comparisons are decided by as many more runs as are suggested; 80 % are aimed at."""
    noise, asked, decided = _noises()["independent"], 0, 0
    for before, after in _pairs(rng, noise, repeats, 3, 3, between=4 * CV, factor=SLOWER):
        more = decide(group_difference(before, after), TOLERANCE_PCT).more_runs
        if not more:
            continue
        added = next(_pairs(rng, noise, 1, (more + 1) // 2, max(1, more // 2), between=4 * CV, factor=SLOWER))
        asked += 1
        groups = [*before, *added[0]], [*after, *added[1][: more // 2]]
        decided += decide(group_difference(*groups), TOLERANCE_PCT).verdict != "inconclusive"
    yield Case("decided by the suggested runs", f"3 and 3 runs, {400 * CV:g} % apart", decided / max(asked, 1), asked)


def _pairs(
    rng: np.random.Generator,
    noise: Noise,
    repeats: int,
    before: int,
    after: int,
    *,
    between: float,
    factor: float = 1.0,
    steps: int = 10,
    cv: float = CV,
    with_intervals: bool = False,
) -> Iterator[tuple[list[RunMean], list[RunMean]]]:
    """Two groups of runs, the second one slower by ``factor``; ``between`` is the spread of their levels."""
    count = before + after
    times = 10 * (1 + cv * noise(rng, repeats * count, steps))
    times *= np.exp(between * rng.standard_normal(len(times)))[:, None]
    for rows in times.reshape(repeats, count, steps):
        rows[before:] *= factor
        runs = [RunMean(float(row.mean()), describe(row.tolist()).ci95 if with_intervals else None) for row in rows]
        yield runs[:before], runs[before:]


def _ar1(rng: np.random.Generator, runs: int, steps: int, *, phi: float, skewed: bool) -> Floats:
    shape = (runs, steps + START)
    noise = rng.exponential(size=shape) - 1 if skewed else rng.standard_normal(shape)
    for step in range(1, steps + START):
        noise[:, step] += phi * noise[:, step - 1]
    settled: Floats = noise[:, START:] * math.sqrt(1 - phi**2)
    return settled


@dataclass(frozen=True)
class _Fit:
    """An autoregression of unit variance: how much of the steps before remains, and what is new at a step."""

    weights: Floats
    residuals: Floats


def _fit(times: Sequence[float]) -> _Fit:
    values = np.asarray(times)
    values = (values - values.mean()) / values.std()
    before = np.column_stack([values[ORDER - lag : len(values) - lag] for lag in range(1, ORDER + 1)])
    weights = np.linalg.lstsq(before, values[ORDER:], rcond=None)[0]
    residuals = values[ORDER:] - before @ weights
    return _Fit(weights, residuals - residuals.mean())


def _resampled(rng: np.random.Generator, runs: int, steps: int, *, fits: Sequence[_Fit]) -> Floats:
    """The same number of runs like each of ``fits``, about."""
    parts = []
    for fit, count in zip(fits, np.bincount(np.arange(runs) % len(fits), minlength=len(fits)), strict=True):
        noise = rng.choice(fit.residuals, (count, steps + START))
        for step in range(ORDER, steps + START):
            noise[:, step] += noise[:, step - ORDER : step][:, ::-1] @ fit.weights
        parts.append(noise[:, START:])
    together: Floats = np.concatenate(parts)
    return rng.permutation(together)


if __name__ == "__main__":
    main()
