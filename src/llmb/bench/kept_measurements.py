# SPDX-License-Identifier: Apache-2.0
"""Measurements that are kept below the root of installation: of each node, benchmark and recipe the newest file and the
one before.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from llmb.bench.records import MeasurementFile
from llmb.errors import UsageError
from llmb.input_files import MOST_JSON_BYTES, read_text_file
from llmb.runs.folder import BEFORE, write_newest
from llmb.trust import STATE_FOLDER

BENCH = Path(STATE_FOLDER) / "bench"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters of a node's name that are not used in the name of its folder."""
_KEPT = re.compile(rf"[a-z-]+_[0-9a-f]{{8}}({BEFORE})?\.json")


def bench_folder(install: Path) -> Path:
    return install / BENCH


def write_measurements(install: Path, measured: MeasurementFile) -> Path:
    """Raises NotWritable."""
    folder = bench_folder(install) / (UNSAFE.sub("-", measured.node).lstrip(".") or "node")
    names = sorted({row.benchmark for row in measured.measurements}) or ["nothing"]
    recipe = hashlib.sha256((measured.recipe or "").encode()).hexdigest()[:8]
    path = folder / f"{'-'.join(names)}_{recipe}.json"
    write_newest(path, measured.model_dump_json(indent=2) + "\n")
    return path


def read_measurements(install: Path, node: str | None = None) -> list[MeasurementFile]:
    """All that are kept, or those of ``node``, the oldest first. Raises UsageError for a file that is damaged or cannot
    be read.
    """
    found = [file for file in _read_all(bench_folder(install).glob("*/*.json")) if node in (None, file.node)]
    return sorted(found, key=_moment)


def measurements_at(path: Path) -> list[MeasurementFile]:
    """Reads a kept file, what ``--json`` printed, or all in a node's folder, the oldest first; empty if there is none.
    Raises UsageError as above."""
    if path.is_file() and not _KEPT.fullmatch(path.name):
        return _printed(path)
    paths = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    return sorted(_read_all(each for each in paths if _KEPT.fullmatch(each.name)), key=_moment)


def _printed(path: Path) -> list[MeasurementFile]:
    """Empty if the file is of another kind."""
    try:
        return [MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))]
    except ValueError:
        return []


def _read_all(paths: Iterable[Path]) -> Iterator[MeasurementFile]:
    for path in sorted(paths):  # of two files of the same second, the one before is first
        try:
            found = MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))
            _moment(found)
        except ValueError as error:  # pydantic's is one
            do = "remove it, or read it with the version of llmb that wrote it"
            raise UsageError("not a file of measurements of llmb bench", where=str(path), do=do) from error
        yield found


def _moment(measured: MeasurementFile) -> datetime:
    """Raises ValueError for a time that is none, or has no time zone."""
    moment = datetime.fromisoformat(measured.measured_at)
    if moment.tzinfo is None:
        raise ValueError(f"{measured.measured_at} has no time zone")
    return moment
