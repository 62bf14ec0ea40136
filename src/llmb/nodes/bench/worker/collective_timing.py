# SPDX-License-Identifier: Apache-2.0
"""The program that measures collectives: ``python -m llmb.nodes.bench.worker.collective_timing FOLDER``, once per rank.

It is started by ``llmb.launch.ranks``. Rank 0 writes the result file, and prints a line of progress per collective and
size.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.engine.device import device_name, local_device, synchronize
from llmb.engine.parallel.mesh import connect_ranks
from llmb.nodes.bench.protocol import (
    BASES,
    COLLECTIVES_JOB,
    COLLECTIVES_RESULT,
    ELEMENT_BYTES,
    UNCHECKED_IN_PLACE,
    BenchProgress,
    Collective,
    CollectiveJob,
    CollectiveResult,
    CollectiveRow,
    Extent,
    NotTimed,
    Piece,
    RankReport,
    Way,
    expected_data,
    extents,
    sent_data,
)
from llmb.nodes.bench.worker.measure_device import describe, free_bytes, leave, say
from llmb.readers.samples.host import host_name
from llmb.runs.folder import write_atomically

GB = 10**9
BLOCK = 2**22
"""The number of elements to write or compare at a time, to limit the use of memory."""
USED = 0.8
"""Fraction of the free memory to use; the library needs the rest for its own buffers."""
PATIENCE = timedelta(minutes=10)
UNSUPPORTED = ("support", "implement")
"""Words in the error messages of libraries that lack a collective."""
Call = Callable[[], object]


class BenchGroup:
    """The group of all ranks, with the buffers of this rank."""

    def __init__(self, device: torch.device, most: int) -> None:
        """Allocate two buffers of ``most`` elements, the number in the largest array."""
        self.device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent, self.received = (torch.ones(most, dtype=torch.float32, device=device) for _ in range(2))

    def total(self, value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        """Reduce a value over all ranks, by default to the sum."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return float(tensor.item())

    def meet(self) -> None:
        """Wait until all ranks have arrived and their devices are idle."""
        self.total(0)
        synchronize(self.device)


def _measure(group: BenchGroup, job: CollectiveJob, collective: Collective, size: Extent) -> CollectiveRow:
    out_of_place = None if collective == "all_reduce" else _way(group, job, collective, size, in_place=False)
    return CollectiveRow(
        collective=collective,
        size_bytes=size.size_bytes,
        count=size.count,
        out_of_place=out_of_place,
        in_place=_way(group, job, collective, size, in_place=True),
    )


def _way(group: BenchGroup, job: CollectiveJob, collective: Collective, size: Extent, *, in_place: bool) -> Way:
    sent, received = views(group, collective, size, in_place=in_place)
    call = call_of(collective, sent, received, group)
    for _ in range(job.warm_ups):
        call()
    group.meet()
    began = time.perf_counter()
    for _ in range(job.iterations):
        call()
    synchronize(group.device)
    seconds = group.total((time.perf_counter() - began) / job.iterations) / group.ranks
    if in_place and collective in UNCHECKED_IN_PLACE:
        return Way(time_s=seconds, wrong=None)
    group.meet()
    received.zero_()
    fill(sent, sent_data(size, group.rank))
    group.meet()
    call()
    synchronize(group.device)
    expected = expected_data(collective, size, group.rank, group.ranks)
    return Way(time_s=seconds, wrong=round(group.total(sum(wrong(received, piece) for piece in expected))))


def views(group: BenchGroup, collective: Collective, size: Extent, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """Return the send and receive buffers; if ``in_place``, they overlap in one buffer as NCCL requires."""
    if not in_place:
        return group.sent[: size.sent], group.received[: size.received]
    sent, received = group.received[: size.sent], group.received[: size.received]
    start = group.rank * size.count
    if collective == "all_gather":
        sent = received[start : start + size.count]
    elif collective == "reduce_scatter":
        received = sent[start : start + size.count]
    return sent, received


def call_of(collective: Collective, sent: Tensor, received: Tensor, group: BenchGroup) -> Call:
    single: Any = dist
    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(received)
        case "all_gather":
            # torch 2.13 renamed this function and the next.
            gather = getattr(single, "all_gather_single", None) or single.all_gather_into_tensor
            return lambda: gather(received, sent)
        case "reduce_scatter":
            scatter = getattr(single, "reduce_scatter_single", None) or single.reduce_scatter_tensor
            return lambda: scatter(received, sent)
        case "alltoall":
            return lambda: dist.all_to_all_single(received, sent)
        case "sendrecv":
            after, before = (group.rank + 1) % group.ranks, (group.rank - 1) % group.ranks
            return lambda: _in_a_ring(sent, received, after, before)


def _in_a_ring(sent: Tensor, received: Tensor, after: int, before: int) -> None:
    both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def fill(buffer: Tensor, piece: Piece) -> None:
    for start, values in _blocks(piece, buffer.device):
        buffer[start : start + len(values)] = values


def wrong(buffer: Tensor, piece: Piece) -> int:
    """Count the elements of ``buffer`` that differ from the values of ``piece``."""
    return sum(
        int((buffer[start : start + len(values)] != values).sum()) for start, values in _blocks(piece, buffer.device)
    )


def _blocks(piece: Piece, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, piece.count, BLOCK):
        stop = min(start + BLOCK, piece.count)
        numbers = torch.arange(piece.offset + start, piece.offset + stop, device=device)
        yield piece.at + start, ((numbers % BASES + 1) * piece.weight).float()


def most_bytes(device: torch.device) -> int:
    """Return the maximum bytes of each of two arrays in a rank's usable memory; ``sys.maxsize`` if that is unknown."""
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_bytes()
        free = free and free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return sys.maxsize if free is None else int(USED * free) // 2


def run(job: CollectiveJob, device: torch.device, say: Callable[[BenchProgress], None]) -> CollectiveResult:
    """Run the job and return the result. Every rank must call this, because it is collective."""
    limit = int(_least(most_bytes(device), device))
    ranks = dist.get_world_size()
    plan = [(name, size) for name in job.collectives for size in extents(name, job.sizes, ranks)]
    fitting = [size.size_bytes // ELEMENT_BYTES for _, size in plan if size.size_bytes <= limit]
    group = BenchGroup(device, max(fitting, default=1))
    rows: list[CollectiveRow] = []
    missing: list[NotTimed] = []
    lacking: set[Collective] = set()
    for number, (name, size) in enumerate(plan):
        if name in lacking:
            continue
        if size.size_bytes > limit:
            lacking.add(name)
            missing.append(_too_large(name, size, limit, job))
            continue
        say(BenchProgress(name=f"{name}, {size.size_bytes:,} bytes", number=number, total=len(plan)))
        try:
            rows.append(_measure(group, job, name, size))
        except (RuntimeError, NotImplementedError) as error:
            text = str(error).strip().partition("\n")[0]
            if not any(word in text.lower() for word in UNSUPPORTED):
                raise
            lacking.add(name)
            missing.append(NotTimed(collective=name, size_bytes=None, reason=text))
    return CollectiveResult(
        backend="nccl" if device.type == "cuda" else "gloo",
        device=describe(device),
        ranks=_all_ranks(device),
        rows=tuple(rows),
        not_timed=tuple(missing),
    )


def _too_large(collective: Collective, size: Extent, limit: int, job: CollectiveJob) -> NotTimed:
    reason = f"two arrays of this size or more do not fit: {2 * limit / GB:.3g} GB are free for a rank"
    return NotTimed(
        collective=collective, size_bytes=size.size_bytes, reason=reason, out_of_memory=not job.limited_by_memory
    )


def _least(value: int, device: torch.device) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return float(tensor.item())


def _all_ranks(device: torch.device) -> tuple[RankReport, ...]:
    report = RankReport(
        rank=dist.get_rank(),
        node=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        pid=os.getpid(),
        device=device_name(device),
        bus_id=_bus_id(device),
    )
    reports: list[RankReport | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return tuple(rank for rank in reports if rank)


def _bus_id(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    numbers: list[int | None] = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return None if None in numbers else ":".join(f"{number:02x}" for number in numbers).rjust(10, "0")


def main() -> None:
    folder = Path(sys.argv[1])
    job = CollectiveJob.model_validate_json((folder / COLLECTIVES_JOB).read_text())
    device = local_device(job.device)
    connect_ranks(device, PATIENCE)

    is_first = dist.get_rank() == 0
    result = run(job, device, say if is_first else lambda _: None)
    if is_first:
        write_atomically(folder / COLLECTIVES_RESULT, result.model_dump_json())
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
