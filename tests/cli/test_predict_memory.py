# SPDX-License-Identifier: Apache-2.0
"""llmb memory, as a user and as a script call it."""

import json

import pytest
from called_here import Run

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.runs.rank_account import fullest_ranks

TINY = ("memory", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu")
SEQUENCE = 128


pytestmark = pytest.mark.usefixtures("forked_programs")
"""Each rank is counted by a process of its own."""


@pytest.mark.slow
def test_every_stage_of_a_pipeline_is_counted(llmb: Run) -> None:
    done = llmb(*TINY, "--scale", "4", "--pp", "2", "--tp", "2", "--layers", "2", "--all-stages", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["method"], document["capacity_gib"], document["fits"]) == ("exact", None, None)
    assert [(each["rank"], each["pp_stage"]) for each in document["ranks"]] == [(0, 0), (2, 1)]
    for each in document["ranks"]:
        parts = ("weights", "gradients", "optimizer", "activations", "other")
        assert sum(each[f"{part}_gib"] for part in parts) == pytest.approx(each["peak_gib"])
        assert {item["group"] for item in each["collectives"]} >= {"tp", "pp"}
        assert each["flops"] > 0
        assert each["optimizer_gib"] == pytest.approx(2 * each["weights_gib"], rel=0.01)  # in fp32


@pytest.mark.slow
@pytest.mark.measured
def test_compiled_blocks_multiply_and_send_what_others_do(llmb: Run) -> None:
    """Also in operators that change their arguments, as those that add to gradients do."""
    layout = (
        *("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "h100", "--dtype", "bf16"),
        *("--scale", "2", "--tp", "2", "--layers", "2", "--gbs", "2"),
    )
    compiled, eager = (
        json.loads(llmb("memory", *layout, option, "--rank", "0", "--json").stdout)["ranks"][0]
        for option in ("--compile", "--no-compile")
    )
    assert compiled["flops"] == eager["flops"]
    assert compiled["collectives"] == eager["collectives"]
    assert compiled["peak_gib"] <= eager["peak_gib"]


@pytest.mark.slow
def test_what_a_pipeline_receives_takes_memory_only_while_it_is_used(llmb: Run) -> None:
    layout = ("--scale", "2", "--pp", "2", "--vp", "2", "--rank", "0", "--json")
    few, many = (json.loads(llmb(*TINY, *layout, "--gbs", gbs).stdout)["ranks"][0] for gbs in ("8", "16"))
    added_gib = many["peak_gib"] - few["peak_gib"]
    tokens_gib = (16 - 8) * SEQUENCE * 2 * 8 / 2**30  # int64, and labels
    assert 0 < added_gib <= tokens_gib
    assert many["flops"] == 2 * few["flops"]


def test_an_estimate_has_the_same_form(llmb: Run) -> None:
    done = llmb(
        *("memory", "-w", "pretrain_llama3.1", "-s", "405b", "--scale", "512", "--gpu-type", "h100"),
        *("--estimate", "--json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["method"], document["capacity_gib"], document["fits"]) == ("estimate", 80.0, True)
    assert [each["rank"] for each in document["ranks"]] == [0, 64, 448]
    assert "flops" not in document["ranks"][0]
    table = llmb("memory", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--estimate")
    assert "fits: rank 0 needs about" in table.stdout and "it would fit" not in table.stdout
    large = llmb("memory", "-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--mbs", "8", "--estimate")
    assert "does not fit: rank 0 needs about" in large.stdout and "of 80 GiB on stage 0" in large.stdout
    assert "--recompute full" in large.stdout and "a third more FLOPs" in large.stdout
    refused = llmb(*TINY, "--estimate")
    assert refused.returncode == 2
    assert "memory in fp32" in refused.stderr


@pytest.mark.measured
def test_tensor_parallel_ranks_without_experts_hold_replicas(llmb: Run) -> None:
    """As LoRA does in its published layouts of several replicas, whatever the size of experts' tensor parallelism."""
    adapters = ("memory", "-w", "finetune_llama3", "-s", "tiny", "--gpu-type", "cpu")
    done = llmb(*adapters, "--scale", "4", "--tp", "2", "--dp-sharding", "none", "--json")
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    reduced = {each["group"] for each in rank["collectives"] if each["kind"] == "all_reduce"}
    assert reduced - {"tp", "world"}


def test_a_rank_that_is_not_there_is_named(llmb: Run) -> None:
    done = llmb(*TINY, "--scale", "2", "--rank", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--rank is 2; the layout has ranks 0 to 1" in done.stderr
    both = llmb(*TINY, "--scale", "2", "--rank", "1", "--all-stages")
    assert (both.returncode, both.stdout) == (2, "")


@pytest.mark.parametrize(
    ("size", "scale", "sizes", "ranks"),
    [
        # 16 stages of ranks: the ends have a layer less, so that the second rank has more layers than the first.
        ("405b", 512, {}, [0, 64, 448]),
        ("8b", 8, {}, [0]),
        ("70b", 64, {"pp": 4, "vp": 1, "last_stage_layers": 14, "gbs": 128}, [0, 48]),
    ],
)
def test_the_fullest_rank_is_among_those_that_are_counted(
    size: str, scale: int, sizes: dict[str, int], ranks: list[int]
) -> None:
    request = Request(
        workload="pretrain_llama3.1", size=size, gpu_type="h100", scale=scale, overrides=Overrides(**sizes)
    )
    assert fullest_ranks(resolve(Catalogue(), request).layout) == ranks
