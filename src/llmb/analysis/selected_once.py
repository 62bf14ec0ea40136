# SPDX-License-Identifier: Apache-2.0
"""Selected runs count once, wherever they and their logs were copied to."""

from collections.abc import Sequence
from dataclasses import replace

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut
from llmb.analysis.copies import Place, changed_copies, further_copies
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.folder import RunFolder


def once_in(*found: FoundRuns) -> tuple[FoundRuns, ...]:
    """Each selection with every run once, and without runs of which it is not known which copy is right.

    Logs are read where a run folder may be theirs.
    """
    every = _with_owners([run for one in found for run in one.runs])
    why_changed = changed_copies(map(_place, every))
    parts = iter(every)
    return tuple(_once(replace(one, runs=tuple(next(parts) for _ in one.runs)), why_changed) for one in found)


def _once(found: FoundRuns, why_changed: dict[str, str]) -> FoundRuns:
    named = {place.path: place for place in map(_place, found.runs)}
    changed = {path: why_changed[place.source] for path, place in named.items() if place.source in why_changed}
    copied = further_copies(place for path, place in named.items() if path not in changed)
    kept = {run.path: run for run in found.runs if run.path not in changed and run.path not in copied}
    dropped = (LeftOut(str(path), reason) for path, reason in (changed | copied).items())
    return FoundRuns(found.title, tuple(kept.values()), (*found.left_out, *dropped))


def _place(run: AnalyzedRun) -> Place:
    return Place(run.path, run.counted_as, run.content, run.record is None)


def _with_owners(runs: Sequence[AnalyzedRun]) -> list[AnalyzedRun]:
    """Logs that are those of run folders are known as their runs."""
    folders = [run for run in runs if run.record]
    if not folders or len(folders) == len(runs):
        return list(runs)
    owners = {digest: run.counted_as for run in folders if (digest := _log_digest(RunFolder(run.path)))}
    return [run if run.record else replace(run, source=owners.get(run.counted_as, run.source)) for run in runs]


def _log_digest(folder: RunFolder) -> str | None:
    from llmb.logs.files import parse_file  # takes longer to load than most selections take, which have no logs

    return parse_file(folder.log, DEFAULT_RULE).outcome.digest
