# SPDX-License-Identifier: Apache-2.0
"""Saves microbenchmark results in the install root by node, benchmark and recipe, and compares them.

For each of these combinations, the two newest files are kept.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import model_validator

from llmb.base.errors import UsageError
from llmb.base.input_files import MOST_JSON_BYTES, check_reachable, read_text_file
from llmb.base.trust import STATE_FOLDER
from llmb.catalogue.records import Record
from llmb.nodes.bench.protocol import DeviceReport, Timing
from llmb.runs.folder import BEFORE, write_newest

PROGRAM = "llmb.nodes.bench.worker.every_gpu"
JOB, PARTS = "gpus_job.json", "gpus"
"""Names of the job file and the folder of reports, in the folder that is the program's argument."""
BENCHMARKS = ("gemm", "attention", "memory", "transfer", "launch", "collectives", "gpus")


class Measurement(Record):
    """A row of results: one kind of work at one size, measured on a device or across a group of devices."""

    benchmark: str
    """One of ``BENCHMARKS``."""
    case: str
    """The stable name of a part of the benchmark, such as ``qkv_forward`` or ``all_reduce``, which scripts can use."""
    shape: str | None = None
    """Shape of the data, such as ``4096 x 4096 x 14336``; for collectives, a text such as ``in place, 2 nodes``."""
    dtype: str | None = None
    size_bytes: int | None = None
    node: str
    device: str
    """The GPU's name as its driver reports it, or the CPU's model."""
    rank: int | None = None
    """Local rank of the process that measured, if every process measured its own part."""
    ranks: int = 1
    """The number of ranks in the group."""
    time_s: float
    """Median time of one call; for collectives, the mean over repetitions and ranks, as in nccl-tests."""
    repetitions: int
    fastest_s: float | None = None
    slowest_s: float | None = None
    tflops: float | None = None
    peak_tflops: float | None = None
    """The dense peak in the catalogue; None if it is unknown or does not apply, and for ``gpus``."""
    peak_bandwidth_gb_per_s: float | None = None
    """The peak bandwidth of the device's memory, only for copies within it; None if it is unknown."""
    peak_reason: str | None = None
    """Why the relevant peak is unknown."""
    bandwidth_gb_per_s: float | None = None
    """Gigabytes (1e9 bytes) per second; for collectives, the algorithm bandwidth as defined by nccl-tests."""
    bus_bandwidth_gb_per_s: float | None = None
    """Bus bandwidth of collectives as defined by nccl-tests."""
    wrong: int | None = None
    """The number of elements, over all ranks, that differ from a collective's expected result; None if unchecked."""
    device_uuid: str | None = None
    """Id of the GPU, if every GPU was measured separately."""
    sustained: bool = False
    """True for sustained work, at the clocks that power and temperature permit."""
    backend: str | None = None
    """The kernel or library that was used, such as ``cudnn`` for attention."""
    cpu_threads: int | None = None
    """The number of CPU threads that computed; None on a GPU and for collectives."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_follows(cls, data: Any) -> Any:  # noqa: ANN401 (whatever a file has)
        """Drop the derived field ``peak_pct``, which the output of ``--json`` contains."""
        return {key: value for key, value in data.items() if key != "peak_pct"} if isinstance(data, dict) else data

    @property
    def peak_pct(self) -> float | None:
        """Return the percentage of the peak that was reached; None if the peak is unknown."""
        pairs = ((self.tflops, self.peak_tflops), (self.bandwidth_gb_per_s, self.peak_bandwidth_gb_per_s))
        return next((100 * value / peak for value, peak in pairs if value is not None and peak), None)

    @property
    def identity(self) -> tuple[object, ...]:
        """Return the properties that are equal for comparable measurements of a node."""
        what = (self.benchmark, self.case, self.shape, self.dtype, self.size_bytes, self.sustained)
        return (*what, self.device, self.rank, self.ranks, self.cpu_threads)


class NotMeasured(Record):
    """A requested case that could not be measured, with the reason."""

    benchmark: str
    case: str
    shape: str | None = None
    dtype: str | None = None
    size_bytes: int | None = None
    reason: str
    out_of_memory: bool = False


class MeasurementFile(Record):
    """The measurements of a node in one call of ``llmb bench``."""

    schema_version: int = 1
    node: str
    measured_at: str
    """The time in ISO 8601 format, in UTC."""
    command: tuple[str, ...]
    software: dict[str, str | None]
    """Versions by name, such as ``torch`` and ``driver``; None if unknown."""
    binding: str | None = None
    """The ``DeviceReport.binding`` of the first process, if several processes measured."""
    measurements: tuple[Measurement, ...]
    not_measured: tuple[NotMeasured, ...] = ()
    recipe: str | None = None
    """Description of the recipe and layout that determine the shapes, if any."""


class PartReport(Record):
    """A process's measurement of its own GPU, or of the CPU that all processes share, or the reason why it failed."""

    node: str
    rank: int
    local_rank: int
    uuid: str | None
    device: DeviceReport | None
    """None if the device is unusable."""
    timing: Timing


@dataclass(frozen=True, slots=True)
class FigureChange:
    """The newest measurement of a case on a node, and the previous comparable one, if any."""

    latest: Measurement
    measured_at: str
    previous: Measurement | None
    previous_at: str | None

    @property
    def speed_pct(self) -> float | None:
        """Return the change of speed in percent, positive if faster; None if there is no previous measurement."""
        return None if self.previous is None else 100 * (self.previous.time_s / self.latest.time_s - 1)


def changes(files: Iterable[MeasurementFile], benchmark: str | None = None) -> list[FigureChange]:
    """Return the newest change of each case, sorted by node and benchmark; ``files`` must be sorted by time."""
    series: dict[tuple[object, ...], list[tuple[str, Measurement]]] = {}
    for file in files:
        for row in file.measurements:
            if benchmark in (None, row.benchmark):
                series.setdefault((row.node, *row.identity), []).append((file.measured_at, row))
    changes = [_change(rows) for rows in series.values()]
    return sorted(changes, key=lambda change: (change.latest.node, change.latest.benchmark))


def _change(rows: list[tuple[str, Measurement]]) -> FigureChange:
    measured_at, latest = rows[-1]
    previous_at, previous = rows[-2] if len(rows) > 1 else (None, None)
    return FigureChange(latest, measured_at, previous, previous_at)


BENCH = Path(STATE_FOLDER) / "bench"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters of a node's name that are replaced in the name of its folder."""
_KEPT = re.compile(rf"[a-z-]+_[0-9a-f]{{8}}({BEFORE})?\.json")


def bench_folder(install: Path) -> Path:
    return install / BENCH


def write_measurements(install: Path, measured: MeasurementFile) -> Path:
    """Save the measurements of a node and return the path; raise NotWritable if that fails."""
    folder = bench_folder(install) / (UNSAFE.sub("-", measured.node).lstrip(".") or "node")
    names = sorted({row.benchmark for row in measured.measurements}) or ["nothing"]
    recipe = hashlib.sha256((measured.recipe or "").encode()).hexdigest()[:8]
    path = folder / f"{'-'.join(names)}_{recipe}.json"
    write_newest(path, measured.model_dump_json(indent=2) + "\n")
    return path


def read_measurements(install: Path, node: str | None = None) -> list[MeasurementFile]:
    """Read all saved measurements, or only ``node``'s, oldest first; raise UsageError if any file is unreadable."""
    files = [file for file in _read_all(bench_folder(install).glob("*/*.json")) if node in (None, file.node)]
    return sorted(files, key=_moment)


def measurements_at(path: Path) -> list[MeasurementFile]:
    """Read the measurements at a path: a saved file, an output of ``--json``, or a node's folder, oldest first. Raises
    UsageError if a saved file is unreadable; returns an empty list if there are no measurements."""
    check_reachable(path)
    if path.is_file() and not _KEPT.fullmatch(path.name):
        try:
            return [MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))]
        except ValueError:  # a file of another kind has no measurements
            return []
    paths = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    return sorted(_read_all(each for each in paths if _KEPT.fullmatch(each.name)), key=_moment)


def _read_all(paths: Iterable[Path]) -> Iterator[MeasurementFile]:
    for path in sorted(paths):  # if two files have the same time, the older is first
        try:
            content = MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))
            _moment(content)
        except ValueError as error:  # includes pydantic's errors
            do = "remove the file, or read it with the version of llmb that wrote it"
            raise UsageError("this is not a file of measurements by llmb bench", where=str(path), do=do) from error
        yield content


def _moment(measured: MeasurementFile) -> datetime:
    moment = datetime.fromisoformat(measured.measured_at)
    if moment.tzinfo is None:
        raise ValueError(f"{measured.measured_at} has no time zone")
    return moment
