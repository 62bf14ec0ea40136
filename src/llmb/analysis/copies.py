# SPDX-License-Identifier: Apache-2.0
"""Copies of one run count once: folders that were copied, moved or unpacked again, and logs beside or without them.

A run is known by the id that its record got when it began, a log without a record by its steps.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.folder import RunFolder

CHANGED = "copies of one run have different steps, one was cut or edited: "
DECIDE = "; remove those that are wrong"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was found. ``source`` is equal for copies, ``content`` only if none of them was changed."""

    path: Path
    source: str
    content: str | None
    is_log: bool


def digest_of(*facts: object) -> str:
    """Digest of values whose text tells them apart."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def once_in(*found: FoundRuns) -> tuple[FoundRuns, ...]:
    """Each selection with every run once, and without runs of which it is not known which copy is right.

    Logs are read where a run folder may be theirs.
    """
    every = _with_owners([run for one in found for run in one.runs])
    why_changed = _changed_copies(map(_place, every))
    parts = iter(every)
    return tuple(_once(replace(one, runs=tuple(next(parts) for _ in one.runs)), why_changed) for one in found)


def _once(found: FoundRuns, why_changed: dict[str, str]) -> FoundRuns:
    named = {place.path: place for place in map(_place, found.runs)}
    changed = {path: why_changed[place.source] for path, place in named.items() if place.source in why_changed}
    copied = _further_copies(place for path, place in named.items() if path not in changed)
    kept = {run.path: run for run in found.runs if run.path not in changed and run.path not in copied}
    dropped = (LeftOut(str(path), reason) for path, reason in (changed | copied).items())
    return FoundRuns(found.title, tuple(kept.values()), (*found.left_out, *dropped))


def with_copies(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    """Parsed runs, those of which another one is a copy marked, and those invalid of which copies contradict it."""
    places = [replace(_place(run), path=run.log_path.absolute()) for run in _with_owners(runs)]
    why_changed = _changed_copies(places)
    why_copied = _further_copies(places)
    return [
        _marked(run, why_changed.get(place.source), why_copied.get(place.path))
        for run, place in zip(runs, places, strict=True)
    ]


def _marked(run: AnalyzedRun, why_changed: str | None, why_copied: str | None) -> AnalyzedRun:
    if why_changed:
        return run.spoiled(why_changed)
    return replace(run, copy_of=why_copied) if why_copied else run


def _place(run: AnalyzedRun) -> Place:
    return Place(run.path, run.counted_as, run.content, run.record is None)


def _with_owners(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    """Logs that are those of run folders are known as their runs."""
    folders = [run for run in runs if run.record]
    if not folders or len(folders) == len(runs):
        return list(runs)
    owners = {digest: run.counted_as for run in folders if (digest := _log_digest(run))}
    return [run if run.record else replace(run, source=owners.get(run.counted_as, run.source)) for run in runs]


def _log_digest(run: AnalyzedRun) -> str | None:
    if run.log:
        return run.outcome.digest
    from llmb.logs.files import parse_file  # takes longer to load than most selections take, which have no logs

    return parse_file(RunFolder(run.path).log, DEFAULT_RULE).outcome.digest


def _by_source(places: Iterable[Place]) -> list[list[Place]]:
    """Runs that were found in several places, with the folders of a run first."""
    found: dict[str, dict[Path, Place]] = defaultdict(dict)
    for place in places:
        found[place.source][place.path] = place
    return [
        sorted(same.values(), key=lambda place: (place.is_log, place.path)) for same in found.values() if len(same) > 1
    ]


def _changed_copies(places: Iterable[Place]) -> dict[str, str]:
    """By source, why none of the copies of a run can be chosen. A log beside a folder is less than what that has."""
    found = {}
    for copies in _by_source(places):
        alike = [place for place in copies if place.is_log == copies[0].is_log]
        if len({place.content for place in alike}) > 1:
            found[copies[0].source] = CHANGED + ", ".join(str(place.path) for place in alike) + DECIDE
    return found


def _further_copies(places: Iterable[Place]) -> dict[Path, str]:
    """By path, why a place of a run does not count: the first one does."""
    return {
        place.path: f"{len(copies)} copies of one run, counted once: {copies[0].path}"
        for copies in _by_source(places)
        for place in copies[1:]
    }
