# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines and names as other programs write them)
"""Tables and JSON as nccl-tests and rccl-tests write them, from before 2.12 to 2.20."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.readers.nccl.nccl_tests import Bandwidth, TestTable, read_test_tables, same_tests
from llmb.reports.trace_report import nccl_tables

START = """# nccl-tests version 2.19.6 nccl-headers=22905 nccl-library=22905
# Collective test starting: {name}
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 866559 on      node7 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid 866560 on      node7 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#
"""
TABLE = """#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    18.46    0.06    0.08      0    18.56    0.06    0.09      0
node7:866559:866559 [0] NCCL INFO AllReduce: opCount 3 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 comm 0x3 [nranks=2] stream 0x4
   134217728      33554432     float     sum      -1   2145.3   62.56  125.12      0   2138.1   62.78  125.56    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 62.7
#
"""
END = "# Collective test concluded: all_reduce_perf\n"


def tables(tmp_path: Path, text: str) -> list[TestTable]:
    path = tmp_path / "output.txt"
    path.write_text(text)
    return read_test_tables(path)


def test_columns_are_read_by_their_headers(tmp_path: Path) -> None:
    (table,) = tables(tmp_path, START.format(name="all_reduce_perf") + TABLE + END)
    assert (table.source, table.name, table.ranks, table.average_bus_gb_s) == ("output.txt", "all_reduce", 2, 62.7)
    first, last = table.rows
    assert (first.size_bytes, first.count, first.datatype, first.reduction, first.root) == (
        1024,
        256,
        "float",
        "sum",
        None,
    )
    assert first.out_of_place == Bandwidth(18.46, 0.06, 0.08, 0)
    assert first.in_place == Bandwidth(18.56, 0.06, 0.09, 0)
    assert last.in_place == Bandwidth(2138.1, 62.78, 125.56, None)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("", "", None),
        ("62.56", "6.25", "134,217,728 bytes in 2145.3 us are 62.56 GB/s, not 6.25"),
        ("2138.1", "2.1381", "134,217,728 bytes in 2.1381 us are 6.277e+04 GB/s, not 62.78"),
        (": 62.7", ": 125.3", "the average of the rows is 62.71 GB/s, not 125.3"),
    ],
)
def test_figures_that_contradict_each_other_are_named(
    tmp_path: Path, before: str, after: str, problem: str | None
) -> None:
    (table,) = tables(tmp_path, TABLE.replace(before, after) if before else TABLE)
    assert table.contradiction == problem
    shown = "".join(table.caption or "" for table in nccl_tables(None, [table]))
    assert ("Contradiction" in shown, (problem or "") in shown) == (problem is not None, True)


def test_several_tests_in_one_output_are_several_tables(tmp_path: Path) -> None:
    text = "".join(START.format(name=name) + TABLE for name in ("all_reduce_perf", "all_gather_perf"))
    assert [(table.name, len(table.rows), table.ranks) for table in tables(tmp_path, text)] == [
        ("all_reduce", 2, 2),
        ("all_gather", 2, 2),
    ]


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        (
            "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
            "        1024           256     uint8    none       3    18.46    0.06    0.08      0    18.56    0.06    0.08    N/A",
            (None, 3, Bandwidth(18.46, 0.06, 0.08, 0), Bandwidth(18.56, 0.06, 0.08, None)),
        ),
        (  # with the distribution of single iterations (-I)
            "#       size         count      type   redop    root     time   algbw   busbw #wrong   i_min   i_max   i_p99   i_cv%"
            "     time   algbw   busbw #wrong   i_min   i_max   i_p99   i_cv%",
            "        1024           256     float     sum      -1    18.46    0.06    0.08      0    17.1    19.9    19.8     2.1"
            "    18.56    0.06    0.08      0    17.1    19.9    19.8     2.1",
            ("sum", None, Bandwidth(18.46, 0.06, 0.08, 0), Bandwidth(18.56, 0.06, 0.08, 0)),
        ),
        (  # before 2.12: an error in place of the number of wrong results, and no column for the root
            "#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error",
            "  1073741824     268435456     float     sum    79531   13.50   26.58  2e-06    79371   13.53   26.63  2e-06",
            ("sum", None, Bandwidth(79531, 13.5, 26.58, None), Bandwidth(79371, 13.53, 26.63, None)),
        ),
        (  # a broadcast before 2.12
            "#       size         count      type    root     time   algbw   busbw  error     time   algbw   busbw  error",
            "        1024           256     uint8       3    18.46    0.06    0.08  0e+00    18.56    0.06    0.08  0e+00",
            (None, 3, Bandwidth(18.46, 0.06, 0.08, None), Bandwidth(18.56, 0.06, 0.08, None)),
        ),
        (  # an all-gather before 2.12
            "#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error",
            "        1024           256     uint8    18.46    0.06    0.08  0e+00    18.56    0.06    0.08    N/A",
            (None, None, Bandwidth(18.46, 0.06, 0.08, None), Bandwidth(18.56, 0.06, 0.08, None)),
        ),
        (  # an all-gather of some versions leaves the reduction empty
            "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
            "        1024           256     float              -1    18.46    0.06    0.08      0    18.56    0.06    0.08      0",
            (None, None, Bandwidth(18.46, 0.06, 0.08, 0), Bandwidth(18.56, 0.06, 0.08, 0)),
        ),
        (  # in place alone
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
            "        1024           256     float     sum      -1                                    90.00   11.00   19.25       0",
            ("sum", None, None, Bandwidth(90, 11, 19.25, 0)),
        ),
        (  # out of place alone
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
            "        1024           256     float     sum      -1    90.00   11.00   19.25       0",
            ("sum", None, Bandwidth(90, 11, 19.25, 0), None),
        ),
        (  # rccl-tests leave the columns out of place away on request
            "#                                                        in-place\n"
            "#       size         count      type   redop    root     time   algbw   busbw #wrong",
            "        1024           256     float     sum      -1    18.46    0.06    0.08      0",
            ("sum", None, None, Bandwidth(18.46, 0.06, 0.08, 0)),
        ),
        (  # the time of the host (-C 1)
            "#       size         count      type   redop    root  cputime   algbw   busbw  #wrong  cputime   algbw   busbw  #wrong ",
            "        1024           256     float     sum      -1   100.00   10.00   17.50       0    90.00   11.00   19.25       0",
            ("sum", None, Bandwidth(None, 10, 17.5, 0, 100), Bandwidth(None, 11, 19.25, 0, 90)),
        ),
        (  # a time stands at the end (-T)
            "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw"
            "   busbw #wrong           timestamp",
            "      262144         65536     float     sum      -1    195.0    1.34    1.34      0    194.0    1.35"
            "    1.36      0  2026-05-13 18:01:41",
            ("sum", None, Bandwidth(195, 1.34, 1.34, 0), Bandwidth(194, 1.35, 1.36, 0)),
        ),
    ],
)
def test_columns_of_options(tmp_path: Path, header: str, row: str, expected: tuple[object, ...]) -> None:
    (table,) = tables(tmp_path, f"{header}\n{row}\n")
    (only,) = table.rows
    assert (only.reduction, only.root, only.out_of_place, only.in_place) == expected
    assert (table.name, table.ranks, table.average_bus_gb_s) == (None, None, None)


@pytest.mark.parametrize("label", ["", "0: ", "[1,0]<stdout>:"])
def test_rows_in_place_alone_are_told_by_their_columns_behind_labels(tmp_path: Path, label: str) -> None:
    text = TABLE.replace("18.46    0.06    0.08      0", " " * 28)
    (table,) = tables(tmp_path, "".join(f"{label}{line}\n" for line in text.splitlines() if "NCCL" not in line))
    first, last = table.rows
    assert (first.out_of_place, first.in_place) == (None, Bandwidth(18.56, 0.06, 0.09, 0))
    assert last.out_of_place == Bandwidth(2145.3, 62.56, 125.12, 0)


@pytest.mark.parametrize("label", ["", "0: "])
def test_a_command_names_the_test_of_a_table_without_a_name(tmp_path: Path, label: str) -> None:
    text = "+ srun --label ./build/all_reduce_perf_mpi -b 8\n"
    text += "".join(f"{label}{line}\n" for line in RCCL.splitlines())
    assert [table.name for table in tables(tmp_path, text)] == ["all_reduce"]


def test_tests_of_mpi_have_the_same_name(tmp_path: Path) -> None:
    found = tables(tmp_path, START.format(name="all_reduce_perf_mpi") + TABLE + END)
    other = tables(tmp_path, START.format(name="all_reduce_perf") + TABLE + END)
    assert (found[0].name, len(same_tests([*found, replace(other[0], source="other")]))) == ("all_reduce", 1)


def test_bandwidths_of_the_host_are_compared_with_none_of_the_gpu(tmp_path: Path) -> None:
    text = START.format(name="all_reduce_perf") + TABLE
    (gpu,) = tables(tmp_path, text)
    (host,) = tables(tmp_path, text.replace("    time", " cputime"))
    assert len(same_tests([gpu, replace(host, source="other")])) == 2


JSON = {
    "version": 2,
    "args": ["./build/all_reduce_perf_mpi"],
    "nccl_version": 23102,
    "config": {"devices": [{"rank": 0}, {"rank": 1}]},
    "results": [
        {
            "size": 1024,
            "count": 256,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
            "out_of_place": {"time": 100.0, "alg_bw": 10.0, "bus_bw": 17.5, "nwrong": 0.0},
            "in_place": {"time": 90.0, "alg_bw": 11.0, "bus_bw": 19.25, "nwrong": 2.0},
        }
    ],
    "average_bus_bandwidth": {"bandwidth": 18.3, "okay": "unchecked"},
}


def test_json_of_a_test_is_read(tmp_path: Path) -> None:
    (table,) = tables(tmp_path, json.dumps(JSON))
    assert (table.name, table.ranks, table.average_bus_gb_s) == ("all_reduce", 2, 18.3)
    (row,) = table.rows
    assert (row.size_bytes, row.count, row.datatype, row.reduction, row.root) == (1024, 256, "float", "sum", None)
    assert (row.out_of_place, row.in_place) == (Bandwidth(100, 10, 17.5, 0), Bandwidth(90, 11, 19.25, 2))


def test_json_of_a_test_that_was_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid JSON of nccl-tests"):
        tables(tmp_path, json.dumps(JSON)[:-20])


def test_labels_of_srun_tell_outputs_apart(tmp_path: Path) -> None:
    """``srun --label``, with one test in each of two tasks whose lines alternate."""
    texts = [START.format(name=name) + TABLE + END for name in ("all_reduce_perf", "all_gather_perf")]
    lines = zip(*(text.splitlines() for text in texts), strict=True)
    mixed = "".join(f"{task:2}: {line}\n" for pair in lines for task, line in zip((0, 11), pair, strict=True))
    found = tables(tmp_path, mixed)
    assert [(table.name, table.ranks, len(table.rows), table.average_bus_gb_s) for table in found] == [
        ("all_reduce", 2, 2, 62.7),
        ("all_gather", 2, 2, 62.7),
    ]
    assert found[0].rows == tables(tmp_path, START.format(name="all_reduce_perf") + TABLE)[0].rows


RCCL = """# nThread 1 nGpus 8 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
rccl-tests: Version develop:a1b2c3d
# Using devices
#   Rank  0 Pid   4011 on    gpu-01 device  0 [0000:0c:00.0] AMD Instinct MI300X
#   Rank  1 Pid   4011 on    gpu-01 device  1 [0000:22:00.0] AMD Instinct MI300X
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    18.46    0.06    0.08      0    18.56    0.06    0.09      0
# Errors with asterisks indicate errors that have exceeded the maximum threshold.
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.085 OK
#
"""


@pytest.mark.parametrize("label", ["", "0: ", " 3: ", "[1,0]<stdout>:", "node7: "])
def test_a_table_of_rccl_tests_is_read(tmp_path: Path, label: str) -> None:
    (table,) = tables(tmp_path, "".join(f"{label}{line}\n" for line in RCCL.splitlines()))
    assert (table.ranks, table.average_bus_gb_s) == (2, 0.085)
    assert table.rows[0].in_place == Bandwidth(18.56, 0.06, 0.09, 0)


@pytest.mark.parametrize("average", ["nan", "-nan", "inf"])
def test_an_average_that_is_not_finite_ends_its_table(tmp_path: Path, average: str) -> None:
    text = (
        START.format(name="all_reduce_perf")
        + TABLE.replace(": 62.7", f": {average}")
        + START.format(name="all_gather_perf")
        + TABLE
    )
    first, second = tables(tmp_path, text)
    assert (first.name, len(first.rows), first.not_finite) == ("all_reduce", 2, {"average_bus_gb_s": average})
    assert (second.name, len(second.rows)) == ("all_gather", 2)


@pytest.mark.parametrize("odd", ["--", "one", "1e999999", "\u00b2"])
def test_words_in_place_of_numbers(tmp_path: Path, odd: str) -> None:
    text = START.format(name="all_reduce_perf") + TABLE.replace("18.46", odd).replace("1024 ", f"{odd} ").replace(
        ": 62.7", f": {odd}"
    )
    assert len(tables(tmp_path, text)[0].rows) == 1


def test_a_long_line_takes_no_quadratic_time(tmp_path: Path) -> None:
    text = TABLE + "1" + " " * 200_000 + "\n" + "x" * 200_000 + "_perfs\n" + ("#" + " " * 4000) * 50
    assert len(tables(tmp_path, text)[0].rows) == 2


def test_a_text_that_only_speaks_of_bandwidth_is_no_table(tmp_path: Path) -> None:
    text = "busbw is what counts\n#  size count type redop root time\n        1024           256     float     sum\n"
    assert tables(tmp_path, text) == []


HEAD = START.format(name="all_gather_perf")
NO_AVERAGE = "".join(line for line in TABLE.splitlines(keepends=True) if "Avg" not in line)
SIZES = "".join(
    f"{size:12d} {size // 4:12d}     float     sum      -1    18.46    0.06    0.08      0    18.56    0.06    0.09      0\n"
    for size in (1024, 2048, 4096)
)
COLUMNS = "".join(TABLE.splitlines(keepends=True)[:3])


@pytest.mark.parametrize(
    "between", [END + HEAD, HEAD, HEAD.partition("\n")[2], "# Using devices\n", COLUMNS], ids=range(5)
)
def test_a_table_without_its_last_line_is_no_part_of_the_next(tmp_path: Path, between: str) -> None:
    """As of a test that was killed."""
    first, second = tables(tmp_path, START.format(name="all_reduce_perf") + NO_AVERAGE + between + TABLE)
    assert (first.name, len(first.rows), first.average_bus_gb_s) == ("all_reduce", 2, None)
    assert (second.name != "all_reduce", len(second.rows), second.average_bus_gb_s) == (True, 2, 62.7)


def test_sizes_of_several_types_are_one_table(tmp_path: Path) -> None:
    (table,) = tables(tmp_path, COLUMNS + SIZES + SIZES.replace("float", " half") + SIZES.replace("sum", "max"))
    assert len(table.rows) == 9


def test_cycles_of_a_test_are_tables_without_the_average_of_all(tmp_path: Path) -> None:
    text = START.format(name="all_reduce_perf") + COLUMNS + SIZES + "# Testing 2 cycle.\n" + SIZES
    found = tables(tmp_path, text + "# Avg bus bandwidth    : 0.085\n")
    assert [(table.name, table.ranks, len(table.rows), table.average_bus_gb_s) for table in found] == [
        ("all_reduce", 2, 3, None)
    ] * 2
