# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines as other programs write them)
"""``llmb trace`` and ``llmb nccl`` as their users call them."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from called_here import Done, call_llmb

from llmb.cli.main import load_command

TABLE = """# Collective test starting: all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float     sum      -1    18.46    0.06 {small:>7}      0    18.56    0.06    0.09      0
     1048576        262144     float     sum      -1    30.00   34.95 {large:>7}      0    30.00   34.95   61.17      3
# Avg bus bandwidth    : 62.7
"""
CALL = (
    "node7:4001:4123 [0] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f recvbuff 0x7f count 1048576 datatype 7 op 0 root 0"
    " comm 0x55 [nranks=8] stream 0x56\n"
)


def call(*words: object, code: int = 0) -> Done:
    done = call_llmb(*words)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    common = {"ph": "X", "pid": 0, "tid": 7}
    kernels = [
        ("a_gemm", 0, 60),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 90),
        ("<odd> & \x1b[31m name", 95, 96),
    ]
    events = [{**common, "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 100}]
    events += [
        {**common, "cat": "kernel", "name": name, "ts": start, "dur": end - start} for name, start, end in kernels
    ]
    path = tmp_path / "<a&b>.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_as_a_table(trace: Path) -> None:
    text = call("trace", trace).stdout
    assert re.search(r"<a&b>.json +3 +0.1 +0.0 +60.0 +0.0 +1.0 +0.0 +30.0 +9.0 +0.02 +0.005\n", text)
    assert re.search(r"all_reduce +n/a \(not in the trace\) +1 +0.05 +0.03 +0.02\n", text)
    assert "Longest kernels of <a&b>.json" in text
    assert "Unclassified kernels of <a&b>.json" in text
    assert "\x1b" not in text


def test_a_trace_as_json(trace: Path) -> None:
    document = call("trace", trace, "--json").document
    (rank,) = document["ranks"]
    assert (rank["rank"], rank["device"], document["slowest_rank"]) == (None, "gpu", None)
    assert [(item["name"], item["activity"]) for item in rank["unclassified"]] == [
        ("<odd> & \x1b[31m name", "unclassified")
    ]
    (step,) = rank["steps"]
    assert step["communication_exposed_s"] == pytest.approx(30e-6)
    assert step["shares"] == pytest.approx(
        {
            "attention": 0,
            "matrix_product": 0.6,
            "other": 0,
            "unclassified": 0.01,
            "cuda_graph": 0,
            "memory_copy": 0,
            "communication_exposed": 0.3,
            "idle": 0.09,
        }
    )


def test_a_picture_is_drawn_to_scale(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "steps.svg"
    call("trace", trace, "--picture", picture)
    root = ET.parse(picture).getroot()
    names = {"svg": "http://www.w3.org/2000/svg"}
    parts = {}
    for bar in root.findall("svg:rect", names):
        title = bar.find("svg:title", names)
        if title is not None and title.text:
            parts[title.text.partition(":")[0]] = float(bar.attrib["width"])
    whole = sum(parts.values())
    assert parts["matrix products"] / whole == pytest.approx(0.6, abs=1e-3)
    assert parts["communication, exposed"] / whole == pytest.approx(0.3, abs=1e-3)
    assert "<a&b>.json, step 3" in [text.text for text in root.findall("svg:text", names)]


def test_a_picture_that_cannot_be_written_is_an_error(trace: Path, tmp_path: Path) -> None:
    done = call("trace", trace, "--picture", tmp_path / "missing" / "steps.svg", code=3)
    assert "the file cannot be written" in done.stderr


def test_several_tables_of_one_test_are_compared(tmp_path: Path) -> None:
    for name, small, large in (("before.txt", "0.08", "60.00"), ("after.txt", "0.08", "45.00")):
        (tmp_path / name).write_text(TABLE.format(small=small, large=large))
    text = call("nccl", tmp_path / "before.txt", tmp_path / "after.txt").stdout
    assert re.search(r"1,048,576 +float +sum +60 +45 +0.75\n", text)
    assert "Wrong results in before.txt, after.txt." in text
    one = call("nccl", tmp_path / "before.txt").stdout
    assert re.search(r"1,048,576 +float +sum +30 +34.95 +60 +0 +30 +34.95 +61.17 +3\n", one)


def test_different_collectives_are_not_compared(tmp_path: Path) -> None:
    table = TABLE.format(small="0.08", large="60.00")
    for name, test in (("a.txt", "all_reduce"), ("b.txt", "all_gather"), ("c.txt", "all_reduce")):
        (tmp_path / name).write_text(table.replace("all_reduce", test))
    text = call("nccl", *(tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))).stdout
    assert "all_reduce: bus bandwidth in GB/s, out of place" in text
    assert "c.txt / first" in text
    assert "b.txt / first" not in text
    assert "all_gather, b.txt" in text


def test_tables_without_a_name_are_not_compared(tmp_path: Path) -> None:
    """As of an output whose beginning was lost."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TABLE.format(small="0.08", large="60.00").partition("\n")[2])
    text = call("nccl", tmp_path / "a.txt", tmp_path / "b.txt").stdout
    assert "nccl-tests, a.txt" in text
    assert "nccl-tests, b.txt" in text
    assert "/ first" not in text


def test_files_of_one_name_are_compared(tmp_path: Path) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "out.txt").write_text(TABLE.format(small="0.08", large="60.00"))
    assert (
        "after/out.txt / first" in call("nccl", tmp_path / "before" / "out.txt", tmp_path / "after" / "out.txt").stdout
    )


def test_values_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_text(TABLE.format(small="inf", large="-nan").replace("62.7", "nan"))
    (table,) = call("nccl", path, "--json").document["tests"]
    small, large = (row["out_of_place"] for row in table["rows"])
    assert (small["bus_gb_s"], small["not_finite"]) == (None, {"bus_gb_s": "inf"})
    assert (large["bus_gb_s"], large["not_finite"]) == (None, {"bus_gb_s": "-nan"})
    assert (table["average_bus_gb_s"], table["not_finite"]) == (None, {"average_bus_gb_s": "nan"})
    text = call("nccl", path).stdout
    assert re.search(r"1,024 +float +sum +18.46 +0.06 +inf +0", text)
    assert "Average bus bandwidth: nan GB/s." in text


def test_a_log_and_a_table_may_be_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_text(CALL * 3 + TABLE.format(small="0.08", large="60.00"))
    document = call("nccl", path, "--json").document
    assert (document["log"]["calls"], len(document["tests"][0]["rows"])) == (3, 2)
    assert document["log"]["collectives"][0]["bytes_per_call"] == 4 * 1048576
    text = call("nccl", path).stdout
    assert re.search(r"AllReduce +float32 +8 +n/a +1,048,576 +4 +3 +12\n", text)


WORDS = """node7:4001:4123 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
node7:4001:4123 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node7:4001:4123 [0] NCCL INFO Using network IB
node7:4001:4123 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA
"""


def test_the_network_is_shown_before_the_collectives(tmp_path: Path) -> None:
    log = tmp_path / "log.out"
    log.write_text(WORDS + CALL)
    text = call("nccl", log).stdout
    assert re.search(r"fabric +RoCE +node7\n", text)
    assert re.search(r"devices used +mlx5_1 +node7\n", text)
    assert re.search(r"NVLS +n/a +not in the log\n", text)
    assert text.index("Network") < text.index("Collectives:")
    found = call("nccl", log, "--json").document
    assert (found["network"]["fabric"], found["network"]["gpudirect"]) == ("RoCE", True)
    assert found["log"]["calls"] == 1


def test_lines_of_the_network_alone_are_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "nccl_network"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text(WORDS)
    (folder / "rank-8.log").write_text(WORDS.replace("node7", "node8"))
    text = call("nccl", tmp_path).stdout
    assert "node7, node8" in text
    assert "Collectives" not in text
    assert call("nccl", tmp_path, "--json").document["log"] is None


def test_a_log_of_another_program_tells_its_network(tmp_path: Path) -> None:
    steps = (f"Training epoch 0, iteration {step}/49 | train_step_timing in s: 1.{step:02}\n" for step in range(50))
    log = tmp_path / "log-other.out"
    log.write_text(WORDS + "".join(steps))
    (found,) = call("parse", log, "--format", "json").document["results"]
    assert (found["network"]["fabric"], found["network"]["faults"]) == ("RoCE", [])
    log.write_text(
        "".join(f"Training epoch 0, iteration {n}/49 | train_step_timing in s: 1.{n:02}\n" for n in range(50))
    )
    assert call("parse", log, "--format", "json").document["results"][0]["network"] is None


def test_nothing_of_nccl_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.out"
    path.write_text("Training epoch 0, iteration 0/4 | train_step_timing in s: 1\n")
    said = call("nccl", path, code=2).stderr
    assert "no NCCL output found" in said and "NCCL_DEBUG_SUBSYS" in said and str(path) in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "node7:1:1 [0] NCCL INFO Bootstrap: Using eth0\n" * 3,
            "3 NCCL lines without a network or a collective, such as 'NCCL INFO Bootstrap: Using eth0'",
        ),
        (
            "#   size  count  type  redop  root  time  algbw  busbw  #wrong\n   1,024  256  float\n",
            "a table without a row that fits its header: '# size count type redop root time algbw busbw #wrong'",
        ),
    ],
)
def test_what_of_nccl_is_not_read_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "log.out"
    path.write_text(text)
    assert f"no readable NCCL output: {says}\n" in call("nccl", path, code=2).stderr


def test_wrong_results_of_one_table_are_told_below_it(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    row = "   {}  256  float  sum  -1  100.00  10.00  17.50  {}  90.00  11.00  19.25  {}\n"
    header = "#  size  count  type  redop  root  cputime  algbw  busbw  #wrong  cputime  algbw  busbw  #wrong\n"
    path.write_text(header + row.format(1024, 0, 0) + row.format(2048, 3, 0) + row.format(4096, 1, "N/A"))
    printed = " ".join(call("nccl", path).stdout.split())
    assert "Wrong results in 2 rows. Times and bandwidths are of the host, not of the GPU." in printed
    assert "CPU time us" in printed


@pytest.mark.parametrize("name", ["trace", "nccl"])
def test_commands_show_examples(name: str) -> None:
    assert f"llmb {name}" in load_command(name).help
