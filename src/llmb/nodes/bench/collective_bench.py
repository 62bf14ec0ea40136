# SPDX-License-Identifier: Apache-2.0
"""Measures collectives across processes on this machine, and formats results as measurements or as nccl-tests does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import llmb
from llmb.base.errors import RunFailed, UsageError
from llmb.catalogue.records import Dtype, Recipe
from llmb.nodes.bench.device_bench import recipe_text
from llmb.nodes.bench.measure import OnProgress, job_folder, run_ranks
from llmb.nodes.bench.measurements import Measurement, MeasurementFile, NotMeasured
from llmb.nodes.bench.protocol import (
    ALIGNED,
    COLLECTIVES,
    COLLECTIVES_JOB,
    COLLECTIVES_PROGRAM,
    COLLECTIVES_RESULT,
    SHOWN_AS_SUM,
    UNCHECKED_IN_PLACE,
    Collective,
    CollectiveJob,
    CollectiveResult,
    CollectiveRow,
    RankReport,
    Way,
    algorithm_gb_per_s,
    bus_factor,
    sizes_between,
)
from llmb.prediction.sizes import BF16, FP32, expert_rows
from llmb.readers.samples.host import Device

LEAST_BYTES = 8
MOST_BYTES: dict[Device, int] = {"cpu": 16 * 2**20, "cuda": 16 * 2**30}
"""The default maximum size in bytes; smaller for CPUs, which are much slower than GPUs."""
TABLE = "collectives.txt"
"""Name of the file in a job's folder with the results in the format of nccl-tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """The collectives to measure, with sizes from ``least`` to ``most`` bytes, by default to ``MOST_BYTES``."""

    collectives: tuple[Collective, ...]
    least: int
    most: int | None
    factor: int
    iterations: int
    warm_ups: int
    recipe: str | None = None
    ranks: int | None = None
    """The number of ranks that the recipe needs, if any."""


def expert_exchange(request: CollectiveRequest, recipe: Recipe) -> CollectiveRequest:
    """Return the request for the all-to-all that sends the tokens of a micro-batch to the ranks of their experts; the
    all-to-all that returns the outputs has the same size.

    Both are in bf16, even in FP8 recipes, or in fp32 in fp32 recipes. Every expert is assumed to get equally many
    tokens. Raises UsageError if the layout has no expert parallelism.
    """
    layout = recipe.layout
    if layout.ep == 1:
        why = "EP is 1" if recipe.model.moe else "the model has no experts"
        do = "pass --ep 2 or more, and a multiple as --scale" if recipe.model.moe else "pass a --workload with experts"
        raise UsageError(f"{recipe.title()} exchanges no tokens between experts, because {why}", do=do)
    rows = expert_rows(recipe.model, layout, recipe.capacity_factor) // layout.etp
    size = (FP32 if recipe.dtype is Dtype.FP32 else BF16) * recipe.model.hidden_size * rows
    sized = replace(request, collectives=("alltoall",), least=size, most=size)
    return replace(sized, recipe=recipe_text(recipe), ranks=layout.ep)


def parse_collectives(names: list[str]) -> tuple[Collective, ...]:
    """Parse names of collectives, or return all if there are none; raise UsageError if a name is unknown."""
    words = [name.lower().replace("-", "_") for name in names]
    aliases = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
    chosen = {aliases.get(name, name) for name in words}
    for name in chosen - {*COLLECTIVES}:
        raise UsageError(f"unknown collective '{name}'", choices=COLLECTIVES)
    return tuple(name for name in COLLECTIVES if not chosen or name in chosen)


def collective_job(request: CollectiveRequest, device: Device) -> CollectiveJob:
    """Return the job for a request; raise UsageError if no size is between the minimum and the maximum."""
    most = MOST_BYTES[device] if request.most is None else request.most
    sizes = tuple(sizes_between(request.least, most, request.factor))
    if not sizes:
        what = f"--min-size is {request.least:,} bytes, above the maximum of {most:,}"
        raise UsageError(what, do="pass a smaller --min-size or a larger --max-size")
    return CollectiveJob(
        device=device,
        collectives=request.collectives,
        sizes=sizes,
        recipe=request.recipe,
        limited_by_memory=request.most is None,
        warm_ups=request.warm_ups,
        iterations=request.iterations,
    )


def measure_here(job: CollectiveJob, ranks: int, on_progress: OnProgress) -> CollectiveResult:
    """Measure the collectives of ``job`` across ``ranks`` processes on this machine.

    Raises EnvironmentProblem if torch is missing, RunFailed if a process fails, UserInterrupt on a signal.
    """
    with job_folder(COLLECTIVES_JOB, job) as folder:
        run_ranks(COLLECTIVES_PROGRAM, folder, ranks, job.device, "collectives", on_progress)
        return read_result(folder)


def read_result(folder: Path) -> CollectiveResult:
    """Read the result that rank 0 wrote; raise RunFailed if there is none."""
    try:
        return CollectiveResult.model_validate_json((folder / COLLECTIVES_RESULT).read_text())
    except FileNotFoundError as error:
        raise RunFailed("the ranks ended without a result", where=str(folder)) from error


def measurement_file(
    job: CollectiveJob, result: CollectiveResult, command: tuple[str, ...], measured_at: str
) -> MeasurementFile:
    """Convert the results to measurements of rank 0's node."""
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
        binding=result.device.binding,
        measurements=tuple(rows),
        not_measured=tuple(missing),
        recipe=job.recipe,
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
    """Raise RunFailed, with the collectives and sizes, if results were wrong."""
    wrong = [row for row in measured.measurements if row.wrong]
    if wrong:
        cases = "; ".join(f"{row.case} of {row.size_bytes:,} bytes ({row.shape}): {row.wrong:,}" for row in wrong)
        do = "check the network; if the backend is nccl, run the same collectives with nccl-tests"
        raise RunFailed(f"elements with wrong values: {cases}", do=do)


_NAMES = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_FIGURES = "  {:>7}  {:>6}  {:>6}  {:>6}"
_NOT_MEASURED = _FIGURES.format(*["N/A"] * 4)


def collective_texts(job: CollectiveJob, result: CollectiveResult, version: str) -> Iterator[str]:
    """Yield a table in the format of nccl-tests for each measured collective; ``version`` is llmb's."""
    for collective in job.collectives:
        if rows := [row for row in result.rows if row.collective == collective]:
            yield "".join(f"{line}\n" for line in _lines(collective, rows, job, result, version))


def _lines(
    collective: Collective, rows: list[CollectiveRow], job: CollectiveJob, result: CollectiveResult, version: str
) -> Iterator[str]:
    ranks, program = len(result.ranks), f"{collective}_perf"
    yield f"# llmb {version} in the format of nccl-tests, {result.backend}, torch {result.device.torch}"
    yield f"# Collective test starting: {program}"
    yield (
        f"# nThread 1 nGpus 1 minBytes {min(job.sizes)} maxBytes {max(job.sizes)} step: {_factor(job)}(factor) "
        f"warmup iters: {job.warm_ups} iters: {job.iterations} agg iters: 1 validation: 1 graph: 0"
    )
    yield "#"
    yield "# Using devices"
    yield from map(_device, result.ranks)
    yield from _header()
    yield from (_row(row, ranks) for row in rows)
    yield from _notes(collective, rows, job, ranks)
    ways = [way for row in rows for way in (row.out_of_place, row.in_place) if way]
    wrong = sum(bool(way.wrong) for way in ways)
    yield f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':<20} : {average_bus_gb_per_s(rows, ranks):g} "
    yield "#"
    yield f"# Collective test concluded: {program}"


def _header() -> Iterator[str]:
    yield "#"
    yield _NAMES.format(*[""] * 5) + "           out-of-place                       in-place          "
    way = ("time", "algbw", "busbw", "#wrong")
    yield _NAMES.format("size", "count", "type", "redop", "root") + 2 * _FIGURES.format(*way) + " "
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    yield _NAMES.format("(B)", "(elements)", "", "", "") + 2 * _FIGURES.format(*units) + " "


def _factor(job: CollectiveJob) -> int:
    return job.sizes[1] // job.sizes[0] if len(job.sizes) > 1 else 2


def _device(rank: RankReport) -> str:
    return (
        f"#  Rank {rank.rank:2} Group  0 Pid {rank.pid:6} on {rank.node:>10} device {rank.local_rank:2} "
        f"[{rank.bus_id or 'cpu'}] {rank.device}"
    )


def _row(row: CollectiveRow, ranks: int) -> str:
    redop = "sum" if row.collective in SHOWN_AS_SUM else "none"
    ways = "".join(_way(way, row, ranks) for way in (row.out_of_place, row.in_place))
    return f"{row.size_bytes:12}  {row.count:12}  {'float':>8}  {redop:>6}  {-1:6}{ways}"


def _way(way: Way | None, row: CollectiveRow, ranks: int) -> str:
    if way is None:
        return _NOT_MEASURED
    algorithm = algorithm_gb_per_s(row.size_bytes, way.time_s)
    bus = algorithm * bus_factor(row.collective, ranks)
    wrong = "   N/A" if way.wrong is None else f"{float(way.wrong):6g}"
    return f"  {_figure(way.time_s * 1e6, 7)}  {_figure(algorithm, 6)}  {_figure(bus, 6)}  {wrong}"


def _figure(value: float, width: int) -> str:
    forms = (f"{value:{width}.2f}", f"{value:{width}.1f}", f"{value:{width}.0f}")
    shortest = f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"
    return next((form for form in forms if len(form) <= width), shortest)


def _notes(collective: Collective, rows: list[CollectiveRow], job: CollectiveJob, ranks: int) -> Iterator[str]:
    if any(row.out_of_place is None for row in rows):
        yield "# out-of-place: torch.distributed reduces only in place"
    if collective in UNCHECKED_IN_PLACE:
        yield "# in-place: not checked, because sent data may be overwritten"
    if collective not in ("all_reduce", "sendrecv") and min(job.sizes) < ranks * ALIGNED:
        yield f"# sizes below {ranks * ALIGNED} bytes are omitted: a rank's part is a multiple of {ALIGNED} bytes"


def average_bus_gb_per_s(rows: list[CollectiveRow], ranks: int) -> float:
    """Return the average bus bandwidth in GB/s over all sizes, out of place and in place."""
    lines = [
        algorithm_gb_per_s(row.size_bytes, way.time_s) * bus_factor(row.collective, ranks)
        for row in rows
        for way in (row.out_of_place, row.in_place)
        if way
    ]
    return sum(lines) / len(lines)
