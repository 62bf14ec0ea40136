# SPDX-License-Identifier: Apache-2.0
"""Finds the runs that a word, a path or a date selects."""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, lru_cache
from glob import escape
from itertools import islice
from pathlib import Path

from llmb.base.errors import UsageError, closest
from llmb.base.input_files import MOST_JSON_BYTES, check_reachable, parse_path, read_regular
from llmb.base.trust import WORKLOADS
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.archive import ENDINGS
from llmb.jobs.conclude_ended import conclude_ended
from llmb.jobs.find_jobs import LATEST, find_runs_by_name
from llmb.jobs.history import RUN_RECORD, read_history, run_folders_below
from llmb.jobs.imported import unpacked
from llmb.jobs.read_run import (
    RecordedRun,
    in_other_window,
    logged_run,
    logged_runs,
    read_folder,
    recorded_run,
    runs_of_engines,
)
from llmb.readers.logs.log_files import parse_file
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun, RunSet, needs_catalogue, without_unmeasured
from llmb.runs.conditions import identity_of
from llmb.runs.experiment import experiment_name
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.record import RunRecord, short_id
from llmb.verdict.catalogue_figures import if_possible
from llmb.verdict.copies import once_in
from llmb.verdict.match_runs import Earlier

NEAR = 5
MOST_NEAR = 10
"""The maximum number of earlier repeats, and of the run with its later repeats, that are compared."""
MOST_RECORDS = 256
"""The maximum number of records to keep in memory while repeats of several runs are found."""
MANY = 500
"""If there are at least this many records, a message announces that they are read, which takes time."""
SELECTORS = (
    "a folder of runs or logs, a run folder, a log, an archive, the JSON document of a comparison of engines",
    "a label, a campaign, the id of a job or a run, 'latest'",
    "a date or a range of dates (2026-11-20, 2026-11-01..2026-11-07)",
)
"""The valid selectors of runs, for messages and help texts."""
_PLAIN = re.compile(r"[\w.:@+ -]*", re.ASCII)
_RUN_ID = re.compile(rb'"run_id": ?"([0-9a-f]*)"')
_DATE = re.compile(r"(\d{4}-\d{2}-\d{2})(\.\.(\d{4}-\d{2}-\d{2}))?")
Say = Callable[[str], None]
_Alike = tuple[str, frozenset[str]]
"""Key of the identity, and nodes; equal for repeats on the same nodes."""


def find_runs(selector: str, install: Path, say: Say) -> RunSet:
    """Find the selected runs that measure the speed of steps, in order of start; list other runs with reasons.

    ``say`` receives messages for the user. Raise LlmbError if the selector is unknown, ambiguous or cannot be read.
    """
    return without_unmeasured(find_ended_runs(selector, install, say))


def run_folders(text: str, install: Path, say: Say) -> list[RunFolder]:
    """Find run folders by an id, a label or a campaign, by ``latest`` for the newest successful run, or by the path of
    a run folder, of a folder with only one run, or of an archive. Any other existing folder is returned unchecked.
    Conclude runs that ended without a result. Raise LlmbError if there is no such run, or ``text`` is ambiguous.
    """
    path = parse_path(text).absolute()
    check_reachable(path)
    if path.is_file() and path.name.endswith(ENDINGS):
        return list(_run_folders(unpacked(path)))
    if path.is_dir() and text != LATEST:
        path = path.resolve()  # a link such as the install root's 'latest' does not have a run's name
        below = sorted(record.parent for record in path.glob(f"*/{RUN_RECORD}") if record.parent.name[0] != ".")
        folder = RunFolder(below[0] if not (path / RUN_RECORD).exists() and len(below) == 1 else path)
        conclude_ended([folder], say)
        return [folder]
    if "/" in text:
        do = "pass a folder that contains run.json, a run id, a label or a campaign; 'llmb runs' lists all runs"
        raise UsageError(f"there is no folder '{text}'", where=str(path), do=do)
    if text == LATEST:
        return [_latest(install, say).folder]
    with read_history(install, say) as store:
        folders = [job.folder for job in find_runs_by_name(store, text)]
    conclude_ended(folders, say)
    return folders


def _latest(install: Path, say: Say) -> RecordedRun:
    """Return the newest successful run of this root; report newer runs, and ignore imported runs.

    No older record is read.
    """
    newer, folders = [], sorted(map(RunFolder, run_folders_below(install)), key=_made_at, reverse=True)
    for folder in folders:
        if folder.imported.exists():
            continue
        try:
            (run,) = _concluded([read_folder(folder)], say)
        except (OSError, BrokenRecord) as error:
            newer.append(f"{folder.path}: its record {_unreadable(error)}")
            continue
        if run.record.status == "success":
            if newer:
                say(f"latest is {run.id}, the newest run that ended successfully; newer ones: {'; '.join(newer)}")
            return run
        newer.append(f"{run.id} is {run.record.status}")
    if newer:
        what, do = "no run has ended successfully yet", f"pass a run's id; the newest are: {'; '.join(newer[:NEAR])}"
        raise UsageError(what, where=str(install), do=do)
    if folders:
        do = "pass the id of a run; see 'llmb runs'"
        raise UsageError("'latest' ignores imported runs, and all runs here are imported", where=str(install), do=do)
    raise UsageError("there are no runs yet", where=str(install), do="start one with 'llmb run' or 'llmb submit'")


def _made_at(folder: RunFolder) -> tuple[int, str]:
    name = folder.path.parent.name
    seconds = re.search(r"_(\d+)[.\d-]*$", name)
    return int(seconds[1]) if seconds else 0, name


def earlier_runs(install: Path, say: Say) -> Earlier:
    """Return a function that finds a run and its repeats on the same nodes just before and after it."""

    @cache
    def made(experiments: frozenset[str]) -> Sequence[RunFolder]:
        patterns = (f"{WORKLOADS}/*/experiments/{escape(name)}/[!.]*/[!.]*/{RUN_RECORD}" for name in experiments)
        return sorted((RunFolder(path.parent) for one in patterns for path in install.glob(one)), key=_made_at)

    @lru_cache(MOST_RECORDS)
    def read(folder: RunFolder) -> tuple[_Alike, RecordedRun] | None:
        try:
            run = read_folder(folder)
        except (OSError, BrokenRecord) as error:
            say(f"left out: {folder.path}: its record {_unreadable(error)}")
            return None
        return _alike(run.record), run

    @lru_cache(MOST_RECORDS)
    def analyzed(folder: RunFolder) -> RunSet:
        record = read(folder)
        return _analyzed("earlier runs", [record[1]] if record else ())

    def near(some: Iterable[RunFolder], alike: _Alike) -> Iterator[RunSet]:
        same = (folder for folder in some if (record := read(folder)) and record[0] == alike)
        return islice((runs for folder in same if (runs := analyzed(folder)).runs), MOST_NEAR)

    def find(run: AnalyzedRun) -> Sequence[AnalyzedRun]:
        if run.record is None:
            return ()
        record, alike = run.record, _alike(run.record)
        name = experiment_name(record.plan, record.program, record.arguments)
        folders = made(frozenset((name, run.path.parents[1].name)))
        place = bisect_left(folders, _made_at(RunFolder(run.path)), key=_made_at)
        near_runs = (*near(reversed(folders[:place]), alike), *near(folders[place:], alike))
        runs = tuple(sorted((one for each in near_runs for one in each.runs), key=_order))
        return without_unmeasured(*once_in(RunSet("earlier runs", runs))).runs

    return find


def _alike(record: RunRecord) -> _Alike:
    return identity_of(record).key, frozenset(record.environment.nodes if record.environment else ())


def find_ended_runs(selector: str, install: Path, say: Say) -> RunSet:
    """Find the selected runs that have ended, with any result and without duplicates; list other runs with reasons."""
    return find_all_runs((selector,), install, say)


def find_all_runs(selectors: Sequence[str] | None, install: Path, say: Say) -> RunSet:
    """Find the ended runs of all selectors, without duplicates; by default, all ended runs of the root."""
    sets = [_find(selector, install, say) for selector in selectors or ()]
    if not sets:
        sets = [_found_in("All runs", _folders_below(install, say), say)]
    runs = tuple(run for one in sets for run in one.runs)
    left_out = tuple(item for one in sets for item in one.left_out)
    return once_in(RunSet(", ".join(one.title for one in sets), runs, left_out))[0]


def find_sides(before: str, after: str | None, install: Path, say: Say) -> tuple[RunSet, RunSet | None]:
    """Find the runs of one or two selectors; a run may be on both sides, but only once on each."""
    first, *others = once_in(*(_find(selector, install, say) for selector in (before, after) if selector is not None))
    return first, others[0] if others else None


def in_window(runs: Iterable[AnalyzedRun], rule: str | None) -> tuple[AnalyzedRun, ...]:
    """Return the runs, measured in the window ``rule``, if any. Invalid runs, and runs that ``in_other_window`` leaves
    unchanged, remain as they are. Raise UsageError for a comparison of engines, BrokenRecord or OSError if steps cannot
    be read."""
    return tuple(runs) if rule is None else tuple(_in_window(run, rule) for run in runs)


def _in_window(run: AnalyzedRun, rule: str) -> AnalyzedRun:
    if run.status == "invalid":
        return run
    if run.record:
        return in_other_window(run, rule)
    if not run.path.is_file():
        what = f"the steps of {run.id} are not numbered, because it is part of a comparison of engines"
        raise UsageError(what, do="omit --window")
    (logged,) = _possible([logged_run(parse_file(run.path, rule))])
    return replace(logged, faults={**run.faults, **logged.faults})


def _find(selector: str, install: Path, say: Say) -> RunSet:
    text = selector.strip()
    if not text:  # such as an unset variable of a script; as a path it would be the current folder
        raise UsageError("no runs are selected: the name is empty", choices=SELECTORS)
    path = parse_path(text)
    if "/" in text or text in (".", "..", "~"):
        return _at(text, path, say)
    if text == LATEST:
        return _analyzed(text, [_latest(install, say)])
    if match := _DATE.fullmatch(text):
        first, last = _days(match[1], match[3] or match[1])
        runs = _recorded_below(install, say)
        return _analyzed(text, _concluded([run for run in runs if first <= (run.started_s or 0.0) < last], say))
    words = {text, text.partition(":")[2] or text}
    meanings = _meanings(text, tuple(_recorded_below(install, say, words)))
    if os.path.lexists(path) and all(
        path.absolute() in run.folder.path.parents for matching in meanings.values() for run in matching
    ):
        return _at(text, path, say)
    if not meanings:
        raise _unknown(text, _recorded_below(install, say), install)
    return _only_meaning(text, meanings, path, say)


def _only_meaning(text: str, meanings: Mapping[str, Sequence[RecordedRun]], path: Path, say: Say) -> RunSet:
    different = {tuple(run.folder.path for run in runs) for runs in meanings.values()}
    if len(different) > 1 or os.path.lexists(path):
        choices = [f"{spelled} ({_runs_text(len(runs))})" for spelled, runs in meanings.items()]
        choices += [f"./{text} (a {'folder' if path.is_dir() else 'file'} here)"] if os.path.lexists(path) else []
        raise UsageError(f"'{text}' is ambiguous", choices=choices, do="pass one of these instead")
    return _analyzed(text, _concluded(next(iter(meanings.values())), say))


def _meanings(text: str, runs: Sequence[RecordedRun]) -> dict[str, Sequence[RecordedRun]]:
    """Return the runs that ``text`` may refer to, by an unambiguous selector for each meaning."""
    kind, colon, word = text.partition(":")
    is_spelled = bool(colon) and kind in ("label", "campaign", "id")
    name = word if is_spelled else text
    by_kind: dict[str, dict[str, Sequence[RecordedRun]]] = {
        "label": {f"label:{name}": [run for run in runs if run.label == name]},
        "campaign": {f"campaign:{name}": [run for run in runs if run.campaign == name]},
        "id": _with_id(name, runs),
    }
    kinds = [kind] if is_spelled else list(by_kind)
    return {spelled: matching for one in kinds for spelled, matching in by_kind[one].items() if matching}


def _with_id(name: str, runs: Sequence[RecordedRun]) -> dict[str, Sequence[RecordedRun]]:
    matching = [run for run in runs if name in (run.id, run.folder.path.parent.name)]
    jobs = [run for run in runs if name in run.job_ids]
    if len(jobs) == 1:
        return {**{str(run.folder.path): [run] for run in matching}, f"id:{name}": jobs}
    # A scheduler whose history was reset counts from 1 again.
    return {str(run.folder.path): [run] for run in (*matching, *jobs)}


def _unknown(text: str, runs: Iterable[RecordedRun], install: Path) -> UsageError:
    names = [name for run in runs for name in (run.label, run.campaign, run.id, *run.job_ids) if name]
    return UsageError(
        f"'{text}' is neither a file nor the label, campaign or id of a run below {install}",
        choices=list(dict.fromkeys(closest(text, [*names, LATEST], cutoff=0.6, most=NEAR))) or SELECTORS,
        do="run 'llmb runs' to list the runs with their ids and labels",
    )


def _days(first: str, last: str) -> tuple[float, float]:
    try:
        start, end = (datetime.fromisoformat(day).astimezone() for day in (first, last))
        after = (datetime.fromisoformat(last) + timedelta(days=1)).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        what = f"'{first}' is not a valid date" if first == last else f"'{first}..{last}' contains an invalid date"
        raise UsageError(what, do="pass a date such as 2026-11-01, or 2026-11-01..2026-11-07") from error
    if end < start:
        raise UsageError(f"'{first}..{last}' ends before it begins", do=f"pass {last}..{first}")
    return start.timestamp(), after


def _recorded_below(install: Path, say: Say, words: Collection[str] | None = None) -> Iterator[RecordedRun]:
    """Yield the recorded runs below a root; report unreadable records with ``say``.

    With ``words``, skip most records that contain none of them: parsing takes most of the time.
    """
    forms = None if words is None else _Forms(words)
    for folder in _folders_below(install, say):
        try:
            if forms is None or forms.may_be_of(folder):
                yield read_folder(folder)
        except (OSError, BrokenRecord) as error:
            say(f"left out: {folder.path}: its record {_unreadable(error)}")


class _Forms:
    """Searches the files of runs for words, as labels, campaigns, or ids of runs or jobs, without parsing the files."""

    def __init__(self, words: Collection[str]) -> None:
        self.words = frozenset(words)
        # Other characters may be escaped in the file or not.
        self.values = [f'"{word}"'.encode() for word in words if _PLAIN.fullmatch(word)]
        self.has_all = len(self.values) == len(self.words)

    def may_be_of(self, folder: RunFolder) -> bool:
        """Return True if the run may match, or if its record is truncated; raise OSError for an unreadable one."""
        text = read_regular(folder.record, MOST_JSON_BYTES)
        if not self.has_all or folder.path.parent.name in self.words or not text.rstrip().endswith(b"}"):
            return True
        if (match := _RUN_ID.search(text)) and short_id(match[1].decode()) in self.words:
            return True
        with suppress(OSError):  # without this file, only the campaign and the job are unknown
            text += read_regular(folder.job, MOST_JSON_BYTES)
        return any(value in text for value in self.values)


def _folders_below(install: Path, say: Say) -> list[RunFolder]:
    folders = sorted(run_folders_below(install))
    if len(folders) >= MANY:
        say(f"reading the records of {len(folders):,} runs below {install}")
    return [RunFolder(folder) for folder in folders]


def _at(text: str, path: Path, say: Say) -> RunSet:
    check_reachable(path)
    if path.is_file() and path.name.endswith(ENDINGS):
        return _found_in(text, _run_folders(unpacked(path.absolute())), say)
    if path.is_file() and path.suffix == ".json" and path.name != RUN_RECORD:
        return runs_of_engines(path, text)
    if not path.is_dir() and not path.is_file():
        raise UsageError(f"there is no regular file or folder '{text}'", choices=SELECTORS)
    root = path if path.is_dir() or not (path.parent / RUN_RECORD).is_file() else path.parent
    folders = list(_run_folders(root))
    recorded = _found_in(text, folders, say)
    if (root / RUN_RECORD).exists():
        return recorded
    logged = logged_runs(root, {folder.path for folder in folders})
    runs = sorted((*recorded.runs, *_possible(logged.runs)), key=_order)
    return RunSet(text, tuple(runs), (*recorded.left_out, *logged.left_out))


def _possible(logs: Sequence[AnalyzedRun]) -> Sequence[AnalyzedRun]:
    if not needs_catalogue(logs):
        return logs
    catalogue = Catalogue()
    return [if_possible(run, catalogue) for run in logs]


def _run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the run folders at or below ``root``, and folders that cannot be listed, because they may be run folders.

    Hidden folders, such as imports in progress, are skipped. Links are not followed, to avoid duplicates.
    """
    unread: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=unread.append):
        if RUN_RECORD in (*names, *folders):
            folders.clear()
            yield RunFolder(Path(folder).absolute())
        folders[:] = [name for name in folders if not name.startswith(".")]
    there = (error for error in unread if not isinstance(error, NotADirectoryError | FileNotFoundError))
    yield from (RunFolder(Path(error.filename).absolute()) for error in there)


def _found_in(title: str, folders: Iterable[RunFolder], say: Say) -> RunSet:
    runs, broken = [], []
    for folder in folders:
        try:
            runs.append(read_folder(folder))
        except (OSError, BrokenRecord) as error:
            broken.append(ExcludedRun(str(folder.path), _unreadable(error)))
    analyzed = _analyzed(title, _concluded(runs, say))
    return RunSet(title, analyzed.runs, (*analyzed.left_out, *broken))


def _concluded(runs: Sequence[RecordedRun], say: Say) -> Sequence[RecordedRun]:
    without = [run.folder for run in runs if run.record.status in ("queued", "running", "failed")]
    return [read_folder(run.folder) for run in runs] if conclude_ended(without, say) else runs


def _analyzed(title: str, recorded: Iterable[RecordedRun]) -> RunSet:
    runs, left_out = [], []
    for one in recorded:
        try:
            if one.has_ended:
                runs.append(recorded_run(one))
            else:
                left_out.append(ExcludedRun(one.id, f"it is {one.record.status}"))
        except (OSError, BrokenRecord) as error:
            left_out.append(ExcludedRun(one.id, _unreadable(error)))
    return RunSet(title, tuple(sorted(runs, key=_order)), tuple(left_out))


def _order(run: AnalyzedRun) -> tuple[float, str]:
    return run.started_s or 0.0, str(run.path)


def _unreadable(error: OSError | BrokenRecord) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    place = f" ({Path(error.where).name})" if error.where else ""
    return f"cannot be read: {error.what}{place}"


def _runs_text(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
