# SPDX-License-Identifier: Apache-2.0
"""The data that shows whether a collective is right: what each rank must receive, and how errors are counted."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from llmb.nodes.bench.protocol import COLLECTIVES, CollectiveJob, expected_data, extent, sent_data
from llmb.nodes.bench.slow_gpus import gpu_files, gpus_job
from llmb.nodes.bench.worker import collective_timing as worker
from llmb.nodes.bench.worker import every_gpu
from llmb.nodes.bench.worker.collective_timing import fill, wrong

RANKS = 3


def received(collective, sent, rank):
    """What a collective is, written out."""
    part = len(sent[0]) // RANKS
    match collective:
        case "all_reduce":
            return sum(sent)
        case "all_gather":
            return torch.cat(sent)
        case "reduce_scatter":
            return sum(sent)[rank * part : (rank + 1) * part]
        case "alltoall":
            return torch.cat([one[rank * part : (rank + 1) * part] for one in sent])
        case "sendrecv":
            return sent[(rank - 1) % RANKS]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch) -> None:
    """So that a buffer has several."""
    monkeypatch.setattr(worker, "BLOCK", 10)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_expected_is_what_the_collective_gives(collective) -> None:
    size = extent(collective, 480, RANKS)
    sent = [torch.zeros(size.sent) for _ in range(RANKS)]
    for rank, buffer in enumerate(sent):
        fill(buffer, sent_data(size, rank))
    for rank in range(RANKS):
        found = received(collective, sent, rank)
        assert len(found) == size.received
        pieces = expected_data(collective, size, rank, RANKS)
        assert sum(piece.count for piece in pieces) == size.received
        assert sum(wrong(found, piece) for piece in pieces) == 0
        spoiled = found.clone()
        spoiled[[0, 7, -1]] += 1
        assert sum(wrong(spoiled, piece) for piece in pieces) == 3
        # Data of another rank, a rank that is missing, and no data at all.
        other = received(collective, [*sent[1:], sent[0]], (rank + 1) % RANKS)
        if collective != "all_reduce":
            assert sum(wrong(other, piece) for piece in pieces) > 0
        missing = received(collective, [torch.zeros_like(one) if n == 1 else one for n, one in enumerate(sent)], rank)
        if collective != "sendrecv" or rank == 2:
            assert sum(wrong(missing, piece) for piece in pieces) > 0
        assert sum(wrong(torch.zeros_like(found), piece) for piece in pieces) == size.received


def test_sums_of_very_many_ranks_are_exact() -> None:
    (piece,) = expected_data("all_reduce", extent("all_reduce", 4000, 8000), 0, 8000)
    assert piece.weight * worker.BASES < 2**24


def job_of(*collectives, sizes=(64, 4096), **values) -> CollectiveJob:
    return CollectiveJob(device="cpu", collectives=collectives, sizes=sizes, warm_ups=1, iterations=2, **values)


@contextmanager
def alone(backend, device) -> Iterator[torch.device]:
    """A group of this process alone: every collective but send and receive works in it."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield device
    finally:
        dist.destroy_process_group()


@pytest.fixture
def cpu(monkeypatch) -> Iterator[torch.device]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone("gloo", torch.device("cpu")) as device:
        yield device


ALONE = tuple(name for name in COLLECTIVES if name != "sendrecv")


def test_every_row_is_checked_and_timed(cpu) -> None:
    told = []
    result = worker.run(job_of(*ALONE), cpu, told.append)
    assert [(row.collective, row.size_bytes) for row in result.rows] == [(n, s) for n in ALONE for s in (64, 4096)]
    assert [progress.number for progress in told] == list(range(8))
    for row in result.rows:
        assert (row.out_of_place is None) == (row.collective == "all_reduce")
        assert row.in_place and row.in_place.time_s > 0
        assert row.in_place.wrong == (None if row.collective == "alltoall" else 0)
        assert row.out_of_place is None or row.out_of_place.wrong == 0


def test_a_result_that_is_wrong_is_counted(cpu, monkeypatch) -> None:
    def spoiled(collective, sent, received, group):
        def call() -> None:
            received.copy_(sent)
            received[3:5] = 99

        return call

    monkeypatch.setattr(worker, "call_of", spoiled)
    (row,) = worker.run(job_of("all_gather", sizes=(64,)), cpu, lambda _: None).rows
    assert row.out_of_place and row.out_of_place.wrong == 2


def test_what_the_library_lacks_is_named_and_the_rest_is_measured(cpu, monkeypatch) -> None:
    def lacking(received, sent):
        raise RuntimeError("ProcessGroup does not support alltoall\nand more")

    monkeypatch.setattr(dist, "all_to_all_single", lacking)
    result = worker.run(job_of("alltoall", "all_reduce"), cpu, lambda _: None)
    assert {row.collective for row in result.rows} == {"all_reduce"}
    (missing,) = result.not_timed
    assert (missing.collective, missing.size_bytes) == ("alltoall", None)
    assert missing.reason == "ProcessGroup does not support alltoall" and not missing.out_of_memory


def test_a_failure_of_the_network_is_no_missing_collective(cpu, monkeypatch) -> None:
    def failing(tensor, op=None):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_to_all_single", lambda received, sent: failing(received))
    with pytest.raises(RuntimeError, match="Connection closed"):
        worker.run(job_of("alltoall"), cpu, lambda _: None)


@pytest.mark.parametrize("by_default", [True, False])
def test_sizes_that_do_not_fit_are_left_out_or_an_error(cpu, monkeypatch, by_default) -> None:
    monkeypatch.setattr(worker, "most_bytes", lambda device: 4095)
    result = worker.run(job_of("all_reduce", sizes=(64, 4096, 8192), limited_by_memory=by_default), cpu, lambda _: None)
    assert [row.size_bytes for row in result.rows] == [64]
    (missing,) = result.not_timed
    assert missing.size_bytes == 4096 and "do not fit" in missing.reason
    assert missing.out_of_memory != by_default


def test_a_device_that_cannot_be_used_is_reported(monkeypatch) -> None:
    def broken(job, say, gpu):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    monkeypatch.setattr(every_gpu, "run_job", broken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    report = every_gpu.measure(gpus_job("cuda", 1.0), 3, 11)
    assert (report.local_rank, report.rank, report.uuid, report.device) == (3, 11, None, None)
    assert report.timing.reason == "CUDA error: uncorrectable ECC error encountered"
    (file,) = gpu_files([report], (), "2026-01-01T00:00:00Z")
    assert file.measurements == () and file.not_measured[0].case == "local rank 3"


def test_a_gpu_that_torch_does_not_see_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    report = every_gpu.measure(gpus_job("cuda", 1.0), 7, 7)
    assert report.timing.seconds is None and "finds only 7 GPUs" in (report.timing.reason or "")


@pytest.mark.gpu
@pytest.mark.parametrize("collective", ALONE)
def test_nccl_gives_the_expected_data(needs, monkeypatch, collective) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device")
    monkeypatch.setenv("LOCAL_RANK", "0")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with alone("nccl", device):
        result = worker.run(job_of(collective).model_copy(update={"device": "cuda"}), device, lambda _: None)
    assert result.backend == "nccl" and result.ranks[0].bus_id
    assert all(way.wrong in (0, None) for row in result.rows for way in (row.in_place, row.out_of_place) if way)


@pytest.mark.gpu
def test_a_gpu_is_named_by_its_uuid(needs) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device")
    report = every_gpu.measure(gpus_job("cuda", 0.5), 0, 0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert report.uuid and report.uuid in listed
    assert report.timing.seconds is not None
