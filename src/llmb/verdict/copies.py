# SPDX-License-Identifier: Apache-2.0
"""Counts a run once if there are copies, identified by id and step times; if copies differ, none counts."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.catalogue.window import DEFAULT_RULE
from llmb.readers.logs.log_files import parse_file
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun, RunSet
from llmb.runs.folder import RunFolder
from llmb.runs.result import CHANGED_COPY

CHANGED = "copies of one run have different steps, so one was truncated or edited: "
DECIDE = "; remove those that are wrong"
OTHER_ID = ", under different ids"
SAME_TIMES = 5
"""Two runs with exactly equal times at this many steps are copies of one run."""
RECIPE = ("workload", "size", "dtype", "gpu_type", "layout.gpus", "experiment")
"""Keys of a configuration that are equal in all runs of a recipe."""


@dataclass(frozen=True, slots=True)
class Place:
    """The path of one copy of a run. ``source`` is equal for all copies, ``content`` for all unchanged copies."""

    path: Path
    source: str
    content: str | None
    is_log: bool
    id: str


def digest_of(*facts: object) -> str:
    """Return a digest of the text of ``facts``."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def once_in(*found: RunSet) -> tuple[RunSet, ...]:
    """Return each selection with every run once; if copies differ, one is invalid and its recipe's runs get a fault."""
    every = _known_as_one([run for one in found for run in one.runs])
    why_changed = _changed_copies(map(_place, every))
    doubtful: dict[tuple[object, ...], str] = {}
    for run in every:
        if run.counted_as in why_changed:
            doubtful.setdefault(_recipe(run), why_changed[run.counted_as])
    parts = iter(every)
    return tuple(_once(replace(one, runs=tuple(next(parts) for _ in one.runs)), why_changed, doubtful) for one in found)


def _recipe(run: AnalyzedRun) -> tuple[object, ...]:
    return tuple(run.configuration.get(key) for key in RECIPE)


def _once(found: RunSet, why_changed: dict[str, str], doubtful: dict[tuple[object, ...], str]) -> RunSet:
    copied = _further_copies(map(_place, found.runs))
    kept = {run.path: _in_doubt(run, why_changed, doubtful) for run in found.runs if run.path not in copied}
    sources = {run.path: run.counted_as for run in found.runs}
    dropped = (ExcludedRun(str(path), why_changed.get(sources[path], why)) for path, why in copied.items())
    return RunSet(found.title, tuple(kept.values()), (*found.left_out, *dropped))


def _in_doubt(run: AnalyzedRun, why_changed: dict[str, str], doubtful: dict[tuple[object, ...], str]) -> AnalyzedRun:
    known = replace(run, faults={**run.faults, CHANGED_COPY: (why,)}) if (why := doubtful.get(_recipe(run))) else run
    return known.invalid(why) if (why := why_changed.get(run.counted_as)) else known


def with_copies(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    """Return the parsed runs, with further copies marked as such, and with runs invalid if their copies differ."""
    places = [replace(_place(run), path=run.log_path.absolute()) for run in _known_as_one(runs)]
    why_changed = _changed_copies(places)
    why_copied = _further_copies(places)
    return [
        _marked(run, why_changed.get(place.source), why_copied.get(place.path))
        for run, place in zip(runs, places, strict=True)
    ]


def _marked(run: AnalyzedRun, why_changed: str | None, why_copied: str | None) -> AnalyzedRun:
    if why_changed:
        return run.invalid(why_changed)
    return replace(run, copy_of=why_copied) if why_copied else run


def _place(run: AnalyzedRun) -> Place:
    return Place(run.path, run.counted_as, run.content, run.record is None, run.id)


def _known_as_one(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    every = _with_owners(runs)
    originals = _originals(every)
    return [replace(run, source=originals[run.counted_as]) if run.counted_as in originals else run for run in every]


def _originals(runs: Iterable[AnalyzedRun]) -> dict[str, str]:
    holders: dict[tuple[int, float], str] = {}
    found: dict[str, str] = {}
    for run in runs:
        own = found.get(run.counted_as, run.counted_as)
        shared: dict[str, set[float]] = defaultdict(set)
        for at in enumerate(run.first_times_s):
            shared[holders.setdefault(at, own)].add(at[1])
        shared.pop(own, None)
        other = max(shared, key=lambda source: len(shared[source]), default=own)
        if len(shared[other]) >= SAME_TIMES:
            found[run.counted_as] = other
    return found


def _with_owners(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    folders = [run for run in runs if run.record]
    if not folders or len(folders) == len(runs):
        return list(runs)
    owners = {digest: run.counted_as for run in folders if (digest := _log_digest(run))}
    return [run if run.record else replace(run, source=owners.get(run.counted_as, run.source)) for run in runs]


def _log_digest(run: AnalyzedRun) -> str | None:
    if run.log:
        return run.outcome.digest
    return parse_file(RunFolder(run.path).log, DEFAULT_RULE).outcome.digest


def _by_source(places: Iterable[Place]) -> list[list[Place]]:
    found: dict[str, dict[Path, Place]] = defaultdict(dict)
    for place in places:
        found[place.source][place.path] = place
    return [
        sorted(same.values(), key=lambda place: (place.is_log, place.path)) for same in found.values() if len(same) > 1
    ]


def _changed_copies(places: Iterable[Place]) -> dict[str, str]:
    found = {}
    for copies in _by_source(places):
        alike = [place for place in copies if place.is_log == copies[0].is_log]
        if len({place.content for place in alike}) > 1:
            found[copies[0].source] = CHANGED + ", ".join(str(place.path) for place in alike) + DECIDE
    return found


def _further_copies(places: Iterable[Place]) -> dict[Path, str]:
    return {
        place.path: f"{len(copies)} copies of one run{_ids_text(copies)}, counted once: {copies[0].path}"
        for copies in _by_source(places)
        for place in copies[1:]
    }


def _ids_text(copies: Sequence[Place]) -> str:
    return OTHER_ID if len({place.id for place in copies if not place.is_log}) > 1 else ""
