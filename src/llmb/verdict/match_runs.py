# SPDX-License-Identifier: Apache-2.0
"""Finds repeats among runs, and pairs groups of them to compare. Pure except for reading a data file."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from llmb.base.errors import unknown
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.readers.logs.configuration import ARGUMENTS
from llmb.runs.analyzed_run import AnalyzedRun, RunSet, grouped
from llmb.runs.conditions import Value, differences
from llmb.verdict.group_difference import RunSpread, run_spread
from llmb.verdict.judgement import Tolerance

DATA = Path(__file__).with_name("compare_modes.yaml")


class Mode(Record):
    """A name, for ``--vary``, of keys of a configuration that may differ together."""

    name: str
    title: str
    keys: tuple[str, ...]
    order: tuple[str, ...] = ()
    tolerance_pct: float | None = None
    """None if the default tolerance applies."""
    tolerance_source: str = ""


class ModesFile(Record):
    """The content of ``compare_modes.yaml``; ``work_per_token`` has patterns of the keys that change a token's work."""

    work_per_token: tuple[str, ...]
    modes: tuple[Mode, ...]


@cache
def modes_file() -> ModesFile:
    return read_file(DATA, ModesFile)


@dataclass(frozen=True, slots=True)
class Varied:
    """The keys of a configuration that may differ between the two sides of a comparison."""

    patterns: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    first: str | None = None
    """The key that ``order`` applies to."""
    tolerance: Tolerance | None = None
    """None if the default tolerance applies."""

    def __contains__(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.patterns)

    def place(self, configuration: dict[str, Value]) -> tuple[object, ...]:
        """Return a key to sort groups by; the first group is compared with each of the others."""
        keys = sorted((key for key in configuration if key in self), key=lambda key: (key != self.first, key))
        return tuple(_place(configuration[key], self.order) for key in keys)


def varied(names: Iterable[str], known_keys: Iterable[str]) -> Varied:
    """Return the keys that may differ. ``names`` are keys, or modes with several keys; raise UsageError for others."""
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


ARROW = " -> "
MODEL = ("workload", "size")
MODEL_NAME = "model name"
"""The key of the model's name."""
NAMED = ("workload", "size", "dtype")
TITLE_KEYS = ("program", "layout.tp", "layout.pp", "layout.mbs", "layout.gbs", "layout.seq_len", "layout.layers")
"""Keys to try first to distinguish rows with equal titles."""
NAMES = ("experiment", ARGUMENTS)
"""Keys of runs with an unknown recipe. They may differ: both sides are assumed to have the same recipe."""
IDENTIFYING = ("workload", "size", "dtype", "layout.gpus")
"""Keys that a run without a record must have to be matched with recorded runs of the same recipe."""
Configuration = dict[str, Value]


@dataclass(frozen=True, slots=True)
class MatchedRuns:
    configuration: Configuration
    runs: tuple[AnalyzedRun, ...]

    @property
    def is_recorded(self) -> bool:
        return self.runs[0].record is not None


@dataclass(frozen=True, slots=True)
class Pair:
    before: MatchedRuns
    after: MatchedRuns


@dataclass(frozen=True, slots=True)
class Matches:
    """Pairs of groups to compare, and the groups without a counterpart."""

    pairs: tuple[Pair, ...]
    only_before: tuple[MatchedRuns, ...]
    only_after: tuple[MatchedRuns, ...]


def groups_of(runs: Iterable[AnalyzedRun]) -> list[MatchedRuns]:
    """Return groups of repeats: runs with the same configuration."""
    return [MatchedRuns(group[0].identity.configuration, tuple(group)) for group in grouped(runs)]


def match_sides(before: Sequence[MatchedRuns], after: Sequence[MatchedRuns], varied: Varied) -> Matches:
    """Pair groups of ``before`` and ``after`` that are equal except for keys that may vary."""
    pairs = [
        Pair(one, other)
        for one in before
        for other in after
        if same_but(one.configuration, other.configuration, varied)
    ]
    if not pairs or any(not group.is_recorded for group in (*before, *after)):
        pairs += _by_what_logs_tell(before, after, varied, pairs)
    return Matches(
        tuple(pairs),
        tuple(group for group in before if not any(pair.before is group for pair in pairs)),
        tuple(group for group in after if not any(pair.after is group for pair in pairs)),
    )


def match_within(groups: Sequence[MatchedRuns], varied: Varied) -> Matches:
    """Pair groups that differ only in keys that may vary: the first group in order with each other group."""
    families: dict[tuple[tuple[str, Value], ...], list[MatchedRuns]] = defaultdict(list)
    for group in groups:
        families[tuple(sorted(_fixed(group.configuration, varied).items()))].append(group)
    pairs, alone = [], []
    for family in families.values():
        first, *others = sorted(family, key=lambda group: varied.place(group.configuration))
        pairs += [Pair(first, other) for other in others]
        alone += [] if others else [first]
    return Matches(tuple(pairs), tuple(alone), ())


def same_but(one: Mapping[str, Value], other: Mapping[str, Value], varied: Varied) -> bool:
    """Return whether two configurations differ only in keys that may vary."""
    return _fixed(one, varied) == _fixed(other, varied)


def _fixed(configuration: Mapping[str, Value], varied: Varied) -> Configuration:
    return {key: value for key, value in configuration.items() if key not in varied}


def _by_what_logs_tell(
    before: Sequence[MatchedRuns], after: Sequence[MatchedRuns], varied: Varied, known: Sequence[Pair]
) -> list[Pair]:
    found = []
    for one in before:
        fitting = [other for other in after if _agrees(one, other, varied)]
        if len(fitting) == 1 and not any(one is pair.before or fitting[0] is pair.after for pair in known):
            found.append(Pair(one, fitting[0]))
    return [pair for pair in found if sum(pair.after is other.after for other in found) == 1]


def _agrees(one: MatchedRuns, other: MatchedRuns, varied: Varied) -> bool:
    if one.is_recorded and other.is_recorded:
        return False
    named = replace(varied, patterns=(*varied.patterns, *NAMES))
    if any(key in one.configuration for key in NAMES) and same_but(one.configuration, other.configuration, named):
        return True
    values, others = _fixed(one.configuration, varied), _fixed(other.configuration, varied)
    shared = values.keys() & others.keys()
    needed = {key for key in IDENTIFYING if key not in varied}
    return needed <= shared and all(values[key] == others[key] for key in shared)


def sources(found: RunSet) -> set[str]:
    return {run.counted_as for run in found.runs}


def nearest(group: MatchedRuns, others: Sequence[MatchedRuns]) -> MatchedRuns | None:
    """Return the group of the same model that differs in the fewest keys; None if no group has this model."""
    own = group.configuration
    similar = [other for other in others if all(own.get(key) == other.configuration.get(key) for key in MODEL)]
    return min(similar, key=lambda other: len(differences(own, other.configuration)), default=None)


def titles(pairs: Sequence[Pair]) -> list[str]:
    """Return a title for each pair. Equal titles are extended by keys that differ."""
    merged = [_merged(pair) for pair in pairs]
    names = [_title(values) for values in merged]
    return [
        name + _distinction(values, [other for other, same in zip(merged, names, strict=True) if same == name])
        for values, name in zip(merged, names, strict=True)
    ]


def group_title(group: MatchedRuns) -> str:
    return _title(_texts(group))


def _title(values: Mapping[str, str]) -> str:
    if not all(key in values for key in NAMED):
        told = (f"{key} {value}" for key, value in values.items() if key != ARGUMENTS)
        return values.get("experiment") or ", ".join(told) or "unknown"
    title = f"{values.get(MODEL_NAME) or ' '.join(values[key] for key in MODEL)} {values['dtype']}"
    if "layout.gpus" in values:
        title += f" on {values['layout.gpus']} x {values.get('gpu_type', 'GPU')}"
    program = values.get("program", "")
    return f"{title}, {program}" if ARROW in program else title


def _distinction(values: Mapping[str, str], same: Sequence[Mapping[str, str]]) -> str:
    chosen: list[str] = []
    differing = [key for key in dict.fromkeys((*TITLE_KEYS, *values)) if len({other.get(key) for other in same}) > 1]
    for key in differing:
        if len({tuple(other.get(known) for known in chosen) for other in same}) < len(same):
            chosen.append(key)
    return "".join(f", {key.rpartition('.')[2]} {values.get(key, 'unknown')}" for key in chosen)


def _merged(pair: Pair) -> dict[str, str]:
    before, after = _texts(pair.before), _texts(pair.after)
    return {
        key: value if (other := after.get(key, "unknown")) == value else f"{value}{ARROW}{other}"
        for key, value in before.items()
    }


def _texts(group: MatchedRuns) -> dict[str, str]:
    recipe = group.runs[0].recipe
    name = {MODEL_NAME: recipe.model_name} if recipe else {}
    return {**name, **{key: str(value) for key, value in group.configuration.items()}}


Earlier = Callable[[AnalyzedRun], Sequence[AnalyzedRun]]
"""A function that returns a run and its repeats on the same nodes, made shortly before and after it."""


def no_earlier(_run: AnalyzedRun) -> Sequence[AnalyzedRun]:
    return ()


def earlier_spread(before: Sequence[AnalyzedRun], after: Sequence[AnalyzedRun], earlier: Earlier) -> RunSpread | None:
    """Return the larger spread of the sides' other repeats; None unless each side is one run on the same nodes."""
    if len(before) != 1 or len(after) != 1 or not before[0].nodes or {*before[0].nodes} != {*after[0].nodes}:
        return None
    compared = {run.counted_as for run in (*before, *after)}
    others = ([run for run in earlier(one) if run.counted_as not in compared] for one in (before[0], after[0]))
    known = [run_spread([run.step_time_s.mean for run in found if run.step_time_s]) for found in others]
    return max((one for one in known if one), key=lambda one: one.spread, default=None)
