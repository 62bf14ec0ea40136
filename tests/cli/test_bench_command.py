# SPDX-License-Identifier: Apache-2.0
"""``llmb bench``: measured in other processes, kept, compared with the measurement before."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from shown_tables import shown_lines
from typer.testing import CliRunner

from llmb.base.errors import RunFailed
from llmb.cli.bench import app
from llmb.cli.bench_jobs import save_and_show
from llmb.cli.main import app as main_app
from llmb.cli.main import exit_code_of
from llmb.nodes.bench.device_bench import raise_if_incomplete
from llmb.nodes.bench.measurements import (
    Measurement,
    MeasurementFile,
    NotMeasured,
    read_measurements,
    write_measurements,
)
from llmb.readers.nccl.nccl_tests import read_test_tables
from llmb.reports.bench_report import history_tables, measurement_tables
from llmb.runs.folder import NotWritable

QUICK = ("bench", "gemm", "--device", "cpu", "--repeat", "3", "--seconds", "0", "--dtype", "bf16,fp32")
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "alltoall": 1}


@pytest.fixture
def llmb(llmb_program, tmp_path):
    return partial(llmb_program, tmp_path, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_products_are_measured_kept_and_compared(llmb, tmp_path) -> None:
    document, second = json.loads(llmb(*QUICK, "--json").stdout), llmb(*QUICK)
    rows = document["measurements"]
    assert {(row["case"], row["dtype"]) for row in rows} >= {
        (f"{name}_{way}", dtype)
        for name in ("qkv", "attention_output", "gate_up", "down", "logits")
        for way in ("forward", "dgrad", "wgrad")
        for dtype in ("bf16", "fp32")
    }
    for row in rows:
        assert row["repetitions"] == 3 and row["cpu_threads"] == 1
        assert 0 < row["fastest_s"] <= row["time_s"] <= row["slowest_s"]
        m, k, n = map(int, row["shape"].split(" x "))
        assert row["tflops"] == pytest.approx(2 * m * k * n / row["time_s"] / 1e12)
        assert row["peak_pct"] is None and "no peak for" in row["peak_reason"]
    assert "pretrain_llama3.1 tiny" in document["recipe"]
    assert document["command"][:3] == ["llmb", "bench", "gemm"]
    kept = read_measurements(tmp_path)
    assert [file.model_dump(mode="json")["node"] for file in kept] == [document["node"]] * 2
    assert kept[0].measurements[0].time_s == rows[0]["time_s"]
    lines = second.stdout.splitlines()
    assert lines[0] == (
        "shapes of pretrain_llama3.1 tiny bf16 on 1 x cpu, MBS 1, sequence length 128 (the default; see -w and -s)"
    )
    assert lines[1].startswith("Matrix products of pretrain_llama3.1 tiny, ")
    assert "saved to " in second.stderr
    listed = json.loads(llmb("bench", "list", "--json").stdout)["changes"]
    assert len(listed) == len(rows) and all(change["previous"] for change in listed)
    first_s, second_s = (file.measurements[0].time_s for file in kept)
    assert listed[0]["change_pct"] == pytest.approx(100 * (first_s / second_s - 1))


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (("attention", "-w", "pretrain_llama3.1", "-s", "tiny"), {"causal_forward", "causal_backward"}),
        (("memory", "--size", "64KiB", "--size", "1MB"), {"copy"}),
        (("launch",), {"host"}),
    ],
)
def test_the_other_parts_are_measured(llmb, arguments, cases) -> None:
    seconds = () if arguments[0] == "launch" else ("--seconds", "0.2")
    done = llmb("bench", *arguments, "--device", "cpu", "--repeat", "3", "--json", *seconds)
    rows = json.loads(done.stdout)["measurements"]
    assert {row["case"] for row in rows} == cases
    assert {row["sustained"] for row in rows} == ({False} if arguments[0] == "launch" else {False, True})
    if arguments[0] == "memory":
        assert {row["size_bytes"] for row in rows} == {65_536, 1_000_000}
        assert all(
            row["bandwidth_gb_per_s"] == pytest.approx(2 * row["size_bytes"] / row["time_s"] / 1e9) for row in rows
        )


def test_out_of_memory_names_the_shape_after_what_was_measured(llmb) -> None:
    sizes = ("--size", "64KiB", "--size", "1000TB")
    done = llmb("bench", "memory", "--device", "cpu", *sizes, "--seconds", "0", "--json", code=4)
    assert [row["size_bytes"] for row in json.loads(done.stdout)["measurements"]] == [65_536]
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["what"] == "out of memory: copy 1,000,000,000,000,000 bytes"
    assert error["where"].startswith("it needs 2e+06 GB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGTERM, 130, "interrupted by SIGTERM; nothing was saved"),
        pytest.param(
            signal.SIGKILL,
            4,
            "while measuring copy of 65,536 bytes, for 600 s, was killed by signal 9",
            marks=pytest.mark.measured,
        ),
    ],
)
def test_an_end_from_outside_leaves_nothing_behind(tmp_path, number, code, text) -> None:
    """SIGTERM, which Ctrl-C is like, goes to the command; SIGKILL, as the kernel sends it, to the one that measures."""
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    command = [sys.executable, "-m", "llmb.cli.main", "bench", "memory", "--device", "cpu", "--size", "64KiB"]
    command += ["--seconds", "600"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = []
    while not said or "for 600 s" not in said[-1]:
        line = process.stderr.readline()
        assert line, said
        said.append(line)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if number == signal.SIGTERM else int(child), number)
    _, err = process.communicate()
    assert process.returncode == code
    assert text in err and "Traceback" not in err
    assert not Path(f"/proc/{child}").exists()
    assert read_measurements(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("gemm --dtype fp9", 2, "unknown dtype 'fp9'"),
        ("gemm -w pretrain_qwen3 -s 30b --gpu-type gb300", 2, "mxfp8 cannot be measured"),
        ("gemm --dtype bf16,bf16", 2, "contains a dtype twice"),
        ("gemm -s 8b", 2, "--size requires --workload"),
        ("attention --dtype fp8", 2, "not computed in fp8"),
        ("memory --size many", 2, "'many' is not a valid size"),
        ("collectives --ranks 1 --device cpu", 2, "collectives need at least two ranks"),
        ("collectives --min-size 1GiB --device cpu", 2, "above the maximum"),
        ("collectives --min-size 8", 2, "'8' is not a valid size"),
        ("collectives --experts", 2, "--experts requires a recipe"),
        ("collectives --ep 2", 2, "--ep is only for --experts"),
        ("collectives alltoall --experts -w pretrain_mixtral", 2, "does not accept COLLECTIVE"),
        ("collectives --experts -w pretrain_mixtral -s tiny --scale 2 --ep 1 --device cpu", 2, "because EP is 1"),
        ("collectives --experts -w pretrain_mixtral -s tiny --scale 2 --ep 2 --device cpu --ranks 3", 2, "over EP 2"),
        ("collectives --pairwise --experts -w x", 2, "--pairwise cannot be combined with --experts, --workload"),
        ("collectives --wait", 2, "--wait requires a queued job"),
        ("gpus --dry-run", 2, "--dry-run requires a queued job"),
        ("list --benchmark gem", 2, "did you mean 'gemm'?"),
        ("transfer", 3, "  do:    "),
        ("gemm --device cuda", 3, "  do:    "),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(monkeypatch, tmp_path, capsys, words, code, said) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert exit_code_of(main_app, ["bench", *words.split()]) == code
    assert said in capsys.readouterr().err


def test_an_empty_list_says_how_to_measure(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    shown = CliRunner().invoke(app, ["list", "--benchmark", "gemm"]).stdout
    assert shown.startswith(f"No measurement of gemm in {tmp_path}") and "llmb bench gemm" in shown


def gpu_row(case="shared_gate_up_forward", **values):
    return Measurement(
        benchmark="gemm", case=case, shape="16384 x 16384 x 106496", dtype="bf16", node="node-17",
        device="NVIDIA H100 80GB HBM3", time_s=7.1e-2, repetitions=20, tflops=805.3, peak_tflops=989.0, **values,
    )  # fmt: skip


def gpu_file(at="2026-11-22T10:00:00+00:00", **values):
    rows = (gpu_row(), gpu_row("down_wgrad").model_copy(update={"dtype": "fp8"}), gpu_row(sustained=True))
    return MeasurementFile(node="node-17", measured_at=at, command=("llmb",), software={}, measurements=rows, **values)


def test_tables_of_a_gpu_fit_80_columns_one_line_a_row() -> None:
    shown = shown_lines(measurement_tables(gpu_file(), "Matrix products of x"))
    assert max(map(len, shown)) <= 80
    (row,) = (line for line in shown if line.startswith("down_wgrad"))
    assert row.split()[-4:] == ["fp8", "71", "805.3", "81.4"]
    assert len([line for line in shown if line.startswith("shared_gate_up_forward")]) == 2, "a burst, and sustained"


def test_the_history_of_a_gpu_fits_80_columns_and_shows_the_change(tmp_path) -> None:
    faster = gpu_file("2026-11-23T10:00:00+00:00")
    rows = tuple(row.model_copy(update={"time_s": row.time_s / 1.1}) for row in faster.measurements)
    for file in (gpu_file(), faster.model_copy(update={"measurements": rows})):
        write_measurements(tmp_path, file)
    tables = history_tables(read_measurements(tmp_path), None, tmp_path)
    shown = shown_lines(tables)
    assert max(map(len, shown)) <= 80
    assert shown[0] == "gemm on node node-17, NVIDIA H100 80GB HBM3, 2026-11-23 10:00 UTC"
    assert [line.split()[-1] for line in shown if line.startswith("down_wgrad")] == ["+10.0"]


def test_what_a_device_cannot_compute_is_listed_and_is_no_error() -> None:
    missing = NotMeasured(benchmark="gemm", case="qkv_forward", shape="1 x 2 x 3", dtype="fp8", reason="no FP8 here")
    file = gpu_file(not_measured=(missing,))
    *_, last = measurement_tables(file, "Matrix products of x")
    assert last.rows == [("qkv_forward", "1 x 2 x 3", "fp8", "no FP8 here")]
    raise_if_incomplete(file)
    with pytest.raises(RunFailed, match="nothing could be measured") as error:
        raise_if_incomplete(file.model_copy(update={"measurements": ()}))
    assert error.value.where == "no FP8 here"


@pytest.mark.parametrize(
    ("benchmark", "advice"), [("gemm", "--mbs"), ("memory", "--size"), ("collectives", "--max-size")]
)
def test_without_memory_the_advice_names_an_option_of_that_command(benchmark, advice) -> None:
    missing = NotMeasured(benchmark=benchmark, case="x", reason="too large", out_of_memory=True)
    with pytest.raises(RunFailed, match="out of memory: x") as error:
        raise_if_incomplete(gpu_file(not_measured=(missing,)))
    assert error.value.do and advice in error.value.do


def test_a_result_that_cannot_be_saved_is_shown(tmp_path) -> None:
    kept, shown = tmp_path / ".llmb", []
    kept.write_text("a file where the folder should be")
    with pytest.raises(NotWritable):
        save_and_show(tmp_path, [gpu_file()], lambda: shown.append(True))
    assert shown
    kept.unlink()
    (path,) = save_and_show(tmp_path, [gpu_file()], lambda: shown.append(True))
    assert Path(path).is_file() and len(shown) == 2


def test_a_busy_machine_is_told() -> None:
    calm, busy = (gpu_row(fastest_s=7.1e-2 / factor) for factor in (1.5, 3.0))
    for row, told in ((calm, False), (busy, True)):
        (table,) = measurement_tables(gpu_file().model_copy(update={"measurements": (row,)}), "Matrix products of x")
        assert ("up to 3 times faster" in table.caption) is told


def bus_factor(collective, ranks):
    """By hand: what each rank has to send, over the size."""
    return FACTORS[collective] * (ranks - 1) / ranks if collective in FACTORS else 1


def check_rows(document, ranks, iterations):
    for row in document["measurements"]:
        assert row["ranks"] == ranks and row["repetitions"] == iterations and row["backend"] == "gloo"
        assert row["bandwidth_gb_per_s"] == pytest.approx(row["size_bytes"] / row["time_s"] / 1e9)
        expected = row["bandwidth_gb_per_s"] * bus_factor(row["case"], ranks)
        assert row["bus_bandwidth_gb_per_s"] == pytest.approx(expected)
        unchecked = row["shape"] == "in place" and row["case"] in ("alltoall", "sendrecv")
        assert row["wrong"] == (None if unchecked else 0)


def test_collectives_of_two_processes_are_measured_checked_and_kept(llmb, tmp_path) -> None:
    sizes = ("--max-size", "4KiB", "--factor", "32", "--iterations", "2", "--warmup", "1")
    document = json.loads(llmb("bench", "collectives", "--device", "cpu", "--ranks", "2", *sizes, "--json").stdout)
    check_rows(document, 2, 2)
    found = {(row["case"], row["shape"], row["size_bytes"]) for row in document["measurements"]}
    both = ("in place", "out of place")
    whole = {(case, way, size) for case in ("sendrecv",) for way in both for size in (8, 256)}
    parts = {(case, way, 256) for case in ("all_gather", "reduce_scatter", "alltoall") for way in both}
    assert found == whole | parts | {("all_reduce", "in place", size) for size in (8, 256)}
    assert document["not_measured"] == []
    (kept,) = read_measurements(tmp_path)
    assert [row.model_dump(mode="json")["time_s"] for row in kept.measurements] == [
        row["time_s"] for row in document["measurements"]
    ]


def test_the_exchange_of_experts_is_measured_at_its_size_over_the_ranks_of_ep(llmb, tmp_path) -> None:
    recipe = ("-w", "pretrain_mixtral", "-s", "tiny", "--scale", "2", "--ep", "2")
    calls = ("--iterations", "2", "--warmup", "1", "--device", "cpu")
    document = json.loads(llmb("bench", "collectives", "--experts", *recipe, *calls, "--json").stdout)
    check_rows(document, 2, 2)
    size = 4 * 128 * 128 * 2  # fp32, tokens, hidden size, experts of a token
    assert {(row["case"], row["size_bytes"]) for row in document["measurements"]} == {("alltoall", size)}
    (kept,) = read_measurements(tmp_path)
    assert kept.recipe == "pretrain_mixtral tiny fp32 on 2 x cpu, MBS 1, sequence length 128, EP 2"


@pytest.mark.slow
def test_four_processes_print_the_table_that_llmb_nccl_reads(llmb, tmp_path) -> None:
    sizes = ("--min-size", "1KiB", "--max-size", "1MiB", "--factor", "1024", "--iterations", "5")
    text = llmb("bench", "collectives", "--device", "cpu", "--ranks", "4", *sizes).stdout
    path = tmp_path / "gloo.txt"
    path.write_text(text)
    tables = read_test_tables(path)
    assert [table.name for table in tables] == ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
    (kept,) = read_measurements(tmp_path)
    exact = {(row.case, row.shape, row.size_bytes): row for row in kept.measurements}
    for table in tables:
        assert table.ranks == 4 and [row.size_bytes for row in table.rows] == [1024, 2**20]
        for row in table.rows:
            for way, shape in ((row.in_place, "in place"), (row.out_of_place, "out of place")):
                if way is None:
                    assert (table.name, shape) == ("all_reduce", "out of place")
                    continue
                known = exact[table.name, shape, row.size_bytes]
                direct = row.size_bytes / known.time_s / 1e9 * bus_factor(table.name, 4)
                assert way.bus_gb_s == pytest.approx(direct, abs=0.0051)
                assert way.wrong in (0, None)
    shown = llmb("nccl", str(path)).stdout
    assert "reduce_scatter on 4 ranks, gloo.txt" in shown
    check_rows(json.loads(kept.model_dump_json()), 4, 5)


def test_a_size_that_memory_has_no_place_for_is_named(llmb) -> None:
    arguments = ("--device", "cpu", "--ranks", "2", "--min-size", "8B", "--max-size", "4096TiB", "--factor", str(2**49))
    done = llmb("bench", "collectives", "sendrecv", *arguments, "--iterations", "1", code=4)
    assert "out of memory: sendrecv 4,503,599,627,370,496 bytes" in done.stderr.replace("\n", " ")
    assert "sendrecv_perf" in done.stdout  # the smaller size was measured


def test_the_same_product_on_every_process_is_compared_and_kept(llmb, tmp_path) -> None:
    done = llmb("bench", "gpus", "--device", "cpu", "--ranks", "2", "--seconds", "0.2", "--json")
    document = json.loads(done.stdout)
    assert [one["local_rank"] for one in document["devices"]] == [0, 1]
    assert document["exclude"] is None and document["missing_nodes"] == []
    (kept,) = read_measurements(tmp_path)
    assert [(row.benchmark, row.rank, row.sustained) for row in kept.measurements] == [
        ("gpus", 0, True),
        ("gpus", 1, True),
    ]
    for row in kept.measurements:
        assert row.tflops == pytest.approx(2 * 1024**3 / row.time_s / 1e12)
