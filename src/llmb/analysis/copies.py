# SPDX-License-Identifier: Apache-2.0
"""Copies of one run count once: folders that were copied, moved or unpacked again, and logs beside or without them.

A run is known by the id that its record got when it began, a log without a record by its steps.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # where records are known, what reads logs is not needed
    from llmb.analysis.parsed_run import ParsedRun

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


def with_copies(runs: Sequence["ParsedRun"]) -> list["ParsedRun"]:
    """Parsed runs, those of which another one is a copy marked, and those invalid of which copies contradict it."""
    owners = {run.outcome.digest: run.run_id for run in runs if run.run_id and run.outcome.digest}
    places = [
        Place(run.file.path.absolute(), _source_of(run, owners), run.content or run.outcome.digest, not run.run_id)
        for run in runs
    ]
    why_changed = changed_copies(places)
    why_copied = further_copies(places)
    return [
        _marked(run, why_changed.get(place.source), why_copied.get(place.path))
        for run, place in zip(runs, places, strict=True)
    ]


def _source_of(run: "ParsedRun", owners: dict[str, str]) -> str:
    digest = run.outcome.digest or ""
    return run.run_id or owners.get(digest) or digest or str(run.file.path.absolute())


def _marked(run: "ParsedRun", why_changed: str | None, why_copied: str | None) -> "ParsedRun":
    if why_changed:
        return run.spoiled(why_changed)
    return replace(run, copy_of=why_copied) if why_copied else run


def _by_source(places: Iterable[Place]) -> list[list[Place]]:
    """Runs that were found in several places, with the folders of a run first."""
    found: dict[str, dict[Path, Place]] = defaultdict(dict)
    for place in places:
        found[place.source][place.path] = place
    return [
        sorted(same.values(), key=lambda place: (place.is_log, place.path)) for same in found.values() if len(same) > 1
    ]


def changed_copies(places: Iterable[Place]) -> dict[str, str]:
    """By source, why none of the copies of a run can be chosen. A log beside a folder is less than what that has."""
    found = {}
    for copies in _by_source(places):
        alike = [place for place in copies if place.is_log == copies[0].is_log]
        if len({place.content for place in alike}) > 1:
            found[copies[0].source] = CHANGED + ", ".join(str(place.path) for place in alike) + DECIDE
    return found


def further_copies(places: Iterable[Place]) -> dict[Path, str]:
    """By path, why a place of a run does not count: the first one does."""
    return {
        place.path: f"{len(copies)} copies of one run, counted once: {copies[0].path}"
        for copies in _by_source(places)
        for place in copies[1:]
    }
