# SPDX-License-Identifier: Apache-2.0
"""Finds traces, and reads them in any supported format."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.base.input_files import list_folder, open_file
from llmb.readers.profiles import NSYS_FOLDER, TORCH_FOLDER
from llmb.readers.profiles.chrome import read_chrome
from llmb.readers.profiles.classify import Rules
from llmb.readers.profiles.nsys_export import read_nsys
from llmb.readers.profiles.timeline import STEPS_LEFT_OUT, Timeline

JSON_ENDS = (".json", ".json.gz")
SQLITE_END, REPORT_END = ".sqlite", ".nsys-rep"
SQLITE_MAGIC = b"SQLite format 3\x00"
EXPECTED = ("PyTorch profiler: *.json, *.json.gz", "Nsight Systems: *.sqlite (nsys export --type sqlite)")


def find_traces(paths: Iterable[Path]) -> list[Path]:
    """Return the files and the traces in folders. Raise UsageError if a folder has none or cannot be listed."""
    return [trace for path in paths for trace in (_in_folder(path) if path.is_dir() else [path])]


def _in_folder(folder: Path) -> list[Path]:
    files = [path for name in (TORCH_FOLDER, NSYS_FOLDER) for path in folder.rglob(name)]
    homes = [path for path in files if path.is_dir()] or ([] if (folder / "run.json").is_file() else [folder])
    inside = [path for home in homes for path in sorted(list_folder(home), key=_natural)]
    traces = [path for path in inside if path.name.endswith((*JSON_ENDS, SQLITE_END)) and path.name[0] != "."]
    if traces:
        return traces
    reports = [path for path in inside if path.name.endswith(REPORT_END)]
    if reports:
        raise _report(reports[0])
    raise UsageError(
        "no trace in this folder", where=str(folder), choices=EXPECTED, do="record one with 'llmb run --profile'"
    )


def _natural(path: Path) -> tuple[int, str]:
    """Return a sort key that puts rank 2 before rank 10."""
    return len(path.name), path.name


def read_trace(path: Path, rules: Rules, *, unmarked: bool = False) -> list[Timeline]:
    """Return one timeline per process with steps, marked or (if ``unmarked``) derived.

    Raise UsageError if the file has none.
    """
    if path.name.endswith(REPORT_END):
        raise _report(path)
    is_nsys = _is_sqlite(path)
    timelines = read_nsys(path, rules, unmarked=unmarked) if is_nsys else [read_chrome(path, rules, unmarked=unmarked)]
    with_steps = [timeline for timeline in timelines if timeline.steps]
    dropped = [note for timeline in timelines for note in timeline.notes if note.startswith(STEPS_LEFT_OUT)]
    if not with_steps and dropped:
        what = f"no step of this trace is complete; {dropped[0]}"
        raise UsageError(what, where=str(path), do="profile fewer steps, after a few warm-up steps")
    if not with_steps:
        raise UsageError(
            "this trace has no training steps",
            where=str(path),
            choices=("annotations 'ProfilerStep#N' of the PyTorch profiler", "NVTX ranges 'step N'"),
            do="annotate the steps, or record a trace with 'llmb run --profile', which annotates them",
        )
    return with_steps


def read_traces(paths: Iterable[Path], *, unmarked: bool = False) -> Iterator[Timeline]:
    """Yield the timelines of all processes in all files; see ``read_trace``."""
    rules = Rules()
    for path in paths:
        yield from read_trace(path, rules, unmarked=unmarked)


def _is_sqlite(path: Path) -> bool:
    with open_file(path, do=f"pass a supported trace: {'; '.join(EXPECTED)}") as stream:
        try:
            return stream.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
        except OSError as error:
            raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _report(path: Path) -> UsageError:
    return UsageError(
        "a report of Nsight Systems must be exported before it can be read",
        where=str(path),
        do=f"run nsys export --type sqlite '{path}', then pass the .sqlite file",
    )
