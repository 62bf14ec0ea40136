# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives``, ``disk`` and ``gpus``: real processes, real files."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llmb.bench.disk import DiskJob, prediction, whole_blocks
from llmb.bench.disk_bench import measure_disk
from llmb.bench.disk_files import open_unnamed
from llmb.bench.kept_measurements import read_measurements
from llmb.errors import EnvironmentProblem
from llmb.traces.nccl_tests import read_test_tables

FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "alltoall": 1}


@pytest.fixture
def llmb(forked_python, tmp_path):
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def call(*arguments, code=0):
        command = [forked_python, "-m", "llmb.cli.main", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    return call


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("collectives", "--ranks", "1", "--device", "cpu"), "collectives need two ranks"),
        (("collectives", "--min-size", "1GiB", "--device", "cpu"), "above the largest"),
        (("collectives", "--wait"), "--wait is for jobs"),
        (("collectives", "--min-size", "8"), "'8' is not a size"),
        (("gpus", "--dry-run"), "--dry-run is for jobs"),
        (("disk", "--scale", "8"), "--scale needs --workload"),
        (("list", "--benchmark", "gem"), "did you mean 'gemm'?"),
    ],
)
def test_mistakes_are_named(llmb, arguments, message) -> None:
    assert message in llmb("bench", *arguments, code=2).stderr


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


def test_files_of_checkpoints_are_written_read_and_gone(llmb, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    recipe = ("-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "16")
    size = ("--file-size", "1MiB", "--ranks", "2", "--repeat", "2")
    document = json.loads(llmb("bench", "disk", *recipe, *size, "--path", str(folder), "--json").stdout)
    write, read = document["measured"]["measurements"]
    assert (write["case"], read["case"]) == ("write", "read")
    for row in (write, read):
        assert row["ranks"] == 2 and row["repetitions"] == 2 and row["size_bytes"] == 2**20
        assert row["bandwidth_gb_per_s"] == pytest.approx(2 * 2**20 / row["time_s"] / 1e9)
    predicted = document["checkpoint"]
    assert predicted["nodes"] == 2
    assert predicted["checkpoint_bytes"] == pytest.approx(12 * 8.03e9, rel=0.01)
    whole_s = predicted["checkpoint_bytes"] / 1e9 / write["bandwidth_gb_per_s"]
    assert predicted["save_shared_s"] == pytest.approx(whole_s)
    assert predicted["save_each_s"] == pytest.approx(whole_s / 2)
    assert list(folder.iterdir()) == []


def test_the_size_is_the_recipes_part_of_a_rank(llmb, tmp_path) -> None:
    text = llmb("bench", "disk", "-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "2", "--cache", "through").stdout
    (kept,) = read_measurements(tmp_path)
    assert {(row.ranks, row.size_bytes, row.shape) for row in kept.measurements} == {
        (2, 6_888_192, "through the page cache")
    }
    assert "Checkpoint of 0.0138 GB from 1 node" in text


def test_the_prediction_counts_the_whole_checkpoint_and_all_nodes() -> None:
    found = prediction(100 * 10**9, 4, 5.0, 10.0)
    assert (found.save_each_s, found.save_shared_s, found.load_each_s, found.load_shared_s) == (5, 20, 2.5, 10)


def test_space_is_checked_before_a_file_is_written(tmp_path) -> None:
    job = DiskJob(folder=str(tmp_path), size_bytes=10**17, ranks=2, repeats=1, cache="past")
    with pytest.raises(EnvironmentProblem, match="2 files of 100,000,000,000,000,000 bytes need"):
        measure_disk(job, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_no_name_from_the_beginning(tmp_path) -> None:
    handle, _ = open_unnamed(tmp_path, 0, direct=True)
    try:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(handle).st_nlink == 0
    finally:
        os.close(handle)


def unnamed_files(folder):
    """What processes have open below ``folder`` that has no name any more."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # no process, one that has ended, or another user's
            links = [str(handle.readlink()) for handle in (process / "fd").iterdir()]
            found += [link for link in links if link.startswith(f"{folder}/") and link.endswith(" (deleted)")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(forked_python, tmp_path, end) -> None:
    folder = tmp_path / "checkpoints"
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    command = [forked_python, "-m", "llmb.cli.main", "bench", "disk", "--path", str(folder), "--file-size", "64MiB"]
    process = subprocess.Popen(
        [*command, "--ranks", "2", "--repeat", "10000"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 300
    while len(unnamed_files(folder)) < 2:
        assert process.poll() is None and time.monotonic() < until, "they did not begin to measure"
        time.sleep(0.1)
    process.send_signal(end)
    process.communicate(timeout=300)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files == []
    if end != signal.SIGKILL:
        assert list(folder.iterdir()) == []


def test_a_process_that_is_killed_ends_the_measurement_of_a_disk(tmp_path) -> None:
    """Before, the others waited for it at the next barrier, for an hour."""
    program = """
import multiprocessing, sys
from llmb.bench.disk_files import run
from llmb.bench.disk import DiskJob

def say(progress):
    for process in multiprocessing.active_children()[:1]:  # none is left when it is called late, for earlier progress
        process.kill()

if __name__ == "__main__":
    job = DiskJob(folder=sys.argv[1], size_bytes=4096, ranks=2, repeats=1_000_000, cache="through")
    try:
        run(job, say)
    except RuntimeError as error:
        sys.exit(str(error))
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, file, tmp_path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr.strip()) == (1, "a process was killed")


def test_a_rate_is_of_what_was_written_which_is_whole_blocks(llmb, tmp_path) -> None:
    assert [whole_blocks(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
    done = llmb("bench", "disk", "--path", str(tmp_path), "--file-size", "1B", "--repeat", "1", "--json")
    for row in json.loads(done.stdout)["measured"]["measurements"]:
        assert row["size_bytes"] == 4096
        assert row["bandwidth_gb_per_s"] == pytest.approx(4096 / row["time_s"] / 1e9)
