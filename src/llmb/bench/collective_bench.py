# SPDX-License-Identifier: Apache-2.0
"""Collectives over the ranks of this machine: started, and their result as measurements."""

from dataclasses import dataclass
from pathlib import Path

import llmb
from llmb.bench.collectives import (
    COLLECTIVES,
    JOB,
    PROGRAM,
    RESULT,
    Collective,
    CollectiveJob,
    CollectiveResult,
    CollectiveRow,
    Way,
    algorithm_gb_per_s,
    bus_factor,
    sizes_between,
)
from llmb.bench.measure import OnProgress, job_folder, run_ranks
from llmb.bench.records import Measurement, MeasurementFile, NotMeasured
from llmb.errors import RunFailed, UsageError
from llmb.runs.host import Device

LEAST_BYTES = 8
MOST_BYTES: dict[Device, int] = {"cpu": 16 * 2**20, "cuda": 16 * 2**30}
"""Unless a size is specified: processes on a CPU need minutes for what GPUs do in a second."""
TABLE = "collectives.txt"
"""The text of nccl-tests in the folder of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """What to measure; ``most`` is None for the device's default."""

    collectives: tuple[Collective, ...]
    least: int
    most: int | None
    factor: int
    iterations: int
    warm_ups: int


def named_collectives(names: list[str]) -> tuple[Collective, ...]:
    """All of them if none is named. Raises UsageError for an unknown one."""
    found = [name.lower().replace("-", "_") for name in names]
    aliases = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
    wanted = {aliases.get(name, name) for name in found}
    for name in wanted - {*COLLECTIVES}:
        raise UsageError(f"unknown collective '{name}'", choices=COLLECTIVES)
    return tuple(name for name in COLLECTIVES if not wanted or name in wanted)


def collective_job(asked: CollectiveRequest, device: Device) -> CollectiveJob:
    """Raises UsageError if there is no size."""
    most = MOST_BYTES[device] if asked.most is None else asked.most
    sizes = tuple(sizes_between(asked.least, most, asked.factor))
    if not sizes:
        raise UsageError(f"--min-size is {asked.least:,} bytes, above the largest of {most:,}", do="give --max-size")
    return CollectiveJob(
        device=device,
        collectives=asked.collectives,
        sizes=sizes,
        limited_by_memory=asked.most is None,
        warm_ups=asked.warm_ups,
        iterations=asked.iterations,
    )


def measure_here(job: CollectiveJob, ranks: int, on_progress: OnProgress) -> CollectiveResult:
    """Over ``ranks`` processes of this machine.

    Raises EnvironmentProblem without torch, RunFailed if a process failed, or UserInterrupt.
    """
    with job_folder(JOB, job) as folder:
        run_ranks(PROGRAM, folder, ranks, job.device, "collectives", on_progress)
        return read_result(folder)


def read_result(folder: Path) -> CollectiveResult:
    """Raises RunFailed if there is none."""
    try:
        return CollectiveResult.model_validate_json((folder / RESULT).read_text())
    except FileNotFoundError as error:
        raise RunFailed("the ranks ended without a result", where=str(folder)) from error


def measurement_file(
    job: CollectiveJob, result: CollectiveResult, command: tuple[str, ...], measured_at: str
) -> MeasurementFile:
    """What is kept for the node of rank 0."""
    ranks, node = len(result.ranks), result.nodes[0]
    over = f", {len(result.nodes)} nodes" if len(result.nodes) > 1 else ""
    rows = [
        _measurement(row, way, f"{where}{over}", job, result, node, ranks)
        for row in result.rows
        for way, where in ((row.out_of_place, "out of place"), (row.in_place, "in place"))
        if way
    ]
    missing = [
        NotMeasured(
            benchmark="collectives",
            case=row.collective,
            size_bytes=row.size_bytes,
            reason=row.reason,
            out_of_memory=row.out_of_memory,
        )
        for row in result.not_timed
    ]
    versions = result.device.model_dump(include={"python", "torch", "cuda", "nccl", "driver"})
    return MeasurementFile(
        node=node,
        measured_at=measured_at,
        command=command,
        software={"llmb": llmb.__version__, **versions},
        measurements=tuple(rows),
        not_measured=tuple(missing),
    )


def _measurement(
    row: CollectiveRow, way: Way, shape: str, job: CollectiveJob, result: CollectiveResult, node: str, ranks: int
) -> Measurement:
    algorithm = algorithm_gb_per_s(row.size_bytes, way.time_s)
    return Measurement(
        benchmark="collectives",
        case=row.collective,
        shape=shape,
        dtype="fp32",
        size_bytes=row.size_bytes,
        node=node,
        device=result.device.device,
        ranks=ranks,
        time_s=way.time_s,
        repetitions=job.iterations,
        bandwidth_gb_per_s=algorithm,
        bus_bandwidth_gb_per_s=algorithm * bus_factor(row.collective, ranks),
        wrong=way.wrong,
        backend=result.backend,
    )


def raise_if_wrong(measured: MeasurementFile) -> None:
    """Raises RunFailed, with the collectives and sizes, if a result was not the expected one."""
    wrong = [row for row in measured.measurements if row.wrong]
    if wrong:
        named = "; ".join(f"{row.case} of {row.size_bytes:,} bytes ({row.shape}): {row.wrong:,}" for row in wrong)
        raise RunFailed(f"wrong results, in elements: {named}", do="check the network and the library with nccl-tests")
