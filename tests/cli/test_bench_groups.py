# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives`` and ``gpus``: real processes, real files."""

import json
import os
import subprocess

import pytest

from llmb.bench.kept_measurements import read_measurements
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
