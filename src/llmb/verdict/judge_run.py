# SPDX-License-Identifier: Apache-2.0
"""Judges ended runs by published figures, acceptance sets, other runs or expectations, and writes expectations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import yaml

from llmb.base.errors import EnvironmentProblem, UsageError, see
from llmb.base.missing import Missing
from llmb.base.statistics import Statistics
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import LayoutSizes, releases_of
from llmb.catalogue.window import STEADY
from llmb.readers.samples.node_settings import PREFIXES
from llmb.runs.analyzed_run import AnalyzedRun, flaw_of, grouped
from llmb.runs.conditions import Value, Values, find_conditions, merged, rule_of, steps_text, title_of
from llmb.runs.folder import write_atomically
from llmb.runs.result import Reference, Verdict
from llmb.verdict.catalogue_figures import NEEDED, as_catalogued, find_recipe, find_row, if_possible, other_sizes
from llmb.verdict.expectations_file import AcceptanceRecipe, AcceptanceSet, Expectations, ExpectedStepTime
from llmb.verdict.judgement import (
    Tolerance,
    judge_against_figure,
    judge_against_runs,
    stated_conditions,
    times_of,
    without_reference,
)
from llmb.verdict.match_runs import Earlier, earlier_spread, no_earlier
from llmb.verdict.published_verdict import documented_steps, published_verdict, verdict_of_recipe, verdict_of_row

NO_RECIPE = "the catalogue has no recipe with the layout of this log"
LEAST_EARLIER = 2
MOST_EARLIER = 10
"""Maximum number of earlier runs; older ones probably used other software."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and the run or the repeats that it applies to."""

    title: str
    runs: tuple[AnalyzedRun, ...]
    verdict: Verdict
    baseline: tuple[AnalyzedRun, ...] = ()
    """The runs of the reference; empty if it is a single step time."""

    @property
    def times(self) -> Statistics | None:
        """Return the statistics of one run's window, or of the means of several runs."""
        return times_of(self.runs)

    @property
    def compared_s(self) -> float | None:
        """Return the step time that is compared: the median of several runs compared with runs, otherwise the mean."""
        if self.times is None:
            return None
        counted = [run for run in self.runs if flaw_of(run) is None]
        return self.times.median if self.baseline and len(counted) > 1 else self.times.mean


def is_pretended(run: AnalyzedRun) -> bool:
    return run.recipe is not None and run.recipe.pretended_rank is not None


def judge_pretended(repeats: Sequence[AnalyzedRun]) -> Judged:
    """Judge runs of a single pretended rank as 'not comparable'."""
    why = flaw_of(repeats[0])
    assert why, "a rank that runs alone measures no step of all ranks"
    return Judged(title_of_run(repeats[0]), tuple(repeats), without_reference("not comparable", why))


def judge_alone(run: AnalyzedRun, tolerance: Tolerance | None, earlier: Earlier) -> list[Judged]:
    """Judge ``run`` by the published figure or, if it has a record but no figure, by earlier repeats."""
    judged = judge_published(run, tolerance)
    if judged.verdict.verdict != "not comparable" or judged.verdict.reference or run.record is None:
        return [judged]
    before = [one for one in earlier(run) if (one.started_s or 0) < (run.started_s or 0)][-MOST_EARLIER:]
    if len(before) < LEAST_EARLIER:
        count = f"{len(before) or 'no'} earlier run{'' if len(before) == 1 else 's'}"
        why = f"{judged.verdict.reason}; {count} of this recipe on these nodes, and {LEAST_EARLIER} are needed"
        return [replace(judged, verdict=without_reference("not comparable", why))]
    return judge_against([run], before, f"{len(before)} earlier runs", tolerance, earlier)


def judge_published(run: AnalyzedRun, tolerance: Tolerance | None = None) -> Judged:
    """Judge a run by the published figure of its recipe."""
    if run.record is None:
        return _judge_log(run, tolerance)
    found = published_verdict([run], run.record, tolerance)
    return Judged(title_of_run(run), (run,), _verdict(run, found))


def _verdict(run: AnalyzedRun, found: Verdict | Missing) -> Verdict:
    if not isinstance(found, Missing):
        return found
    flaw = flaw_of(run)
    return without_reference("invalid", flaw) if flaw else without_reference("not comparable", found.reason)


def _judge_log(run: AnalyzedRun, tolerance: Tolerance | None) -> Judged:
    catalogue = Catalogue()
    known = as_catalogued(run.configuration, catalogue)
    recipe = find_recipe(known, catalogue)
    run = if_possible(run, catalogue) if run.log else run
    row = None if recipe else find_row(known, catalogue)
    found: Verdict | Missing
    if row:
        found = verdict_of_row(row, catalogue, run, stated_conditions(run), tolerance)
    elif recipe:
        found = verdict_of_recipe(recipe, [run], _logged_conditions(run, recipe), tolerance)
    else:
        found = _no_recipe(known, catalogue)
    title = recipe.title() if recipe else row.title if row else run.path.name
    return Judged(title, (run,), _verdict(run, found))


def _logged_conditions(run: AnalyzedRun, recipe: Recipe) -> Values:
    stated, document = stated_conditions(run), recipe.document
    if document is None or run.configuration.get("release") != document.release:
        return stated
    window = {"window": documented_steps(recipe, run.window)} if run.window else {}
    return {**stated, "program": document.framework, **window}


def _no_recipe(known: Mapping[str, Value], catalogue: Catalogue) -> Missing:
    if unknown_keys := [title_of(key) for key in NEEDED if known.get(key) is None]:
        return Missing(f"the log does not report its {', '.join(unknown_keys)}")
    if (gpu_type := known["gpu_type"]) not in catalogue.gpus:
        return Missing(f"no figure is published for the GPU of the log, {gpu_type}: {rule_of('hardware.device').why}")
    workload, release = catalogue.workloads.get(str(known["workload"])), known.get("release")
    releases = releases_of(workload, str(known["size"])) if workload else []
    if release and releases and release not in releases:
        return Missing(f"the log is from release {release}, but figures exist only for {' and '.join(releases)}")
    named = {key: known[key] for key in (*NEEDED, "release") if key in known}
    recipe, row = find_recipe(named, catalogue), find_row(named, catalogue)
    printed = {f"layout.{name}": size for name, size in row.sizes.items()} if row else {}
    others = other_sizes(known, recipe) if recipe else {k: v for k, v in printed.items() if known.get(k, v) != v}
    differs = [f"{title_of(key)} {known[key]}, but {size} in the recipe" for key, size in others.items()]
    return Missing("; ".join([NO_RECIPE, *differs]))


def judge_expected(run: AnalyzedRun, expectations: Expectations, tolerance: Tolerance | None = None) -> Judged:
    """Judge a run by the matching entry of the user's file; without one, it is not comparable or invalid."""
    stated = stated_conditions(run)
    entry = expectations.entry_for(stated)
    if isinstance(entry, Missing):
        return Judged(title_of_run(run), (run,), _verdict(run, entry))
    wanted = entry.values
    own = {key: value for key, value in stated.items() if key in wanted}
    conditions = find_conditions(own, wanted, "expectation")
    limit = tolerance or expectations.tolerance_of(entry)
    verdict = judge_against_figure([run], entry.reference, conditions, limit)
    return Judged(title_of_run(run), (run,), verdict)


def judge_against(
    runs: Iterable[AnalyzedRun],
    baseline: Sequence[AnalyzedRun],
    source: str,
    tolerance: Tolerance | None = None,
    earlier: Earlier = no_earlier,
) -> list[Judged]:
    """Judge each group of repeats against the most similar runs of ``baseline``, which must be measurements."""
    groups = grouped(baseline)
    return [_against_nearest(repeats, groups, source, tolerance, earlier) for repeats in grouped(runs)]


def _against_nearest(
    repeats: Sequence[AnalyzedRun],
    groups: Sequence[Sequence[AnalyzedRun]],
    source: str,
    tolerance: Tolerance | None,
    earlier: Earlier,
) -> Judged:
    if not groups:
        verdict = without_reference("not comparable", f"{source} has no other run that is a measurement")
        return Judged(title_of_run(repeats[0]), tuple(repeats), verdict)
    verdicts = [
        judge_against_runs(repeats, group, _baseline(group, source), tolerance, earlier_spread(group, repeats, earlier))
        for group in groups
    ]
    verdict, group = min(zip(verdicts, groups, strict=True), key=lambda each: _distance(each[0]))
    return Judged(title_of_run(repeats[0]), tuple(repeats), verdict, tuple(group))


def _distance(verdict: Verdict) -> tuple[int, ...]:
    effects = [condition.effect for condition in verdict.conditions]
    return tuple(effects.count(effect) for effect in ("prevents", "weakens", "noted"))


def _baseline(group: Sequence[AnalyzedRun], source: str) -> Reference:
    times = times_of(group)
    assert times, "runs without statistics are no baseline"
    window = group[0].window
    same = all(run.window == window for run in group)
    return Reference(
        kind="baseline",
        step_time_s=times.median if len(group) > 1 else times.mean,
        step_time_s_ci95=times.ci95,
        window=window if same else None,
        window_text=steps_text(window) if window and same else "",
        source=f"{source}: {', '.join(run.id for run in group)}",
        runs=len(group),
    )


def judge_acceptance(wanted: AcceptanceSet, runs: Sequence[AnalyzedRun]) -> list[Judged]:
    """Return a verdict for each recipe of the set, in order. A recipe without a run is inconclusive."""
    return [
        _accepted(wanted, recipe, [run for run in runs if _is_of(run, wanted, recipe)]) for recipe in wanted.recipes
    ]


def _is_of(run: AnalyzedRun, wanted: AcceptanceSet, recipe: AcceptanceRecipe) -> bool:
    own = run.recipe
    return (
        own is not None
        and not is_pretended(run)
        and (own.workload, own.size, own.dtype, own.scale, own.gpu_type)
        == (recipe.workload, recipe.size, recipe.dtype, recipe.scale, wanted.gpu_type)
    )


def _accepted(wanted: AcceptanceSet, recipe: AcceptanceRecipe, runs: Sequence[AnalyzedRun]) -> Judged:
    title = f"{recipe.name} on {recipe.scale} x {wanted.gpu_type}"
    used = [run for run in runs if flaw_of(run) is None] or runs[-1:]
    if not used:
        return Judged(title, (), without_reference("inconclusive", "no run of this recipe was found"))
    by_window: dict[str | None, list[AnalyzedRun]] = {}
    for run in used:
        by_window.setdefault(kind_of_window(run), []).append(run)
    repeats = [group for same in by_window.values() for group in grouped(same)]
    judged = [_accepted_repeats(title, group, wanted.tolerance) for group in repeats]

    def order(one: Judged) -> tuple[object, ...]:
        return one.verdict.reference is None, _distance(one.verdict), -used.index(one.runs[-1])

    return min(judged, key=order)


def kind_of_window(run: AnalyzedRun) -> str | None:
    """Return the kind of a run's window. All steady states are of one kind, wherever they begin."""
    if run.window is None:
        return None
    return STEADY if run.window.rule == STEADY else steps_text(run.window)


def _accepted_repeats(title: str, repeats: Sequence[AnalyzedRun], tolerance: Tolerance) -> Judged:
    record = repeats[-1].record
    assert record, "only records identify recipes"
    found = published_verdict(repeats, record, tolerance)
    verdict = without_reference("not comparable", found.reason) if isinstance(found, Missing) else found
    return Judged(title, tuple(repeats), verdict)


def title_of_run(run: AnalyzedRun) -> str:
    """Return the title of a run's recipe or, if that is unknown, the name of the run's file or folder."""
    return run.recipe.title() if run.recipe else run.path.name


RECIPE = ("workload", "size", "dtype", "gpu_type", "program", "data")
DIGITS, LINE = 6, 120
HEADER = """\
# Step times that runs are judged by: llmb judge RUN --expect THIS-FILE
# A run is judged by the entry that specifies most of its recipe. 'tolerance_pct', at the top level or in an entry, is
# the tolerated slowdown in percent. 'conditions' select no runs: a verdict lists those that differ.
"""


def write_expectations(path: Path, runs: Iterable[AnalyzedRun]) -> int:
    """Write a new file with an entry per group of repeats; return their number.

    Raise UsageError or EnvironmentProblem.
    """
    if path.exists():
        raise UsageError("the file already exists", where=str(path), do="pass another file, or remove this one")
    entries = [_entry(group) for group in grouped(run for run in runs if flaw_of(run) is None)]
    if not entries:
        raise UsageError(
            "none of these runs is a measurement", do="run 'llmb judge' without --write-expectations to see why"
        )
    try:
        write_atomically(path, _expectations_text(entries))
    except OSError as error:
        do = "pass another file"
        raise EnvironmentProblem(f"the file cannot be written: {error.strerror}", where=str(path), do=do) from error
    return len(entries)


def _expectations_text(entries: Sequence[ExpectedStepTime]) -> str:
    listed = [entry.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for entry in entries]
    file = {"expectations": listed}
    return HEADER + yaml.safe_dump(file, sort_keys=False, default_flow_style=None, allow_unicode=True, width=LINE)


def _entry(group: Sequence[AnalyzedRun]) -> ExpectedStepTime:
    values = merged(map(stated_conditions, group))
    if "workload" not in values:
        do = f"pass --workload and the recipe's other options, or write the entry by hand; {see('judge-a-run')}"
        raise UsageError(
            "this log does not identify its recipe, and its run has no record", where=str(group[0].path), do=do
        )
    times = times_of(group)
    assert times, "runs without statistics were removed earlier"
    sizes = {name: values[f"layout.{name}"] for name in LayoutSizes.model_fields if f"layout.{name}" in values}
    recipe = {name: values[name] for name in RECIPE if name in values}
    used = {*RECIPE, "window", "steps", "layout.gpus", *(f"layout.{name}" for name in sizes)}
    nodes = sorted({node for run in group for node in run.nodes})
    return ExpectedStepTime(
        **recipe,
        scale=int(values["layout.gpus"]) if "layout.gpus" in values else None,
        layout=LayoutSizes(**{name: int(size) for name, size in sizes.items()}),
        step_time_s=_rounded(times.mean),
        step_time_s_ci95=times.ci95 and (_rounded(times.ci95[0]), _rounded(times.ci95[1])),
        window=values.get("window"),
        runs=len(group),
        source=_source(group),
        conditions={
            **{key: value for key, value in sorted(values.items()) if key not in used and _matters(key)},
            **({"nodes": ", ".join(nodes)} if nodes else {}),
        },
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _matters(key: str) -> bool:
    """Return whether to write a condition. Nodes have too many settings for a file that users edit."""
    return rule_of(key).differs != "ignored" and not key.startswith(PREFIXES)


def _source(group: Sequence[AnalyzedRun]) -> str:
    started = [run.started_s for run in group if run.started_s is not None]
    day = f" {datetime.fromtimestamp(max(started)).date().isoformat()}" if started else ""
    return f"measured{day}: {', '.join(run.id for run in group)}"
