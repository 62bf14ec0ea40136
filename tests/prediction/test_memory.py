# SPDX-License-Identifier: Apache-2.0
"""The estimate of memory, compared with what the engine's account counted of every published layout."""

from itertools import accumulate, permutations, product
from operator import mul
from typing import Any

import pytest
from benchmarks.published_layouts import PAGE, PublishedLayout, published_layouts

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.prediction.memory import estimate, memory_of, settle_sharding, why_not_estimated
from llmb.prediction.sizes import moments
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import GIB, MARGIN_GIB

LAYOUTS = {each.name: each for each in published_layouts(Catalogue())}


def counted() -> dict[str, dict[str, str]]:
    """The rows of the page's first table by layout."""
    memory, _, _ = PAGE.read_text().partition("## Time")
    first, *_ = memory.partition("These have been estimated")
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


COUNTED = counted()


def planned(size: str = "8b", scale: int = 8, *, choices: Choices | None = None, **sizes: int) -> EnginePlan:
    request = Request(
        workload="pretrain_llama3.1", size=size, gpu_type="h100", scale=scale, overrides=Overrides(**sizes)
    )
    return make_plan(resolve(Catalogue(), request), choices or Choices(), device="cuda")


@pytest.mark.parametrize("name", COUNTED)
def test_an_estimate_is_what_was_counted(name: str) -> None:
    row = COUNTED[name]
    use = estimate(LAYOUTS[name].plan, [int(row["rank"])])
    assert use.fullest.peak_bytes / GIB == pytest.approx(float(row["peak"]), rel=0.05)
    assert float(row["peak"]) + MARGIN_GIB == pytest.approx(float(row["needed"]), abs=0.11)
    assert row["fits"] == "yes"
    for owner, size in use.fullest.bytes_by_owner.items():
        assert size / GIB == pytest.approx(float(row[owner]), rel=0.05, abs=0.5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_published_layout_fits(layout: PublishedLayout) -> None:
    assert why_not_estimated(layout.plan) is None
    use = estimate(layout.plan).model_copy(update={"capacity_gib": layout.capacity_gib})
    assert use.fits, f"{use.needed_gib:.1f} of {layout.capacity_gib} GiB"
    assert len(use.ranks) == layout.layout.pp


def test_all_that_was_counted_is_published() -> None:
    assert set(COUNTED) <= set(LAYOUTS)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"pp": 1, "vp": 1}, [1]),
        ({"pp": 4, "vp": 1}, [4, 3, 2, 1]),
        # (VP - 1) x PP forward passes before the first backward one, and 2 for each rank that follows.
        ({"pp": 4, "vp": 3}, [15, 13, 11, 9]),
    ],
)
def test_ranks_hold_micro_batches_as_the_schedule_says(sizes: dict[str, int], most: list[int]) -> None:
    layout = Layout(gpus=sizes["pp"], mbs=1, gbs=16, seq_len=8, layers=12, **sizes)
    for pp_rank, wanted in enumerate(most):
        assert max(sum(each.held) for each in moments(layout, pp_rank)) == wanted


def test_few_micro_batches_are_never_more_than_there_are() -> None:
    layout = Layout(gpus=4, mbs=1, gbs=4, seq_len=8, layers=16, pp=4, vp=4)
    assert max(sum(each.held) for each in moments(layout, 0)) == 16


@pytest.mark.parametrize(
    ("pp", "vp", "ga"), [(4, 1, 2), (4, 1, 9), (2, 3, 2), (4, 2, 4), (4, 3, 16), (3, 4, 8), (8, 2, 32)]
)
def test_no_pass_of_a_schedule_holds_more_than_its_peak_moments(pp: int, vp: int, ga: int) -> None:
    """Whatever its stages take; all passes one by one are the oracle."""
    layout = Layout(gpus=pp, mbs=1, gbs=ga, seq_len=8, layers=pp * vp, pp=pp, vp=vp)
    together = ga // max(1, ga // pp)
    passes = [done // together % vp for done in range(ga * vp)]
    for pp_rank, sizes in product(range(pp), permutations((7, 5, 3, 2)[:vp])):
        ahead = min(len(passes), (vp - 1) * together * (vp > 1) + (1 + (vp > 1)) * (pp - 1 - pp_rank))
        forward = list(accumulate((sizes[stage] for stage in passes), initial=0))
        backward = list(accumulate((sizes[vp - 1 - stage] for stage in passes), initial=0))
        most = max(forward[done] - backward[max(0, done - ahead - 1)] for done in range(1, len(forward)))
        assert max(sum(map(mul, each.held, sizes)) for each in moments(layout, pp_rank)) == most


@pytest.mark.parametrize(("dtype", "sharding", "counted_gib"), [("bf16", "none", 1.28), ("fp8", "optimizer", 0.66)])
def test_halves_of_tokens_hold_gradients_of_experts_twice(dtype: str, sharding: Any, counted_gib: float) -> None:
    sizes = Overrides(ep=2, pp=1, vp=1, layers=4)
    request = Request(
        workload="pretrain_mixtral", size="8x7b", dtype=dtype, gpu_type="h200", scale=128, overrides=sizes
    )
    recipe, peaks = resolve(Catalogue(), request), []
    for way in ("overlapped", "halves"):
        choices = Choices(communication=way, parallelism=Parallelism(dp_sharding=sharding))
        peaks.append(estimate(make_plan(recipe, choices, device="cuda"), [0]).fullest.peak_bytes)
    assert (peaks[1] - peaks[0]) / GIB == pytest.approx(counted_gib, abs=0.3)


def test_choices_move_memory_where_they_say() -> None:
    def use(*changes: Choices, **sizes: int) -> dict[str, int]:
        return dict(estimate(planned(choices=changes[0] if changes else None, **sizes)).fullest.bytes_by_owner)

    usual = use()
    assert use(Choices(recompute="selective"))["activations"] < usual["activations"]
    assert use(Choices(recompute="full"))["activations"] < use(Choices(recompute="selective"))["activations"]
    assert use(tp=2)["weights"] < usual["weights"]
    assert use(mbs=2, gbs=256)["activations"] > 1.5 * usual["activations"]


@pytest.mark.parametrize(
    ("size", "sizes", "sharding"),
    [
        ("8b", {}, "optimizer"),
        ("8b", {"mbs": 2, "gbs": 256}, "full"),  # would need more than there is
        ("8b", {"cp": 1, "gbs": 256}, "full"),
        ("0.6b", {}, "optimizer"),
    ],
)
def test_ranks_hold_whole_parameters_where_they_fit(size: str, sizes: dict[str, int], sharding: str) -> None:
    """Only of layouts that no document publishes, and for which nothing was chosen."""
    request = Request(workload="pretrain_qwen3", size=size, gpu_type="h100", scale=8, overrides=Overrides(**sizes))
    plan = make_plan(resolve(Catalogue(), request), Choices(), device="cuda")
    assert plan.parallelism.dp_sharding == "full"
    assert settle_sharding(plan, Parallelism()).parallelism.dp_sharding == sharding
    groups = plan.model_copy(update={"parallelism": Parallelism(dp_sharding="full", dp_shard_size=4)})
    assert settle_sharding(groups, Parallelism()) is groups


def test_published_layouts_keep_their_sharding() -> None:
    assert all(settle_sharding(each.plan, Parallelism()) is each.plan for each in LAYOUTS.values())


@pytest.mark.parametrize(
    ("choices", "sizes", "words"),
    [
        (Choices(compiled=False), {}, "compiled"),
        (Choices(attention_backend="math"), {}, "attention"),
        (None, {"tp": 2, "sequence_parallel": False}, "sequence parallelism"),
    ],
)
def test_what_is_not_estimated_is_named(choices: Choices | None, sizes: dict[str, int], words: str) -> None:
    assert words in (why_not_estimated(planned(choices=choices, **sizes)) or "")


@pytest.mark.parametrize(
    ("workload", "size", "scale", "published_gb"),
    [("pretrain_llama3.1", "8b", 8, 44.27), ("pretrain_nemotron4", "15b", 64, 34.47)],
)
def test_state_is_what_published_runs_print_as_allocated(
    workload: str, size: str, scale: int, published_gb: float
) -> None:
    """Between steps, where there are no activations: in decimal GB."""
    request = Request(workload=workload, size=size, gpu_type="h100", scale=scale, dtype="bf16")
    use = estimate(make_plan(resolve(Catalogue(), request), Choices(), device="cuda")).fullest.bytes_by_owner
    state = use["weights"] + use["gradients"] + use["optimizer"]
    assert state / 1e9 == pytest.approx(published_gb, rel=0.01)


def test_memory_is_unknown_where_the_published_run_recomputed_what_the_estimate_does_not() -> None:
    request = Request(workload="pretrain_deepseek-v3", size="671b", gpu_type="b200", scale=256)
    plan = make_plan(resolve(Catalogue(), request), Choices(), device="cuda", trains=False)
    assert estimate(plan).fits is False and plan.recipe.published_way("recompute") == "mla_up_proj mlp"
    unknown = memory_of(plan, as_published=True)
    assert not unknown and "the published run recomputed mla_up_proj mlp" in unknown.reason
    assert memory_of(plan, as_published=False) == estimate(plan)
