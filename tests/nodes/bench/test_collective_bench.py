# SPDX-License-Identifier: Apache-2.0
"""Sizes, bandwidths and tables of collectives, against the definitions of nccl-tests."""

import pytest

from llmb.base.errors import UsageError
from llmb.nodes.bench.collective_bench import (
    CollectiveRequest,
    collective_job,
    collective_texts,
    measurement_file,
    parse_collectives,
    raise_if_wrong,
)
from llmb.nodes.bench.device_bench import bytes_of
from llmb.nodes.bench.protocol import (
    COLLECTIVES,
    CollectiveJob,
    CollectiveResult,
    CollectiveRow,
    DeviceReport,
    NotTimed,
    RankReport,
    Way,
    bus_factor,
    extent,
    extents,
    sizes_between,
)
from llmb.readers.nccl.nccl_tests import read_test_tables

DEVICE = DeviceReport(
    python="3.11", torch="2.13", cuda=None, cudnn=None, cudnn_number=None, nccl=None, driver=None,
    device="a CPU", device_memory_gib=None, cpu_threads=1,
)  # fmt: skip
ASKED = CollectiveRequest(collectives=COLLECTIVES, least=8, most=None, factor=2, iterations=20, warm_ups=5)


def result_of(*rows, ranks=4, missing=(), nodes=1) -> CollectiveResult:
    reports = tuple(
        RankReport(rank=n, node=f"n{n * nodes // ranks}", local_rank=n, pid=100 + n, device="a CPU", bus_id=None)
        for n in range(ranks)
    )
    return CollectiveResult(backend="gloo", device=DEVICE, ranks=reports, rows=rows, not_timed=missing)


def in_place_row(size, seconds, wrong) -> CollectiveRow:
    way = Way(time_s=seconds, wrong=wrong)
    return CollectiveRow(collective="all_reduce", size_bytes=size, count=size // 4, out_of_place=None, in_place=way)


def job_of(*sizes) -> CollectiveJob:
    return CollectiveJob(device="cpu", collectives=COLLECTIVES, sizes=sizes, warm_ups=5, iterations=20)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("alltoall", 0.875), ("sendrecv", 1)],
)
def test_the_bus_factors_of_eight_ranks_are_those_of_nccl_tests(collective, factor) -> None:
    assert bus_factor(collective, 8) == factor


@pytest.mark.parametrize(
    ("collective", "count", "sent", "received"),
    [
        ("all_reduce", 262, 262, 262),
        ("sendrecv", 262, 262, 262),
        ("all_gather", 84, 84, 252),
        ("reduce_scatter", 84, 252, 84),
        ("alltoall", 84, 252, 252),
    ],
)
def test_parts_of_ranks_are_equal_and_multiples_of_16_bytes(collective, count, sent, received) -> None:
    found = extent(collective, 1050, 3)
    assert (found.count, found.sent, found.received) == (count, sent, received)
    assert found.size_bytes == 4 * max(sent, received)


def test_sizes_too_small_for_all_ranks_are_left_out_and_equal_ones_come_once() -> None:
    sizes = tuple(sizes_between(8, 300, 2))
    assert sizes == (8, 16, 32, 64, 128, 256)
    assert [one.size_bytes for one in extents("all_reduce", sizes, 4)] == list(sizes)
    assert [one.size_bytes for one in extents("alltoall", sizes, 4)] == [64, 128, 256]
    assert [one.size_bytes for one in extents("all_gather", (100, 110, 130), 4)] == [64, 128]


def test_the_reader_of_nccl_tests_reads_every_table_back(tmp_path) -> None:
    big = 16 * 2**30
    rows = (
        in_place_row(8, 1.234e-5, 0),
        in_place_row(big, 0.0625, 7),
        CollectiveRow(
            collective="alltoall", size_bytes=2**20, count=2**16,
            out_of_place=Way(time_s=2**20 / 1e9 / 12.5, wrong=0), in_place=Way(time_s=123.456, wrong=None),
        ),
    )  # fmt: skip
    path = tmp_path / "t.txt"
    path.write_text("\n".join(collective_texts(job_of(8, 32), result_of(*rows), "0.1.0")))
    reduced, exchanged = read_test_tables(path)
    assert (reduced.name, reduced.ranks, exchanged.name, exchanged.ranks) == ("all_reduce", 4, "alltoall", 4)
    small, large = reduced.rows
    assert (small.size_bytes, small.count, small.datatype, small.reduction) == (8, 2, "float", "sum")
    assert small.out_of_place is None and small.in_place and small.in_place.time_us == 12.34
    assert (large.size_bytes, large.count, large.in_place and large.in_place.wrong) == (big, big // 4, 7)
    assert large.in_place and large.in_place.algorithm_gb_s == pytest.approx(big / 1e9 / 0.0625, abs=0.005)
    assert large.in_place.bus_gb_s == pytest.approx(1.5 * big / 1e9 / 0.0625, abs=0.005)
    assert reduced.average_bus_gb_s == pytest.approx(1.5 / 2 * (big / 0.0625 + 8 / 1.234e-5) / 1e9, rel=1e-5)
    (row,) = exchanged.rows
    assert row.reduction is None and row.root is None
    assert row.out_of_place and (row.out_of_place.algorithm_gb_s, row.out_of_place.bus_gb_s) == (12.5, 9.38)
    assert (
        row.in_place and row.in_place.wrong is None and row.in_place.time_us == pytest.approx(123.456e6, rel=0.05)
    )  # 1.2e+08, as nccl-tests has it


def test_the_table_has_the_columns_and_widths_of_nccl_tests() -> None:
    row = CollectiveRow(
        collective="all_gather", size_bytes=2048, count=128,
        out_of_place=Way(time_s=2e-5, wrong=0), in_place=Way(time_s=3e-5, wrong=0),
    )  # fmt: skip
    (text,) = collective_texts(job_of(8, 16, 32), result_of(row), "0.1.0")
    lines = text.splitlines()
    assert lines[1] == "# Collective test starting: all_gather_perf"
    assert "minBytes 8 maxBytes 32 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1" in lines[2]
    assert lines[5] == "#  Rank  0 Group  0 Pid    100 on         n0 device  0 [cpu] a CPU"
    # As nccl-tests 2.19 prints them.
    names = "#       size         count      type   redop    root"
    figures = "     time   algbw   busbw  #wrong"
    assert lines[10] == f"#{' ' * 62}out-of-place{' ' * 23}in-place{' ' * 10}"
    assert lines[11] == f"{names}{figures}{figures} "
    assert lines[12].split() == ["#", "(B)", "(elements)", *2 * ("(us)", "(GB/s)", "(GB/s)")]
    ways = "    20.00    0.10    0.08       0    30.00    0.07    0.05       0"
    assert lines[13] == f"        2048           128     float    none      -1{ways}"
    assert "# Out of bounds values : 0 OK" in lines


def test_measurements_have_bandwidths_and_name_what_was_not_measured() -> None:
    row = CollectiveRow(
        collective="reduce_scatter", size_bytes=2**20, count=2**17,
        out_of_place=Way(time_s=1e-3, wrong=0), in_place=Way(time_s=2e-3, wrong=3),
    )  # fmt: skip
    missing = NotTimed(collective="alltoall", size_bytes=None, reason="not supported")
    found = measurement_file(
        job_of(8), result_of(row, missing=[missing], ranks=2, nodes=2), ("llmb",), "2026-01-01T00:00:00Z"
    )
    out, place = found.measurements
    assert (out.shape, place.shape, out.ranks, out.node) == ("out of place, 2 nodes", "in place, 2 nodes", 2, "n0")
    assert out.bandwidth_gb_per_s == pytest.approx(1.048576) and out.bus_bandwidth_gb_per_s == pytest.approx(0.524288)
    assert (found.not_measured[0].case, found.not_measured[0].reason) == ("alltoall", "not supported")
    with pytest.raises(Exception, match=r"wrong values.*reduce_scatter of 1,048,576 bytes \(in place, 2 nodes\): 3"):
        raise_if_wrong(found)


def test_the_default_largest_size_is_the_devices_and_gives_way_to_memory() -> None:
    on_gpus, on_cpu = collective_job(ASKED, "cuda"), collective_job(ASKED, "cpu")
    assert (on_gpus.sizes[0], on_gpus.sizes[-1], on_cpu.sizes[-1]) == (8, 16 * 2**30, 16 * 2**20)
    assert on_gpus.limited_by_memory and on_cpu.limited_by_memory


def test_collectives_are_named_as_people_do() -> None:
    assert parse_collectives([]) == COLLECTIVES
    assert parse_collectives(["send-recv", "All_Reduce", "all_to_all"]) == ("all_reduce", "alltoall", "sendrecv")
    with pytest.raises(UsageError, match="unknown collective 'broadcast'"):
        parse_collectives(["broadcast"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("8B", 8), ("64KiB", 65_536), ("64kb", 64_000), ("1.5 GiB", 3 * 2**29), ("16GiB", 2**34), ("1TB", 10**12)],
)
def test_sizes(text, size) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "5", "GiB", "-1GB", "0GB", "0.1B", "5iB", "5G", "5 Gi B"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(UsageError, match="is not a valid size"):
        bytes_of(text)
