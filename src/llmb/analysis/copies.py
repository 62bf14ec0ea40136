# SPDX-License-Identifier: Apache-2.0
"""Copies of one run count once: folders that were copied, moved or unpacked again, and logs beside or without them.

A run is known by the id that its record got when it began, a log without a record by its steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut
from llmb.analysis.parsed_run import ParsedRun
from llmb.logs.files import parse_file
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.folder import RunFolder

CHANGED = "copies of one run have different steps, one was cut or edited: "
DECIDE = "; remove those that are wrong"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run was found. ``source`` is equal for copies, ``content`` only if none of them was changed."""

    path: Path
    source: str
    content: str | None
    is_log: bool


def once_in(*found: FoundRuns) -> tuple[FoundRuns, ...]:
    """Each selection with every run once, and without runs of which it is not known which copy is right.

    Logs are read where a run folder may be theirs.
    """
    every = _with_owners([run for one in found for run in one.runs])
    why_changed = _changed(map(_place, every))
    parts = iter(every)
    return tuple(_once(replace(one, runs=tuple(next(parts) for _ in one.runs)), why_changed) for one in found)


def with_copies(runs: Sequence[ParsedRun]) -> list[ParsedRun]:
    """Parsed runs, those of which another one is a copy marked, and those invalid of which copies contradict it."""
    owners = {run.outcome.digest: run.run_id for run in runs if run.run_id and run.outcome.digest}
    places = [
        _Place(run.file.path.absolute(), _source_of(run, owners), run.content or run.outcome.digest, not run.run_id)
        for run in runs
    ]
    why_changed = _changed(places)
    why_copied = _copied(places)
    return [
        _marked(run, why_changed.get(place.source), why_copied.get(place.path))
        for run, place in zip(runs, places, strict=True)
    ]


def _source_of(run: ParsedRun, owners: dict[str, str]) -> str:
    digest = run.outcome.digest or ""
    return run.run_id or owners.get(digest) or digest or str(run.file.path.absolute())


def _marked(run: ParsedRun, why_changed: str | None, why_copied: str | None) -> ParsedRun:
    if why_changed:
        return run.spoiled(why_changed)
    return replace(run, copy_of=why_copied) if why_copied else run


def _once(found: FoundRuns, why_changed: dict[str, str]) -> FoundRuns:
    named = {place.path: place for place in map(_place, found.runs)}
    changed = {path: why_changed[place.source] for path, place in named.items() if place.source in why_changed}
    copied = _copied(place for path, place in named.items() if path not in changed)
    kept = {run.path: run for run in found.runs if run.path not in changed and run.path not in copied}
    dropped = (LeftOut(str(path), reason) for path, reason in (changed | copied).items())
    return FoundRuns(found.title, tuple(kept.values()), (*found.left_out, *dropped))


def _place(run: AnalyzedRun) -> _Place:
    return _Place(run.path, run.counted_as, run.content, run.record is None)


def _by_source(places: Iterable[_Place]) -> list[list[_Place]]:
    """Runs that were found in several places, with the folders of a run first."""
    found: dict[str, dict[Path, _Place]] = defaultdict(dict)
    for place in places:
        found[place.source][place.path] = place
    return [
        sorted(same.values(), key=lambda place: (place.is_log, place.path)) for same in found.values() if len(same) > 1
    ]


def _changed(places: Iterable[_Place]) -> dict[str, str]:
    """By source, why none of the copies of a run can be chosen. A log beside a folder is less than what that has."""
    found = {}
    for copies in _by_source(places):
        alike = [place for place in copies if place.is_log == copies[0].is_log]
        if len({place.content for place in alike}) > 1:
            found[copies[0].source] = CHANGED + ", ".join(str(place.path) for place in alike) + DECIDE
    return found


def _copied(places: Iterable[_Place]) -> dict[Path, str]:
    return {
        place.path: f"{len(copies)} copies of one run, counted once: {copies[0].path}"
        for copies in _by_source(places)
        for place in copies[1:]
    }


def _with_owners(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    """Logs that are those of run folders are known as their runs."""
    folders = [run for run in runs if run.record]
    if not folders or len(folders) == len(runs):
        return list(runs)
    owners = {digest: run.counted_as for run in folders if (digest := _log_digest(RunFolder(run.path)))}
    return [run if run.record else replace(run, source=owners.get(run.counted_as, run.source)) for run in runs]


def _log_digest(folder: RunFolder) -> str | None:
    return parse_file(folder.log, DEFAULT_RULE).outcome.digest
