# SPDX-License-Identifier: Apache-2.0
"""What is decided of a run before it starts."""

from collections.abc import Callable
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.packing import synthetic_packing
from llmb.catalogue.records import Convention, Dtype, Lora, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.throughput import flops_per_sequence, model_flops
from llmb.readers.samples.host import Device
from llmb.reports.plan_report import plan_table
from llmb.runs.choices import Choices, DpSharding, Parallelism, keeps_logits, logits_gb, logits_text
from llmb.runs.conditions import identity_of_plan
from llmb.runs.experiment import experiment_name
from llmb.runs.plan import EnginePlan, make_plan, with_documents

RECIPE_LORA = Lora(rank=16, alpha=32, dropout=0, targets="qkv")


SYNCED = Parallelism(gradient_sync="micro-batch")


def by(size: int, sharding: DpSharding = "full") -> Parallelism:
    return Parallelism(dp_sharding=sharding, dp_shard_size=size)


def test_a_plan_survives_its_file(tiny_plan: Callable[..., EnginePlan]) -> None:
    plan = tiny_plan(steps=7, seed=3, peak_lr=0.5, recompute="full")
    assert EnginePlan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.recipe.training.peak_lr == 0.5
    assert (plan.window.first, plan.window.last) == (4, 5)


def test_everything_wrong_is_said_at_once(tiny_plan: Callable[..., EnginePlan]) -> None:
    recipe = tiny_plan().recipe
    with pytest.raises(UsageError) as caught:
        make_plan(recipe, Choices(steps=0, peak_lr=-1.0, warmup_steps=-5), device="cpu")
    for said in ("--steps is 0", "--lr is -1.0", "--warmup-steps is -5"):
        assert said in str(caught.value)


def test_what_nobody_shares_is_kept_through_a_step(tiny_plan: Callable[..., EnginePlan]) -> None:
    def sharding(*arguments: object, **options: object) -> str | None:
        return tiny_plan(*arguments, **options).parallelism.dp_sharding

    maverick = "finetune_llama4-maverick"
    assert sharding(scale=1) == sharding(scale=2, overrides={"tp": 2}) == sharding(maverick, scale=1) == "optimizer"
    assert sharding(scale=2) == sharding(scale=2, overrides={"cp": 2}) == "full"
    # Experts are whole on each of two ranks, which can share them out.
    assert sharding(maverick, scale=2, overrides={"tp": 2}) == "full"
    assert sharding(scale=1, parallelism=by(1, "full")) == "full"


def test_the_code_of_a_run_follows_from_its_plan(tiny_plan: Callable[..., EnginePlan]) -> None:
    def true_of(**options: object) -> set[str]:
        return {name for name, value in tiny_plan(**options).compute_path.model_dump().items() if value is True}

    assert true_of(scale=1) == {"keeps_gathered"}
    assert true_of(scale=1, compiled=True) == {"keeps_gathered", "compiled", "joins_products"}
    assert true_of(scale=1, dtype="fp8", compiled=True) == {"keeps_gathered", "compiled", "fuses_casts"}
    assert true_of(scale=2) == {"shards_parameters"}
    assert true_of(scale=2, parallelism=by(2, "optimizer")) == {"exchanges_updates", "keeps_gathered"}
    pipeline = {"keeps_gathered", "fuses_casts", "casts_attention_again"}
    assert true_of(scale=2, dtype="fp8", overrides={"pp": 2}) == pipeline
    assert true_of(scale=4, dtype="fp8", overrides={"pp": 2}) == pipeline | {"shards_parameters"}
    assert true_of(scale=2, overrides={"tp": 2}) == (sharded := {"keeps_gathered", "overlaps_tp"})
    in_fp8 = {"scale": 2, "dtype": "fp8", "overrides": {"tp": 2}}
    assert true_of(**in_fp8) == sharded | {"fuses_casts", "gathers_fp8_gradients"}
    experts = {"workload": "finetune_llama4-maverick", "scale": 2, "overrides": {"ep": 2}}
    assert true_of(**experts) - true_of(**experts, communication="plain") == {"overlaps_dispatch"}
    in_halves = tiny_plan(**experts, communication="halves", capacity_factor=0.0).compute_path
    assert (in_halves.dispatch_parts, tiny_plan(**experts).compute_path.dispatch_parts) == (2, 1)
    assert true_of(**in_fp8, communication="plain") == sharded | {"fuses_casts"}
    fused = tiny_plan(**in_fp8).model_copy(update={"communication": "fused"})
    assert fused.compute_path.fuses_tp
    tokens, hidden = fused.recipe.layout.mbs * fused.recipe.layout.seq_len, fused.recipe.model.hidden_size
    assert (fused.fused_workspace_bytes, tiny_plan(**in_fp8).fused_workspace_bytes) == (2 * tokens * hidden, 0)


def test_halves_need_experts_on_several_ranks_that_drop_no_token(tiny_plan: Callable[..., EnginePlan]) -> None:
    sizes, halves = {"workload": "finetune_llama4-maverick", "scale": 2}, "--communication halves needs "
    both = Choices(communication="halves")
    with pytest.raises(
        UsageError, match=f"{halves}a model with experts and EP above 1; otherwise omit --communication"
    ):
        make_plan(tiny_plan(scale=2).recipe, both, device="cpu")
    with pytest.raises(UsageError, match=f"{halves}--capacity-factor 0; otherwise"):
        make_plan(tiny_plan(**sizes, overrides={"ep": 2}).recipe, both, device="cpu")
    odd = tiny_plan(**sizes, overrides={"ep": 2, "seq_len": 33}).recipe
    with pytest.raises(UsageError, match=f"{halves}an even number of tokens per rank; otherwise"):
        make_plan(odd, both, device="cpu")


def test_fused_products_need_several_gpus_of_a_layer(tiny_plan: Callable[..., EnginePlan]) -> None:
    recipe = tiny_plan(scale=2, overrides={"tp": 2}).recipe
    fused, needs = Choices(communication="fused"), "--communication fused needs "
    assert make_plan(recipe, fused, device="cuda").compute_path.fuses_tp
    with pytest.raises(UsageError, match=f"{needs}GPUs"):
        make_plan(recipe, fused, device="cpu")
    with pytest.raises(UsageError, match=f"{needs}TP above 1 with sequence parallelism"):
        make_plan(tiny_plan(scale=2).recipe, fused, device="cuda")
    with pytest.raises(UsageError, match=f"{needs}a run without adapters"):
        make_plan(tiny_plan("finetune_llama3", overrides={"tp": 2}).recipe, fused, device="cuda")
    with pytest.raises(UsageError, match=f"{needs}all ranks, not one alone"):
        make_plan(recipe.model_copy(update={"pretended_rank": 0}), fused, device="cuda")


def test_adapters_are_those_of_the_recipe_unless_chosen_otherwise(tiny_plan: Callable[..., EnginePlan]) -> None:
    assert tiny_plan("finetune_llama3").lora == RECIPE_LORA
    chosen = tiny_plan("finetune_llama3", lora_rank=8, lora_alpha=4.0, lora_dropout=0.5, lora_targets="all-linear").lora
    assert chosen == Lora(rank=8, alpha=4.0, dropout=0.5, targets="all-linear")
    assert tiny_plan("finetune_llama4-maverick").lora is None


def test_adapters_of_experts_are_unsupported(tiny_plan: Callable[..., EnginePlan]) -> None:
    experts = tiny_plan("finetune_llama4-maverick").recipe.model_copy(update={"lora": RECIPE_LORA})
    assert make_plan(experts, Choices(), device="cpu").lora == RECIPE_LORA
    with pytest.raises(UsageError, match="--lora-targets all-linear: adapters of experts are unsupported"):
        make_plan(experts, Choices(lora_targets="all-linear"), device="cpu")


def test_gradients_are_reduced_as_the_recipe_says(tiny_plan: Callable[..., EnginePlan]) -> None:
    recipe = resolve(Catalogue(), Request(workload="pretrain_llama3.1", size="8b"))

    def reduced(plan: EnginePlan) -> str:
        return plan.recipe.training.grad_reduce_dtype

    assert reduced(make_plan(recipe, Choices(), device="cuda")) == "bf16"
    assert reduced(make_plan(recipe, Choices(grad_reduce_dtype="fp32"), device="cuda")) == "fp32"
    assert reduced(tiny_plan(dtype="bf16")) == "fp32"
    assert reduced(tiny_plan(dtype="bf16", grad_reduce_dtype="bf16")) == "bf16"
    whole = recipe.model_copy(update={"dtype": Dtype.FP32})
    assert reduced(make_plan(whole, Choices(), device="cuda")) == "fp32"


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("pretrain_llama3.1", {"fp8_recipe": "current"}, "--fp8-recipe is current, but the run computes in fp32"),
        ("pretrain_llama3.1", {"emulate_fp8": True}, "--emulate-fp8 is set, but the run computes in fp32"),
        (
            "pretrain_llama3.1",
            {"dtype": "fp8", "fp8_recipe": "current", "overrides": {"layers": 2}},
            "the number of layers is 2; choose delayed or current-all, or pass --layers 3 or more",
        ),
        (
            "pretrain_llama3.1",
            {"deterministic": True, "attention_backend": "cudnn"},
            "--attention-backend cudnn has no deterministic backward pass; omit it, or --deterministic",
        ),
        ("pretrain_llama3.1", {"checkpoint_dir": "/scratch"}, "--checkpoint-dir is set, but nothing is saved"),
        ("pretrain_llama3.1", {"lora_rank": 8}, "--lora-rank is set, but pretrain_llama3.1 trains all weights"),
        ("finetune_llama3", {"lora_rank": 0}, "--lora-rank is 0"),
        ("finetune_llama3", {"lora_dropout": 1.0}, "--lora-dropout is 1; it must be below 1"),
        ("finetune_llama3", {"lora_dropout": 0.1, "overrides": {"pp": 2}}, "--lora-dropout is unsupported with"),
        ("pretrain_llama3.1", {"grad_reduce_dtype": "bf16"}, "the run computes in fp32"),
        ("pretrain_llama3.1", {"parallelism": by(3), "scale": 4}, "must divide DP x CP = 4 x 1 = 4; valid: 1, 2, 4"),
        ("pretrain_llama3.1", {"parallelism": by(4), "scale": 4, "overrides": {"tp": 2}}, "= 2 x 1 = 2; valid: 1, 2"),
        ("pretrain_llama3.1", {"parallelism": by(1, "none")}, "--dp-sharding none does not shard"),
        ("pretrain_llama3.1", {"parallelism": SYNCED}, "--gradient-sync is micro-batch, but --dp-sharding is not set"),
        (
            "pretrain_llama3.1",
            {"parallelism": SYNCED.model_copy(update={"dp_sharding": "optimizer"}), "scale": 2},
            "but --dp-sharding is optimizer; pass --dp-sharding full",
        ),
        (
            "finetune_llama4-maverick",
            {"parallelism": by(1), "scale": 4, "overrides": {"ep": 2}},
            "the number of replicas must divide EDP 2; valid: 2, 4",
        ),
        ("pretrain_llama3.1", {"overrides": {"pp": 2, "gbs": 1}}, "GA 1 is below PP 2"),
        ("pretrain_llama3.1", {"checkpoint_interval": 0}, "--checkpoint-interval is 0"),
        ("pretrain_llama3.1", {"window": "35-60"}, "outside the run"),
        ("pretrain_llama3.1", {"window": "late"}, "not a window"),
        ("pretrain_llama3.1", {"document_tokens": -1}, "--document-tokens is -1; it must be 0 or at least 2"),
        ("pretrain_llama3.1", {"document_tokens": 1}, "one token predicts nothing"),
        (
            "pretrain_llama3.1",
            {"document_tokens": 129},
            "documents of 129 tokens on average are longer than a sequence, 128",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_it_starts(
    tiny_plan: Callable[..., EnginePlan], workload: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_plan(workload, **options)


@pytest.mark.parametrize(
    ("device", "choices", "compiled"),
    [
        ("cuda", Choices(), True),
        ("cpu", Choices(), False),
        ("cuda", Choices(compiled=False), False),
        ("cpu", Choices(compiled=True), True),
    ],
)
def test_blocks_are_compiled_on_a_gpu_unless_told_otherwise(device: Device, choices: Choices, compiled: bool) -> None:
    request = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)
    assert make_plan(resolve(Catalogue(), request), choices, device=device).compiled is compiled


def test_a_plan_with_documents_counts_their_attention(tiny_plan: Callable[..., EnginePlan]) -> None:
    plain, packed = tiny_plan().recipe, tiny_plan(document_tokens=40).recipe
    assert plain.packing is None
    assert packed.training.document_tokens == 40
    assert packed.packing == synthetic_packing(plain.model, 128, 40)
    flops = [flops_per_sequence(recipe, Convention.PACKED) for recipe in (plain, packed)]
    assert flops[1] == model_flops(plain.model, 128, causal=False, packing=packed.packing)
    assert flops[0] is None
    whole = flops_per_sequence(plain, Convention.FULL)
    assert whole is not None
    assert flops[1] < whole == flops_per_sequence(packed, Convention.FULL)


def test_documents_of_ones_own_have_nothing_published() -> None:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=8)
    recipe = resolve(Catalogue(), request)
    assert recipe.expectations
    assert flops_per_sequence(recipe, Convention.PUBLISHED)
    packed = make_plan(recipe, Choices(document_tokens=500), device="cuda").recipe
    assert not packed.expectations
    assert packed.expectations_reason == "sequences are packed from documents of 500 tokens on average"
    assert flops_per_sequence(packed, Convention.PUBLISHED) is None
    assert make_plan(recipe, Choices(), device="cuda").recipe == recipe


def test_a_recipe_that_packs_can_train_on_whole_sequences() -> None:
    request = Request(workload="finetune_llama3", size="70b", gpu_type="h100", scale=8)
    recipe = resolve(Catalogue(), request)
    plan = make_plan(recipe, Choices(synthetic=True, document_tokens=0), device="cuda")
    assert plan.recipe.packing is None
    assert not plan.recipe.expectations
    assert plan.origin.data.name == "uniform", "not packed"
    with pytest.raises(UsageError, match="varlen is for sequences packed from documents"):
        make_plan(recipe, Choices(document_tokens=0, attention_backend="varlen"), device="cuda")


def test_a_recipe_that_packs_trains_on_documents_like_its_own() -> None:
    request = Request(workload="finetune_llama3", size="70b", gpu_type="h100", scale=8)
    recipe = resolve(Catalogue(), request)
    assert recipe.packing
    packed = with_documents(recipe, recipe.training)
    assert packed.packing
    assert packed.packing.sum_of_squares == pytest.approx(recipe.packing.sum_of_squares, rel=0.005)
    assert packed.training.document_tokens == 157
    assert packed.expectations == recipe.expectations
    assert with_documents(packed, packed.training) == packed


def test_the_table_of_a_plan_says_what_is_trained(tiny_plan: Callable[..., EnginePlan]) -> None:
    def trained(workload: str, **options: object) -> str | None:
        rows = plan_table(tiny_plan(workload, **options), (), {}).rows
        return next((row[1] for row in rows if row[0] == "trained"), None)

    adapters = "167,936 parameters: LoRA, rank 16, alpha 32, dropout 0, targets all-linear"
    assert trained("finetune_llama3", lora_targets="all-linear") == adapters
    assert trained("pretrain_llama3.1") is None


@pytest.mark.parametrize("label", ["driver-580", "560.35.03", "a", "Nightly_2", "x" * 64])
def test_a_label_is_a_name(tiny_plan: Callable[..., EnginePlan], label: str) -> None:
    assert tiny_plan(label=label) == tiny_plan()


@pytest.mark.parametrize(
    "label",
    ["", "4711", "latest", "Latest", "2026-11-20", "2026-11-20..2026-11-22", "a..b", "a/b", "a b", ".a", "x" * 65, "é"],
)
def test_a_label_that_could_be_an_id_a_date_or_a_path_is_rejected(
    tiny_plan: Callable[..., EnginePlan], label: str
) -> None:
    with pytest.raises(UsageError, match="--label is"):
        tiny_plan(label=label)


def test_a_label_with_a_secret_is_rejected_and_not_repeated(tiny_plan: Callable[..., EnginePlan]) -> None:
    secret = "hf_" + "abcDEF123" * 4
    with pytest.raises(UsageError, match="looks like a secret") as raised:
        tiny_plan(label=secret)
    assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("workload", "size", "gpu_type", "scale", "first"),
    [
        ("pretrain_llama3.1", "405b", "h100", 512, 35),
        ("finetune_llama3", "70b", "h100", 8, 35),
        ("finetune_llama4-maverick", "400b", "h100", 256, 11),
    ],
)
def test_the_window_is_by_default_that_of_the_recipes_document(
    workload: str, size: str, gpu_type: str, scale: int, first: int
) -> None:
    recipe = resolve(Catalogue(), Request(workload=workload, size=size, gpu_type=gpu_type, scale=scale))
    window = make_plan(recipe, Choices(), device="cuda").window
    assert (window.first, window.last, window.rule) == (first, 44, "reference")
    assert make_plan(recipe, Choices(steps=100), device="cuda").window.first == 70


def recipe_of(workload: str, size: str, gpu_type: str, scale: int = 8, **layout: int) -> Recipe:
    request = Request(workload=workload, size=size, gpu_type=gpu_type, scale=scale, overrides=Overrides(**layout))
    return resolve(Catalogue(), request)


def llama(gpu_type: str = "h200", **layout: int) -> Recipe:
    return recipe_of("pretrain_llama3.1", "8b", gpu_type, cp=1, **layout)


LARGE = {"mbs": 4}
LORA = recipe_of("finetune_llama3", "70b", "h100")


def plan_of(recipe: Recipe, **choices: Any) -> EnginePlan:
    return make_plan(recipe, Choices.model_validate(choices), device="cuda")


def row(plan: EnginePlan) -> str:
    """What the plan's table says of the logits."""
    (text,) = (cells[1] for cells in plan_table(plan, (), {}).rows if cells[0] == "logits")
    return text


def test_size_is_that_of_a_rank_in_the_dtype_of_the_run() -> None:
    whole = llama()
    assert logits_gb(whole) == pytest.approx(8192 * 128256 * 2 / 1e9)
    assert logits_gb(whole.model_copy(update={"dtype": Dtype.FP32})) == 2 * logits_gb(whole)
    assert logits_gb(recipe_of("pretrain_llama3.1", "8b", "h200", cp=2, tp=2)) == logits_gb(whole) / 4


@pytest.mark.parametrize(
    ("recipe", "memory_gb", "kept"),
    [
        pytest.param(llama(), 141, True, id="2.1 of 141 GB"),
        pytest.param(llama("h100"), 80, True, id="2.1 of 80 GB"),
        pytest.param(llama(**LARGE), 141, False, id="8.4 of 141 GB"),
        pytest.param(llama("h100", mbs=2), 80, False, id="4.2 of 80 GB"),
        pytest.param(llama(mbs=2), 141, True, id="4.2 of 141 GB"),
    ],
)
def test_default_depends_on_logits_and_memory(recipe: Recipe, memory_gb: float, kept: bool) -> None:
    assert recipe.gpu_memory_gb == memory_gb
    assert plan_of(recipe).keep_logits is kept


def test_a_device_of_unknown_memory_keeps_small_logits_alone() -> None:
    """A CPU, and a GPU that is not in the catalogue."""
    on_cpu = recipe_of("pretrain_llama3.1", "tiny", "cpu", scale=1)
    assert on_cpu.gpu_memory_gb is None
    assert logits_gb(on_cpu) < 0.06 < logits_gb(llama())
    assert keeps_logits(on_cpu)
    assert not keeps_logits(llama().model_copy(update={"gpu_memory_gb": None}))


def test_logits_without_use_are_not_kept() -> None:
    assert logits_gb(LORA) < 80 / 32
    assert not keeps_logits(LORA)


@pytest.mark.parametrize("given", [True, False])
def test_the_option_decides(given: bool) -> None:
    small, large = plan_of(llama(), keep_logits=given), plan_of(llama(**LARGE), keep_logits=given)
    assert (small.keep_logits, large.keep_logits) == (given, given)
    assert ("kept" in row(small), "kept" in row(large)) == (given, given)


def test_plan_states_choice_and_memory() -> None:
    assert row(plan_of(llama())) == "2.1 GB per micro-batch, kept for the backward pass"
    assert row(plan_of(llama(**LARGE))) == "chunked, recomputed for the backward pass unless small (all: 8.4 GB)"
    assert logits_text(LORA, kept=False) == "chunked"


def test_other_choices_have_other_names_and_are_no_repeats() -> None:
    usual, chunked = plan_of(llama()), plan_of(llama(), keep_logits=False)
    assert experiment_name(chunked) == f"{experiment_name(usual)}_chunked-logits"
    assert experiment_name(plan_of(llama(), keep_logits=True)) == experiment_name(usual)
    large, kept = plan_of(llama(**LARGE)), plan_of(llama(**LARGE), keep_logits=True)
    assert experiment_name(kept) == f"{experiment_name(large)}_logits"
    assert identity_of_plan(usual, "engine", {}).key != identity_of_plan(chunked, "engine", {}).key
