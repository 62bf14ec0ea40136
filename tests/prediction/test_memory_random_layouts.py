# SPDX-License-Identifier: Apache-2.0
"""The estimate of memory is what the engine's account counts, for random valid layouts."""

from random import Random
from typing import Any, NamedTuple

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.engine.program import count_ranks
from llmb.prediction.memory import estimate, why_not_estimated
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import stage_ranks

MODELS = (
    *(("pretrain_llama3.1", size) for size in ("8b", "70b", "405b")),
    *(("pretrain_nemotron4", size) for size in ("15b", "340b")),
    *(("pretrain_qwen3", size) for size in ("0.6b", "8b")),
    ("pretrain_mixtral", "8x7b"),
    ("finetune_llama3", "70b"),
    ("finetune_llama4-maverick", "400b"),
)
PIPELINES = (1, 2, 4)
MOST_TRIES = 1000
SEEDS = range(100)
QUICK = (67,)
"""With experts."""
SYNCED = range(100, 160)
"""ZeRO-3 with several micro-batches, whose gradients are reduced after each."""
TOLERANCE = 0.05


class RandomLayout(NamedTuple):
    plan: EnginePlan
    rank: int
    """The first of a rank of the pipeline."""
    text: str


def random_layout(seed: int, catalogue: Catalogue) -> RandomLayout:
    """The same for a seed."""
    random = Random(seed)
    for _ in range(MOST_TRIES):
        workload, size = MODELS[seed % len(MODELS)]
        has_experts = workload in ("pretrain_mixtral", "finetune_llama4-maverick")
        sizes, gpus = _sizes(random, PIPELINES[seed % len(PIPELINES)], has_experts=has_experts)
        dtype = random.choice(("bf16", "fp8"))
        chosen = _choices(random, dtype, has_experts=has_experts)
        if seed in SYNCED:
            chosen["parallelism"] = Parallelism(dp_sharding="full", gradient_sync="micro-batch")
        try:
            request = Request(
                workload=workload, size=size, gpu_type="h100", scale=gpus, dtype=dtype, overrides=Overrides(**sizes)
            )
            plan = make_plan(resolve(catalogue, request), Choices(**chosen), device="cuda")
        except UsageError:
            continue
        if seed in SYNCED and (plan.recipe.layout.ga == 1 or not plan.syncs_each_pass):
            continue
        rank = random.choice(stage_ranks(plan.recipe.layout))
        text = f"{workload} {size} {dtype} on {gpus}: {sizes} {chosen}, rank {rank}"
        return RandomLayout(plan, rank, text)
    raise AssertionError(f"no layout for seed {seed}")


def _sizes(random: Random, pp: int, *, has_experts: bool) -> tuple[dict[str, int], int]:
    tp, cp = random.choice((1, 2, 4, 8)), random.choice((1, 1, 2, 4))
    vp = random.choice((1, 2, 3)) if pp > 1 else 1
    dp, mbs = random.choice((1, 2, 4)), random.choice((1, 1, 2))
    experts = {"ep": random.choice((1, 2, 4, 8)), "etp": random.choice((1, 1, 2, tp))} if has_experts else {}
    sizes = {
        "tp": tp,
        "pp": pp,
        "vp": vp,
        "cp": cp,
        "mbs": mbs,
        **experts,
        "gbs": mbs * dp * random.choice((1, 2, pp, 2 * pp, 4 * pp)),
        "seq_len": random.choice((2048, 4096, 8192)),
        # Where the embedding and the loss count as layers, too.
        "layers": pp * vp * random.choice((1, 2)) - random.choice((0, 2)) if pp > 1 else random.choice((1, 2, 3, 4)),
    }
    return sizes, tp * cp * pp * dp


def _choices(random: Random, dtype: str, *, has_experts: bool) -> dict[str, Any]:
    sharding = random.choice((None, "full", "optimizer", "none"))
    found: dict[str, Any] = {
        "recompute": random.choice(("none", "none", "selective", "full")),
        "grad_reduce_dtype": random.choice((None, "fp32", "bf16")),
        "keep_logits": random.choice((None, True, False)),
        "parallelism": Parallelism(dp_sharding=sharding),
        "fp8_recipe": random.choice((None, "delayed", "current", "current-all")) if dtype == "fp8" else None,
        "capacity_factor": random.choice((None, 1.5)) if has_experts else None,
    }
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed in QUICK else pytest.mark.measured)
        for seed in (*SEEDS, *SYNCED)
    ],
)
@pytest.mark.usefixtures("forked_programs")
def test_an_estimate_is_what_is_counted(seed: int) -> None:
    """Layouts have few layers, so that they are counted in seconds each."""
    plan, rank, text = random_layout(seed, Catalogue())
    assert why_not_estimated(plan) is None
    counted = count_ranks(plan, [rank], lambda _: None).fullest
    estimated = estimate(plan, [rank]).fullest
    assert estimated.peak_bytes == pytest.approx(counted.peak_bytes, rel=TOLERANCE), text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_gradients_that_are_reduced_block_by_block_never_exist_together() -> None:
    """With ZeRO-3 and one micro-batch: of many layers most are shards when the last ones are computed."""
    sizes = Overrides(tp=1, cp=1, layers=16, gbs=8, seq_len=1024)
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8, overrides=sizes)
    choices = Choices(parallelism=Parallelism(dp_sharding="full"), recompute="full")
    plan = make_plan(resolve(Catalogue(), request), choices, device="cuda")
    counted, estimated = count_ranks(plan, [0], lambda _: None).fullest, estimate(plan, [0]).fullest
    assert estimated.peak_bytes == pytest.approx(counted.peak_bytes, rel=TOLERANCE)
