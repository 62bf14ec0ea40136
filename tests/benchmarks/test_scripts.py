# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run and say what they measured; how much that is, is not for a test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.packing import measure

ROOT = Path(__file__).parents[2]


def quick(script: str, *options: str) -> tuple[int, Any]:
    """The exit code of a script, which may be that of a target that it misses, and its document."""
    command = [sys.executable, "-m", f"benchmarks.{script}", "--quick", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_packers_are_compared_on_the_same_samples() -> None:
    cases = list(measure(3000))
    assert {(case["packer"], case["seq_len"]) for case in cases} >= {
        (name, seq_len) for name in ("llmb", "first-fit scan (NeMo)") for seq_len in (2048, 4096)
    }
    ours, scan = cases[0], cases[1]
    assert ours["fill"] >= 0.98
    assert abs(ours["packs"] - scan["packs"]) <= 1


@pytest.mark.measured
def test_data_are_loaded_with_and_without_the_loader() -> None:
    _, found = quick("data_loading", "--json")
    assert (found["documents"], found["seq_len"], found["steps"]) == (500, 1024, 2)
    assert min(found["micro_batch_ms"], found["premade_s"], found["loader_s"], found["ratio"]) > 0


@pytest.mark.measured
def test_fp8_on_a_cpu_is_compared_with_bf16() -> None:
    code, found = quick("fp8_on_cpu", "--workload", "pretrain_llama3.1")
    assert (code, found["workload"], found["limit"]) == (0, "pretrain_llama3.1", "this CPU")
    assert min(found["bf16_s"], found["fp8_s"], found["ratio"]) > 0


@pytest.mark.measured
def test_ranks_alone_are_compared_with_ranks_among_others() -> None:
    _, found = quick("pretended_rank", "--json")
    assert [(one["layout"], one["rank"]) for one in found] == [
        (layout, rank) for layout in ("TP 2", "PP 2", "CP 2", "EP 2", "FSDP 2") for rank in (0, 1)
    ]
    assert all(min(one["among_others_s"], one["alone_s"], one["ratio"]) > 0 for one in found)


@pytest.mark.measured
def test_both_sides_of_every_shape_are_multiplied() -> None:
    _, found = quick("products", "--json")
    assert len({one["case"] for one in found}) == len(found) == 2 * 16, (
        "5 weights in 3 passes, and a square, in 2 dtypes"
    )
    assert all(min(one["plain_s"], one["llmb_s"], one["ratio"]) > 0 for one in found)


@pytest.mark.measured
def test_the_overhead_of_the_engine_is_measured_in_pairs() -> None:
    code, found = quick("engine_overhead", "--json")
    assert code == (0 if found["overhead_pct"] < found["target_pct"] else 1)
    assert (found["pairs"], found["tokens_per_step"]) == (4, 64)
    for loop in ("engine", "bare"):
        times = found[loop]
        assert 0 < times["min_s"] <= times["median_s"] <= times["max_s"]
        assert times["cpu_s"] > 0
    step = found["cpu_pct"] if found["judged_by"] == "cpu time" else found["step_pct"]
    assert found["overhead_pct"] == pytest.approx(step + found["watch_pct"])


@pytest.mark.measured
def test_the_stops_of_saves_are_measured() -> None:
    code, found = quick("checkpoint_stops", "--json")
    assert code == 0
    assert min(found["size_mib"], found["copy_s"], found["first_s"], found["later_s"]) > 0


@pytest.mark.measured
def test_the_cost_of_sampling_is_measured_in_pairs() -> None:
    _, found = quick("resource_sampling", "--json")
    assert (found["pairs"], found["steps_per_block"]) == (3, 2)
    assert found["sampler_pct"] > 0 and found["sampled_s"] > 0
    for kind in ("cpu_time", "wall_time"):
        more, (low, high) = found[kind]
        assert low < more < high
