# SPDX-License-Identifier: Apache-2.0
"""Results of microbenchmarks, and their changes; stored below the root of installation per node, benchmark and recipe.

The newest file and the one before are kept.
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
from llmb.base.input_files import MOST_JSON_BYTES, read_text_file
from llmb.base.trust import STATE_FOLDER
from llmb.catalogue.records import Record
from llmb.nodes.bench.protocol import DeviceReport, Timing
from llmb.runs.folder import BEFORE, write_newest

PROGRAM = "llmb.nodes.bench.worker.every_gpu"
JOB, PARTS = "gpus_job.json", "gpus"
"""A file and a folder, in the folder that is the program's argument."""
BENCHMARKS = ("gemm", "attention", "memory", "transfer", "launch", "collectives", "gpus")


class Measurement(Record):
    """One row: a kind of work at one size, measured on one device or over a group of them."""

    benchmark: str
    """One of ``BENCHMARKS``."""
    case: str
    """The part within it, in a stable word for scripts, such as ``qkv`` or ``all_reduce``."""
    shape: str | None = None
    """Shape of the data for display, such as ``4096 x 4096 x 14336``."""
    dtype: str | None = None
    size_bytes: int | None = None
    node: str
    device: str
    """The GPU's name as its driver reports it, or the CPU's model."""
    rank: int | None = None
    """Rank of the process that measured; None for a group measurement."""
    ranks: int = 1
    """The number of ranks in the group."""
    time_s: float
    """Median of the repetitions; for collectives their mean over all ranks, as in nccl-tests."""
    repetitions: int
    fastest_s: float | None = None
    slowest_s: float | None = None
    tflops: float | None = None
    peak_tflops: float | None = None
    """Peak of the catalogue, dense; None if the device's peak is unknown."""
    peak_bandwidth_gb_per_s: float | None = None
    """Peak of the device's memory."""
    peak_reason: str | None = None
    """The reason why the peak to compare with is unknown."""
    bandwidth_gb_per_s: float | None = None
    """Gigabytes (1e9) per second; for collectives the algorithm's bandwidth as defined by nccl-tests."""
    bus_bandwidth_gb_per_s: float | None = None
    """Bus bandwidth of collectives, as defined by nccl-tests."""
    wrong: int | None = None
    """Elements of collectives of all ranks that differ from the expected result; None if it was not checked."""
    device_uuid: str | None = None
    """Id of the GPU, if each GPU was measured."""
    sustained: bool = False
    """True if measured for seconds, at the clocks that power and temperature then allow; else a burst."""
    backend: str | None = None
    """The chosen kernel or library, such as ``cudnn`` for attention."""
    cpu_threads: int | None = None
    """The number of computing threads; None on a GPU."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_follows(cls, data: Any) -> Any:  # noqa: ANN401 (whatever a file has)
        """Drop the derived field, which the output of ``--json`` contains."""
        return {key: value for key, value in data.items() if key != "peak_pct"} if isinstance(data, dict) else data

    @property
    def peak_pct(self) -> float | None:
        """Return the fraction of the peak that was reached, in percent."""
        pairs = ((self.tflops, self.peak_tflops), (self.bandwidth_gb_per_s, self.peak_bandwidth_gb_per_s))
        return next((100 * value / peak for value, peak in pairs if value is not None and peak), None)

    @property
    def identity(self) -> tuple[object, ...]:
        """Return the properties that comparable measurements of one node share."""
        what = (self.benchmark, self.case, self.shape, self.dtype, self.size_bytes, self.sustained)
        return (*what, self.device, self.rank, self.ranks, self.cpu_threads)


class NotMeasured(Record):
    """A requested case that could not be measured."""

    benchmark: str
    case: str
    shape: str | None = None
    dtype: str | None = None
    size_bytes: int | None = None
    reason: str
    out_of_memory: bool = False


class MeasurementFile(Record):
    """The measurements of one call of ``llmb bench`` on one node."""

    schema_version: int = 1
    node: str
    measured_at: str
    """The time in ISO 8601, in UTC."""
    command: tuple[str, ...]
    software: dict[str, str | None]
    """Versions of llmb, python, torch, cuda, nccl and driver; None if unknown."""
    measurements: tuple[Measurement, ...]
    not_measured: tuple[NotMeasured, ...] = ()
    recipe: str | None = None
    """Source of the shapes, with its layout; None if they do not come from a recipe."""


class PartReport(Record):
    """The measurements of one process on its GPU, or as one of several on a CPU."""

    node: str
    rank: int
    local_rank: int
    uuid: str | None
    device: DeviceReport | None
    """None if the device is unusable."""
    timing: Timing


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A case of a node: its newest measurement and the previous comparable one, if any."""

    latest: Measurement
    measured_at: str
    previous: Measurement | None
    previous_at: str | None

    @property
    def speed_pct(self) -> float | None:
        """Return the gain (above 0) or loss of speed in percent, from the measured times."""
        return None if self.previous is None else 100 * (self.previous.time_s / self.latest.time_s - 1)


def changes(files: Iterable[MeasurementFile], benchmark: str | None = None) -> list[FigureChange]:
    """Return changes by node and benchmark, with cases in the order of measurement; ``files``: the oldest first."""
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
"""Characters of a node's name that its folder's name omits."""
_KEPT = re.compile(rf"[a-z-]+_[0-9a-f]{{8}}({BEFORE})?\.json")


def bench_folder(install: Path) -> Path:
    return install / BENCH


def write_measurements(install: Path, measured: MeasurementFile) -> Path:
    """Write the file. Raises NotWritable."""
    folder = bench_folder(install) / (UNSAFE.sub("-", measured.node).lstrip(".") or "node")
    names = sorted({row.benchmark for row in measured.measurements}) or ["nothing"]
    recipe = hashlib.sha256((measured.recipe or "").encode()).hexdigest()[:8]
    path = folder / f"{'-'.join(names)}_{recipe}.json"
    write_newest(path, measured.model_dump_json(indent=2) + "\n")
    return path


def read_measurements(install: Path, node: str | None = None) -> list[MeasurementFile]:
    """Read all saved files, or those of ``node``, the oldest first. Raises UsageError if one is damaged or cannot
    be read.
    """
    files = [file for file in _read_all(bench_folder(install).glob("*/*.json")) if node in (None, file.node)]
    return sorted(files, key=_moment)


def measurements_at(path: Path) -> list[MeasurementFile]:
    """Read a saved file, the output of ``--json``, or all in a node's folder, the oldest first; empty if there is none.
    Raises UsageError as above."""
    if path.is_file() and not _KEPT.fullmatch(path.name):
        # Empty if the file is of another kind.
        try:
            return [MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))]
        except ValueError:
            return []
    paths = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    return sorted(_read_all(each for each in paths if _KEPT.fullmatch(each.name)), key=_moment)


def _read_all(paths: Iterable[Path]) -> Iterator[MeasurementFile]:
    for path in sorted(paths):  # of two files of the same second, the one before is first
        try:
            content = MeasurementFile.model_validate_json(read_text_file(path, MOST_JSON_BYTES))
            _moment(content)
        except ValueError as error:  # pydantic's is one
            do = "remove it, or read it with the version of llmb that wrote it"
            raise UsageError("not a file of measurements of llmb bench", where=str(path), do=do) from error
        yield content


def _moment(measured: MeasurementFile) -> datetime:
    """Parse the time of a measurement. Raises ValueError if it is invalid or has no time zone."""
    moment = datetime.fromisoformat(measured.measured_at)
    if moment.tzinfo is None:
        raise ValueError(f"{measured.measured_at} has no time zone")
    return moment
