# SPDX-License-Identifier: Apache-2.0
"""The text of nccl-tests, which ``llmb nccl`` and other readers of it read. Pure."""

from collections.abc import Iterator

from llmb.bench.collectives import (
    ALIGNED,
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
)

_NAMES = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_FIGURES = "  {:>7}  {:>6}  {:>6}  {:>6}"
_NOT_MEASURED = _FIGURES.format(*["N/A"] * 4)


def collective_texts(job: CollectiveJob, result: CollectiveResult, version: str) -> Iterator[str]:
    """A table for each collective that was measured. ``version`` is that of llmb."""
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
    """The first form that is not too wide."""
    forms = (f"{value:{width}.2f}", f"{value:{width}.1f}", f"{value:{width}.0f}")
    shortest = f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"
    return next((form for form in forms if len(form) <= width), shortest)


def _notes(collective: Collective, rows: list[CollectiveRow], job: CollectiveJob, ranks: int) -> Iterator[str]:
    if any(row.out_of_place is None for row in rows):
        yield "# out-of-place: torch.distributed reduces in place alone"
    if collective in UNCHECKED_IN_PLACE:
        yield "# in-place: sent data may be overwritten, so that it is not checked"
    if collective not in ("all_reduce", "sendrecv") and min(job.sizes) < ranks * ALIGNED:
        yield f"# sizes below {ranks * ALIGNED} bytes are left out: a rank's part is a multiple of {ALIGNED} bytes"


def average_bus_gb_per_s(rows: list[CollectiveRow], ranks: int) -> float:
    """Over all sizes, and over both ways."""
    found = [
        algorithm_gb_per_s(row.size_bytes, way.time_s) * bus_factor(row.collective, ranks)
        for row in rows
        for way in (row.out_of_place, row.in_place)
        if way
    ]
    return sum(found) / len(found)
