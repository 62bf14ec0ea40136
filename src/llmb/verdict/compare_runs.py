# SPDX-License-Identifier: Apache-2.0
"""Compares two groups of runs, recipe by recipe. Pure except for reading data files."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from llmb.base.errors import UsageError
from llmb.base.shown_text import value_text
from llmb.catalogue.records import Record
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun, RunSet, exclusion_reason, without_unmeasured
from llmb.runs.conditions import Difference, Value, definite_differences, differences, rule_of, title_of, together
from llmb.runs.result import BETTER, CHANGED_COPY, WORST, VerdictName
from llmb.verdict.group_difference import RunMean, decide, group_difference
from llmb.verdict.judge_run import kind_of_window
from llmb.verdict.judgement import Tolerance, default_tolerance, unknown_scale
from llmb.verdict.match_runs import (
    Configuration,
    Earlier,
    MatchedRuns,
    Matches,
    Pair,
    Varied,
    changes_work_per_token,
    earlier_spread,
    group_title,
    groups_of,
    match_sides,
    match_within,
    nearest,
    no_earlier,
    same_but,
    sources,
    titles,
    varied,
)

Measure = Literal["step_time", "gpu_time_per_token"]
Scaling = Literal["weak", "strong", "mixed"]


class Row(Record):
    """The comparison of one recipe. Times are medians of the runs' means."""

    recipe: str
    n_before: int
    n_after: int
    before_s: float
    """Seconds per step."""
    after_s: float
    delta_pct: float | None
    """Change of ``measure`` in percent; above 0 is slower. None if the sides are not comparable."""
    ci95_pct: tuple[float, float] | None
    """95 % confidence interval of ``delta_pct``."""
    smallest_visible_change_pct: float | None
    """The smallest slowdown that these runs would have shown in 80 of 100 cases; None if ``ci95_pct`` is None."""
    noise_pct: float | None
    """Standard deviation between repeats, in percent; None if unknown: the interval then uses an assumed value."""
    earlier_runs: int
    """Number of other repeats that ``noise_pct`` is estimated from, if each side has a single run."""
    verdict: VerdictName
    soft: bool
    """True if the spread or the number of GPUs is unknown, windows differ, or a run had a fault."""
    reason: str | None
    """The reason why the verdict is not clear, or a caveat."""
    more_runs: int | None
    """Total number of additional runs that should settle the verdict; None if none are needed or would help."""
    tolerance_pct: float
    tolerance_source: str
    measure: Measure
    """``gpu_time_per_token`` if comparable sides do different work per step and GPU."""
    speed_up: float | None
    """The ratio of tokens per second and GPU, after to before; None if the sides are not comparable."""
    scaling: Scaling | None
    """None if both sides have equally many GPUs, or if a number of GPUs or batch size is unknown."""
    before_runs: tuple[str, ...]
    after_runs: tuple[str, ...]


class Unmatched(Record):
    """A recipe that was measured on one side only."""

    side: Literal["before", "after"]
    recipe: str
    runs: tuple[str, ...]
    differs: tuple[Difference, ...]
    """Differences from the most similar unmatched recipe of the other side; empty if it has none of the same model."""
    reason: str | None
    """The reason why the recipe's runs after, if any, are not measurements; None for ``side`` after."""


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
    """The worst verdict of the rows; at best 'not comparable' without rows, or if a recipe's later runs are flawed."""
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    """Differences between all compared runs of the two sides; several values of a side are separated by commas."""
    unmatched: tuple[Unmatched, ...]
    left_out: tuple[LeftOutRun, ...]


SAMPLED = ("sm_clock_mhz_mean", "power_w_mean")
LEAST_CHANGE_PCT = 2.0
"""Smaller changes are not listed."""


def resource_differences(before: Sequence[AnalyzedRun], after: Sequence[AnalyzedRun]) -> Iterator[Difference]:
    """Yield changes of at least ``LEAST_CHANGE_PCT`` in the GPUs' mean clock and power, if both sides were sampled."""
    for name in SAMPLED:
        old, new = _mean(before, name), _mean(after, name)
        if old and new and abs(new / old - 1) >= LEAST_CHANGE_PCT / 100:
            yield Difference(key=f"resources.{name}", before=round(old), after=round(new))


def _mean(runs: Sequence[AnalyzedRun], name: str) -> float | None:
    results = [run.record.result for run in runs if run.record and run.record.result]
    values = [getattr(result.resources, name) for result in results if result.resources]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


IN_BOTH = "both selections have it: it counts as after"
WORK = ("layout.gbs", "layout.seq_len", "layout.gpus")
"""Keys that determine the number of tokens per step and GPU."""
Side = Literal["before", "after"]


def compare_runs(
    before: RunSet,
    after: RunSet | None,
    *,
    vary: Sequence[str] = (),
    tolerance_pct: float | None = None,
    earlier: Earlier = no_earlier,
) -> Comparison:
    """Compare runs by recipe, or groups of ``before`` that differ in ``vary``.

    Raise UsageError for an unknown or missing ``vary``.
    """
    ended = (*before.runs, *(after.runs if after else ()))
    may_vary = varied(vary, (key for run in ended for key in run.identity.configuration))
    old, new = without_unmeasured(before), without_unmeasured(after) if after else None
    left_out = [_left_out(one, "before") for one in old.left_out]
    if after is None or new is None or sources(before) == sources(after):
        if not vary:
            do = "pass BEFORE and AFTER, or pass --vary with the keys that differ within one group, such as dtype"
            lines = "".join(f"\n  left out: {one.run}: {one.reason}" for one in left_out)
            what = "both sides have the same runs" if after else "two groups are needed, but only one was specified"
            raise UsageError(f"{what}{lines}", where=before.title, do=do)
        matches = match_within(groups_of(old.runs), may_vary)
    else:
        own = [run for run in old.runs if run.counted_as not in sources(new)]
        left_out += [LeftOutRun(run=run.id, reason=IN_BOTH, side="before") for run in old.runs if run not in own]
        left_out += [_left_out(one, "after") for one in new.left_out]
        matches = match_sides(groups_of(own), groups_of(new.runs), may_vary)
    given = may_vary.tolerance if tolerance_pct is None else Tolerance(tolerance_pct, "as given")
    named = zip(matches.pairs, titles(matches.pairs), strict=True)
    rows = tuple(_row(pair, recipe, given, earlier) for pair, recipe in named)
    unmatched = tuple(_unmatched(matches, after or before, may_vary))
    return Comparison(
        before=before.title,
        after=after.title if after else before.title,
        vary=tuple(vary),
        verdict=_verdict(rows, unmatched),
        rows=rows,
        differences=_differences(matches.pairs),
        unmatched=unmatched,
        left_out=tuple(left_out),
    )


def _left_out(one: ExcludedRun, side: Side) -> LeftOutRun:
    return LeftOutRun(run=one.run, reason=one.reason, side=side)


def _verdict(rows: Sequence[Row], unmatched: Sequence[Unmatched]) -> VerdictName:
    found: list[VerdictName] = [row.verdict for row in rows]
    # A recipe with only flawed runs after the change may be broken.
    if not rows or any(one.side == "before" and one.reason for one in unmatched):
        found.append("not comparable")
    return min(found, key=WORST.index)


def _row(pair: Pair, recipe: str, given: Tolerance | None, earlier: Earlier) -> Row:
    before, after = pair.before, pair.after
    doubts = (unknown_scale((*before.runs, *after.runs)), _other_window(pair))
    disturbed = (*_disturbed(pair), *filter(None, doubts))
    works = _works(before.configuration, after.configuration)
    changed = differences(before.configuration, after.configuration)
    obstacle = _obstacle(changed, works)
    measure: Measure = "step_time" if works[0] == works[1] or obstacle else "gpu_time_per_token"
    scales = (1.0, 1.0) if measure == "step_time" else tuple(1 / work for work in works if work)
    known = earlier_spread(before.runs, after.runs, earlier)
    difference = group_difference(_means(before, scales[0]), _means(after, scales[1]), known)
    tolerance = given or _tolerance(pair)
    decision = decide(difference, tolerance.pct)
    if decision.verdict in BETTER and any(CHANGED_COPY in run.faults for run in (*before.runs, *after.runs)):
        decision = replace(decision, verdict="inconclusive", more_runs=None)
    return Row(
        recipe=recipe,
        n_before=difference.n_before,
        n_after=difference.n_after,
        before_s=difference.before_s / scales[0],
        after_s=difference.after_s / scales[1],
        delta_pct=None if obstacle else difference.delta_pct,
        ci95_pct=None if obstacle else difference.ci95_pct,
        smallest_visible_change_pct=None if obstacle else difference.smallest_visible_change_pct,
        noise_pct=difference.noise_pct,
        earlier_runs=difference.earlier_runs,
        soft=difference.noise_pct is None or bool(disturbed),
        verdict="not comparable" if obstacle else decision.verdict,
        reason="; ".join(filter(None, (obstacle or decision.reason, *disturbed))) or None,
        more_runs=None if obstacle else decision.more_runs,
        tolerance_pct=tolerance.pct,
        tolerance_source=tolerance.source,
        measure=measure,
        speed_up=None if obstacle else 1 / (1 + difference.delta_pct / 100),
        scaling=_scaling(before.configuration, after.configuration),
        before_runs=tuple(run.id for run in before.runs),
        after_runs=tuple(run.id for run in after.runs),
    )


def _disturbed(pair: Pair) -> Iterator[str]:
    for side, group in (("before", pair.before), ("after", pair.after)):
        texts = together({key: "; ".join(said) for key, said in run.faults.items()} for run in group.runs)
        yield from (f"{title_of(key)} {side}: {text}" for key, text in texts.items())


def _other_window(pair: Pair) -> str | None:
    before, after = (sorted({str(kind_of_window(run)) for run in side.runs}) for side in (pair.before, pair.after))
    return None if before == after else f"window: {', '.join(before)} before, {', '.join(after)} after"


def _works(before: Configuration, after: Configuration) -> tuple[float | None, float | None]:
    lengths = [side.get("layout.seq_len") for side in (before, after)]
    return _work(before, lengths == [None, None]), _work(after, lengths == [None, None])


def _work(configuration: Configuration, in_sequences: bool) -> float | None:
    names = ("gbs", "gpus") if in_sequences else ("gbs", "gpus", "seq_len")
    values = [configuration.get(f"layout.{name}") for name in names]
    gbs, gpus, *lengths = (value if isinstance(value, int) and value > 0 else None for value in values)
    if gbs is None or gpus is None or None in lengths:
        return None
    return gbs * (lengths[0] if lengths and lengths[0] else 1) / gpus


def _obstacle(changed: Sequence[Difference], works: tuple[float | None, float | None]) -> str | None:
    other = [one.key for one in changed if changes_work_per_token(one.key) and None not in (one.before, one.after)]
    if other:
        return f"a token is not the same work on both sides; these settings differ: {', '.join(other)}"
    if None in works and (works[0] != works[1] or any(one.key in WORK for one in changed)):
        return "the number of tokens per step is unknown on at least one side"
    return None


def _means(group: MatchedRuns, scale: float) -> list[RunMean]:
    means = []
    for run in group.runs:
        assert run.step_time_s
        low, high = run.step_time_s.ci95 or (None, None)
        interval = None if low is None or high is None else (low * scale, high * scale)
        means.append(RunMean(mean_s=run.step_time_s.mean * scale, ci95_s=interval, nodes=run.nodes))
    return means


def _tolerance(pair: Pair) -> Tolerance:
    nodes = [{node for run in group.runs for node in run.nodes} for group in (pair.before, pair.after)]
    return default_tolerance("baseline", same_nodes=bool(nodes[0]) and nodes[0] == nodes[1])


def _scaling(before: Configuration, after: Configuration) -> Scaling | None:
    gpus, batches = ([side.get(f"layout.{name}") for side in (before, after)] for name in ("gpus", "gbs"))
    numbers = [value for value in (*gpus, *batches) if isinstance(value, int)]
    if gpus[0] == gpus[1] or len(numbers) < 4:
        return None
    if batches[0] == batches[1]:
        return "strong"
    return "weak" if numbers[2] * numbers[1] == numbers[3] * numbers[0] else "mixed"


def _unmatched(matches: Matches, after: RunSet, may_vary: Varied) -> Iterator[Unmatched]:
    spoiled = [run for run in after.runs if exclusion_reason(run)]
    for group in matches.only_before:
        same = [run for run in spoiled if same_but(group.configuration, run.identity.configuration, may_vary)]
        yield _alone("before", group, matches.only_after, same)
    for group in matches.only_after:
        yield _alone("after", group, matches.only_before, ())


def _alone(side: Side, group: MatchedRuns, others: Sequence[MatchedRuns], spoiled: Sequence[AnalyzedRun]) -> Unmatched:
    near = nearest(group, others)
    sides = [group.configuration, near.configuration] if near else []
    reasons = dict.fromkeys(exclusion_reason(run) or "" for run in spoiled)
    return Unmatched(
        side=side,
        recipe=group_title(group),
        runs=tuple(run.id for run in group.runs),
        differs=differences(*(sides if side == "before" else reversed(sides))) if near else (),
        reason="; ".join(reasons) or None,
    )


def _differences(pairs: Sequence[Pair]) -> tuple[Difference, ...]:
    before = [run for pair in pairs for run in pair.before.runs]
    after = [run for pair in pairs for run in pair.after.runs]
    known = definite_differences(_merged(before), _merged(after))
    every = (one for one in known if rule_of(one.key).differs != "ignored")
    found = [*every, *resource_differences(before, after)]
    return tuple(sorted(found, key=lambda one: not rule_of(one.key).important))


def _merged(runs: Sequence[AnalyzedRun]) -> Configuration:
    known = [run.values for run in runs]
    keys = dict.fromkeys(key for one in known for key in one)
    nodes = sorted({node for run in runs for node in run.nodes})
    values = {key: _one_or_all([one.get(key) for one in known]) for key in keys}
    return values | ({"nodes": ", ".join(nodes)} if nodes else {})


def _one_or_all(values: Sequence[Value]) -> Value:
    every = sorted(set(values), key=str)
    return every[0] if len(every) == 1 else ", ".join(map(value_text, every))
