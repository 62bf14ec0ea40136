# SPDX-License-Identifier: Apache-2.0
"""Measures a matrix product on all GPUs concurrently, to identify slow ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import llmb
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.nodes.bench.device_bench import SQUARE
from llmb.nodes.bench.measure import OnProgress, job_folder, run_ranks
from llmb.nodes.bench.measurements import JOB, PARTS, PROGRAM, Measurement, MeasurementFile, NotMeasured, PartReport
from llmb.nodes.bench.protocol import PASSES, Case, CaseList, ProductCase, ProductDtype
from llmb.readers.samples.host import Device

DATA = Path(__file__).with_name("outliers.yaml")
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


class OutlierRule(Record):
    """The content of ``outliers.yaml``: the limits beyond which a device is slow."""

    sigmas: float
    below_pct: float
    least_devices: int


@cache
def outlier_rule() -> OutlierRule:
    return read_file(DATA, OutlierRule)


def below_median_pct(speeds: Sequence[float]) -> list[float]:
    """Return the percentage by which each speed is below the median; negative if it is above."""
    middle = median(speeds)
    return [100 * (1 - speed / middle) for speed in speeds]


def slow_ones(speeds: Sequence[float], rule: OutlierRule) -> list[int]:
    """Return the indexes of slow devices; empty if there are too few to compare."""
    if len(speeds) < rule.least_devices:
        return []
    below = below_median_pct(speeds)
    spread = NORMAL * median(abs(pct) for pct in below)
    return [number for number, pct in enumerate(below) if pct > rule.below_pct and pct > rule.sigmas * spread]


DTYPE: dict[Device, ProductDtype] = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True, slots=True)
class Part:
    """A GPU, or a process on a CPU, compared with the others."""

    row: Measurement
    below_pct: float
    """Percentage below the median of devices with the same name."""
    slow: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """The measured parts, the parts that could not be measured, and the nodes that did not report."""

    measured: tuple[Part, ...]
    failed: tuple[tuple[str, NotMeasured], ...]
    missing_nodes: tuple[str, ...]

    @property
    def slow(self) -> list[Part]:
        return [part for part in self.measured if part.slow]

    @property
    def unfit_nodes(self) -> list[str]:
        """Return nodes with slow or failed parts, and nodes that did not report, without duplicates."""
        nodes = [*(part.row.node for part in self.slow), *(node for node, _ in self.failed), *self.missing_nodes]
        return list(dict.fromkeys(nodes))


def gpus_job(device: Device, seconds: float) -> CaseList:
    size, dtype = SQUARE[device], DTYPE[device]
    work = ProductCase(m=size, k=size, n=size, dtype=dtype, training_pass=PASSES[0])
    case = Case(name=f"{size} x {size} x {size}, {dtype}, for {seconds:g} s", work=work, sustained_s=seconds)
    return CaseList(device=device, cases=(case,))


def measure_parts(job: CaseList, ranks: int, on_progress: OnProgress) -> list[PartReport]:
    """Time the product of ``job`` on ``ranks`` GPUs of this machine, or with ``ranks`` processes on a CPU.

    Raises EnvironmentProblem if torch is missing, RunFailed if the program fails, UserInterrupt on a signal.
    """
    with job_folder(JOB, job) as folder:
        run_ranks(PROGRAM, folder, ranks, job.device, "GPUs", on_progress)
        return read_parts(folder)


def read_parts(folder: Path) -> list[PartReport]:
    """Read all reports that processes have written, sorted by rank."""
    reports = (PartReport.model_validate_json(path.read_text()) for path in (folder / PARTS).glob("*.json"))
    return sorted(reports, key=lambda part: part.rank)


def gpu_files(reports: Sequence[PartReport], command: tuple[str, ...], measured_at: str) -> Iterator[MeasurementFile]:
    """Yield the measurements of each node."""
    for node, group in groupby(sorted(reports, key=lambda part: (part.node, part.local_rank)), lambda part: part.node):
        parts = list(group)
        device = next((part.device for part in parts if part.device), None)
        versions = device.model_dump(include={"python", "torch", "cuda", "driver"}) if device else {}
        yield MeasurementFile(
            node=node,
            measured_at=measured_at,
            command=command,
            software={"llmb": llmb.__version__, **versions},
            binding=device.binding if device else None,
            measurements=tuple(row for part in parts if (row := _measurement(part))),
            not_measured=tuple(_missing(part) for part in parts if part.timing.seconds is None),
        )


def _measurement(part: PartReport) -> Measurement | None:
    timing, device = part.timing, part.device
    if timing.seconds is None or device is None:
        return None
    on_gpu = device.device_memory_gib is not None
    kind: Device = "cuda" if on_gpu else "cpu"
    size = SQUARE[kind]
    return Measurement(
        benchmark="gpus",
        case="square",
        shape=f"{size} x {size} x {size}",
        dtype=DTYPE[kind],
        node=part.node,
        device=device.device,
        rank=part.local_rank,
        time_s=timing.seconds,
        repetitions=timing.repeats,
        fastest_s=timing.fastest,
        slowest_s=timing.slowest,
        tflops=2 * size**3 / timing.seconds / 1e12,
        sustained=True,
        cpu_threads=None if on_gpu else device.cpu_threads,
        device_uuid=part.uuid,
    )


def _missing(part: PartReport) -> NotMeasured:
    return NotMeasured(
        benchmark="gpus",
        case=f"local rank {part.local_rank}",
        reason=part.timing.reason or "unknown",
        out_of_memory=part.timing.out_of_memory,
    )


def compare_parts(files: Sequence[MeasurementFile], missing_nodes: Sequence[str], rule: OutlierRule) -> Parts:
    """Compare each part with all others on devices of the same name."""
    rows = sorted((row for file in files for row in file.measurements), key=lambda row: row.device)
    parts: list[Part] = []
    for _, group in groupby(rows, lambda row: row.device):
        same = list(group)
        speeds = [row.tflops or 0.0 for row in same]
        slow = set(slow_ones(speeds, rule))
        below = below_median_pct(speeds)
        parts += [Part(row, below[number], number in slow) for number, row in enumerate(same)]
    failed = tuple((file.node, row) for file in files for row in file.not_measured)
    return Parts(tuple(parts), failed, tuple(missing_nodes))


def median_tflops(parts: Parts) -> float | None:
    """Return the median rate of all parts in TFLOPS; None if nothing was measured."""
    return median(part.row.tflops or 0.0 for part in parts.measured) if parts.measured else None


def gpus_document(parts: Parts, rule: OutlierRule) -> dict[str, Any]:
    """Return the JSON document of ``llmb bench gpus``; ``exclude`` is a list for ``llmb submit --exclude``, or None."""
    return {
        "median_tflops": median_tflops(parts),
        "rule": rule.model_dump(),
        "devices": [
            {
                "node": part.row.node,
                "local_rank": part.row.rank,
                "uuid": part.row.device_uuid,
                "device": part.row.device,
                "tflops": part.row.tflops,
                "below_median_pct": part.below_pct,
                "slow": part.slow,
            }
            for part in parts.measured
        ],
        "failed": [{"node": node, "part": row.case, "reason": row.reason} for node, row in parts.failed],
        "missing_nodes": list(parts.missing_nodes),
        "exclude": ",".join(parts.unfit_nodes) or None,
    }
