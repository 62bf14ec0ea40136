# SPDX-License-Identifier: Apache-2.0
"""Memory of the ranks of a run in closed form: what the engine's account counts, in milliseconds.

Every term is tensors that the engine has, with sizes that follow from the model's parts on a rank; nothing is fitted. A
rank is fullest at one of three moments: at the loss, where everything in flight keeps what its backward pass needs; in
the backward pass of a block, of stages without a loss; or where the gradients of a step are complete and reduced.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil
from operator import ge, mul

from llmb.catalogue.layout_check import rank_stages, stage_layers
from llmb.catalogue.records import ADAPTED, Dtype, Layout
from llmb.errors import UsageError
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_account import GIB, OWNERS, MemoryUse, RankMemory, countable, stage_ranks

BF16, FP32 = 2, 4
"""Bytes of an element; of FP8 it is one."""
MASTER, MOMENTS = FP32, 2 * FP32
DOUBT = 0.05
"""By how much the account may be above an estimate, as a fraction of it."""
GATHERED_STAGES = 3
"""Stages of a rank whose parameters an interleaved schedule has gathered at a time."""


def why_not_estimated(plan: EnginePlan) -> str | None:
    """None if the memory of a plan can be estimated."""
    layout = plan.recipe.layout
    if plan.recipe.dtype is Dtype.FP32 or not plan.compiled:
        return "only compiled blocks in bf16 and FP8 are estimated"
    if plan.attention_backend == "math":
        return "attention without a fused kernel is not estimated"
    if layout.tp > 1 and not layout.sequence_parallel:
        return "tensor parallelism without sequence parallelism is not estimated"
    return None


def estimate(plan: EnginePlan, ranks: Sequence[int] | None = None) -> MemoryUse:
    """What ranks take, by default one of each rank of the pipeline.

    Raises UsageError if ``why_not_estimated`` has something against the plan.
    """
    if why := why_not_estimated(plan):
        raise UsageError(why, do="leave --estimate out: then the engine's own step is counted")
    plan, assumptions = countable(plan)
    layout = plan.recipe.layout
    found = {stage: _Rank(plan, stage) for stage in range(layout.pp)}
    return MemoryUse(
        method="estimate",
        capacity_gib=plan.recipe.gpu_memory_gb,
        assumptions=assumptions,
        ranks=tuple(found[layout.pp * rank // layout.gpus].memory(rank) for rank in ranks or stage_ranks(layout)),
    )


def estimate_here(plan: Plan) -> MemoryUse | None:
    """None for what is not estimated: other programs, CPUs, unknown GPUs and ways to compute."""
    if not isinstance(plan, EnginePlan) or plan.device != "cuda" or plan.recipe.gpu_memory_gb is None:
        return None
    return None if why_not_estimated(plan) else estimate(plan)


def clearly_fits(use: MemoryUse) -> bool:
    """Whether an estimate leaves no doubt."""
    return use.capacity_gib is not None and use.needed_gib + DOUBT * use.fullest.peak_bytes / GIB <= use.capacity_gib


def with_whole_parameters(plan: EnginePlan) -> EnginePlan:
    """With ranks that hold parameters whole (ZeRO-1), as published runs do, where the estimate leaves no doubt.

    For a plan whose sharding is a default. Any but ``full`` of all ranks stays as it is.
    """
    if plan.parallelism.dp_sharding != "full" or plan.parallelism.dp_shard_size is not None:
        return plan
    parallelism = plan.parallelism.model_copy(update={"dp_sharding": "optimizer"})
    whole = plan.model_copy(update={"parallelism": parallelism})
    use = estimate_here(whole)
    return whole if use is not None and clearly_fits(use) else plan


def held(layout: Layout, pp_rank: int) -> frozenset[tuple[int, ...]]:
    """How many micro-batches each of a rank's stages may hold at a time, whenever a forward pass has ended.

    1F1B and interleaved 1F1B (Narayanan et al., 2021), as torch's schedules have them.
    """
    return _held(layout.pp, layout.vp, layout.ga, pp_rank)


@cache
def _held(pp: int, vp: int, micro_batches: int, pp_rank: int) -> frozenset[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    number = [0] * vp
    whole, together = micro_batches * vp, micro_batches
    if vp == 1:
        ahead = min(whole, pp - 1 - pp_rank)
    else:
        together = micro_batches // max(1, micro_batches // pp)
        ahead = min(whole, (vp - 1) * together + 2 * (pp - 1 - pp_rank))
    for done in range(min(whole, ahead + 2 * together * vp)):
        number[done // together % vp] += 1
        found.add(tuple(number))
        if done >= ahead:
            number[vp - 1 - (done - ahead) // together % vp] -= 1
    return frozenset(_largest(found))


def _largest(found: set[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Without those that another is at least as large as, in every stage."""
    for one in found:
        if not any(other != one and all(map(ge, other, one)) for other in found):
            yield one


class Sizes:
    """Elements on one rank. tokens: of a micro-batch; shard: of them between layers; query, key: features of heads."""

    def __init__(self, plan: EnginePlan) -> None:
        model, layout = plan.recipe.model, plan.recipe.layout
        self.plan, self.model, self.layout = plan, model, layout
        self.fp8 = plan.fp8_recipe is not None
        self.hidden = model.hidden_size
        self.tokens = layout.mbs * layout.seq_len // layout.cp
        self.shard = self.tokens // layout.tp
        self.query = model.attention_heads * model.head_dim // layout.tp
        self.key = model.kv_heads * model.head_dim // layout.tp
        self.vocabulary = model.vocab_size // layout.tp
        self.norm = model.hidden_size * (2 if model.norm == "layernorm1p" else 1)
        self.products = 2 if model.mlp == "swiglu" else 1
        """Matrices of a feed-forward layer before its activation."""

    def attention_matrices(self) -> int:
        return 2 * self.hidden * (self.query + self.key)

    def dense_matrices(self, features: int) -> int:
        return (self.products + 1) * self.hidden * features // self.layout.tp

    def expert_matrices(self) -> int:
        moe, layout = self.model.moe, self.layout
        return 0 if moe is None else 3 * self.hidden * moe.experts // layout.ep * moe.ffn_hidden_size // layout.etp

    def matrices(self, layer: int) -> int:
        """Elements of the matrices of a block, without routed experts."""
        moe = self.model.moe
        if moe is None or not self.model.is_moe_layer(layer):
            return self.attention_matrices() + self.dense_matrices(self.model.ffn_hidden_size)
        return self.attention_matrices() + self.dense_matrices(moe.shared_ffn_hidden_size or 0)

    def others(self, layer: int) -> int:
        """Elements of a block that FP8 does not cast: norms and a router."""
        moe = self.model.moe
        router = moe.experts * self.hidden if moe and self.model.is_moe_layer(layer) else 0
        return 2 * self.norm + router

    def adapters(self) -> int:
        """Elements of the adapters of a block: A and B, of which tensor parallelism shards one."""
        lora, layout = self.plan.lora, self.layout
        if lora is None:
            return 0
        inputs = {"o_proj": self.query, "down_proj": self.model.ffn_hidden_size // layout.tp}
        outputs = {"q_proj": self.query, "k_proj": self.key, "v_proj": self.key, "o_proj": self.hidden}
        inner = self.model.ffn_hidden_size // layout.tp
        outputs |= {"gate_proj": inner, "up_proj": inner, "down_proj": self.hidden}
        names = ADAPTED[lora.targets]
        shared = self.hidden if lora.fused else sum(inputs.get(name, self.hidden) for name in names)
        return lora.rank * (shared + sum(outputs[name] for name in names))

    def computes_fp8(self, layer: int) -> bool:
        """With the recipe ``current`` the first and the last block stay in bf16."""
        return self.fp8 and not (self.plan.fp8_recipe == "current" and layer in (0, self.model.layers - 1))

    def kept(self, layer: int) -> int:
        """Bytes that a block keeps of a micro-batch for its backward pass."""
        if self.plan.recompute == "full":
            return BF16 * self.hidden * self.shard
        return self.computed(layer)

    def computed(self, layer: int) -> int:
        """Bytes that a block keeps unless it is recomputed."""
        between = BF16 * self.hidden * self.shard
        fp8, trained = self.computes_fp8(layer), self.plan.lora is None
        attended = self.query * self.tokens
        heads = BF16 * (attended + 2 * self.key * self.tokens * self.layout.cp)
        # What norms read; what products read, for the gradients of their weights.
        kept = 2 * between + heads + BF16 * attended + FP32 * self.tokens * self.query // self.model.head_dim
        if self.model.qk_norm is not None:
            kept += BF16 * (attended + 2 * self.key * self.tokens)  # the product, which norms of heads read
        of_input = self.hidden * self.shard * (1 if fp8 else BF16)
        moe = self.model.moe if self.model.is_moe_layer(layer) else None
        if trained:
            casts_again = self.plan.fp8_recipe == "delayed" and self.layout.pp > 1  # as apply_fp8 decides
            kept += of_input + (attended if fp8 and not casts_again else 0)
            kept += of_input if moe is None else BF16 * self.hidden * self.shard
        else:
            kept += between  # an adapter's input
        if moe is None:
            return kept + self._kept_within(self.model.ffn_hidden_size // self.layout.tp, self.tokens, fp8, trained)
        rows = self.expert_rows()
        kept += self._kept_within(moe.ffn_hidden_size // self.layout.etp, rows, fp8, trained)
        kept += self.hidden * rows * (1 if fp8 else BF16)
        if moe.router == "softmax-weighted-outputs":
            kept += BF16 * self.hidden * self.shard * moe.top_k
        if moe.shared_ffn_hidden_size:
            kept += self._kept_within(moe.shared_ffn_hidden_size // self.layout.tp, self.tokens, fp8, trained)
            kept += self.hidden * self.shard if fp8 else 0
        return kept

    def _kept_within(self, features: int, rows: int, fp8: bool, trained: bool) -> int:
        """What an activation reads, and what it computes, which the next product reads."""
        computed = (1 if fp8 else BF16) if trained else 0
        again = 0 if self.plan.recompute == "selective" and not fp8 else computed
        return rows * features * (BF16 * self.products + again)

    def expert_rows(self) -> int:
        moe, layout = self.model.moe, self.layout
        if moe is None:
            return 0
        factor = self.plan.capacity_factor or 1
        return ceil(self.shard * moe.top_k * factor) * layout.etp

    def working(self, layer: int) -> int:
        """Bytes that the backward pass of a block has beside what all blocks keep."""
        whole = BF16 * self.hidden * self.tokens
        if self.model.moe and self.model.is_moe_layer(layer):
            inner = self.expert_rows() * self.model.moe.ffn_hidden_size // self.layout.etp
            if self.computes_fp8(layer):
                rows = BF16 * self.hidden * self.expert_rows()
                return BF16 * self.expert_matrices() + 2 * 2 * inner + BF16 * inner + rows
            return 2 * BF16 * inner + whole
        again = self.computed(layer) if self.plan.recompute == "full" else 0
        # Of what the activation computes, and of what it reads.
        gradient = BF16 * (1 + self.products) * self.tokens * self.model.ffn_hidden_size // self.layout.tp
        # Compiled code returns the gradients of a block's matrices together, unless products add them to sums.
        of_matrices = 0 if self.adds_in_products or self.plan.lora else BF16 * self.matrices(layer)
        return again + max(gradient + 2 * whole, of_matrices + BF16 * self.hidden * self.shard)

    @property
    def adds_in_products(self) -> bool:
        """Whether gradients of matrices are added where they are computed; their sums then stay in memory."""
        exact = self.plan.recipe.training.grad_reduce_dtype == "fp32"
        return not (self.fp8 or exact or self.plan.parallelism.dp_sharding == "full") and self.layout.ga > 1

    def head(self) -> int:
        """Bytes at the end of the loss: input and its gradient, logits, and the gradient of the head."""
        logits = self.tokens * self.vocabulary
        trained = BF16 * self.vocabulary * self.hidden if self.plan.lora is None else 0
        of_logits = BF16 * logits if self.plan.keep_logits else FP32 * logits // 16
        return 2 * BF16 * self.hidden * self.tokens + 2 * FP32 * self.hidden * self.shard + of_logits + trained


class _Rank:
    """One rank of a pipeline."""

    def __init__(self, plan: EnginePlan, pp_rank: int) -> None:
        self.plan, self.pp_rank = plan, pp_rank
        self.sizes = Sizes(plan)
        layout = plan.recipe.layout
        layers = stage_layers(layout)
        numbers = rank_stages(layout, pp_rank)
        self.layout = layout
        self.stages = [list(layers[number]) for number in numbers]
        self.layers = [layer for stage in self.stages for layer in stage]
        self.is_first, self.is_last = numbers[0] == 0, numbers[-1] == len(layers) - 1
        shared = layout.dp * layout.cp > 1 or (plan.recipe.model.moe is not None and layout.edp > 1)
        self.sharding = plan.parallelism.dp_sharding if shared else "none"
        self.exchanges = shared
        replicas = plan.parallelism.replicas(layout)
        self.pieces = layout.dp * layout.cp // replicas.dense if shared else 1
        self.expert_pieces = layout.edp // replicas.experts if shared else 1

    def ends(self) -> int:
        """Elements outside of blocks."""
        table = self.sizes.vocabulary * self.sizes.hidden
        tied = self.is_first and self.plan.recipe.model.tied_embeddings
        tables = self.is_first + (self.is_last and not tied)
        return tables * table + self.is_last * self.sizes.norm

    def experts(self) -> int:
        moe_layers = sum(map(self.plan.recipe.model.is_moe_layer, self.layers))
        return moe_layers * self.sizes.expert_matrices()

    def dense(self) -> int:
        """Elements, without routed experts and adapters."""
        return self.ends() + sum(self.sizes.matrices(each) + self.sizes.others(each) for each in self.layers)

    def cast(self) -> int:
        """Elements of matrices that FP8 casts."""
        model, sizes = self.plan.recipe.model, self.sizes
        return sum(
            sizes.matrices(each) + (sizes.expert_matrices() if model.is_moe_layer(each) else 0)
            for each in self.layers
            if sizes.computes_fp8(each)
        )

    def memory(self, rank: int) -> RankMemory:
        moments = (self.at_loss_or_block(), self.at_reduction())
        by_owner = max(moments, key=lambda each: sum(each.values()))
        found = {owner: by_owner.get(owner, 0) for owner in OWNERS}
        return RankMemory(rank=rank, pp_stage=self.pp_rank, peak_bytes=sum(found.values()), bytes_by_owner=found)

    def trained(self) -> tuple[int, int]:
        """Elements that are trained, dense and of routed experts."""
        if self.plan.lora is not None:
            return len(self.layers) * self.sizes.adapters(), 0
        return self.dense(), self.experts()

    def state(self) -> dict[str, int]:
        """Bytes that are there through the passes of a step, without gradients."""
        dense, experts = self.trained()
        own = dense // self.pieces + experts // self.expert_pieces
        weights = MASTER * own
        if self.sharding == "full":
            weights += BF16 * self.gathered(dense, experts)
        else:
            weights += BF16 * (dense + experts)
        if self.plan.lora is not None:
            weights += BF16 * (self.dense() + self.experts())
        if self.sizes.fp8 and (self.sharding != "full" or self.layout.pp > 1):
            weights += 2 * self.cast()
        return {"weights": weights, "optimizer": MOMENTS * own}

    def gathered(self, dense: int, experts: int) -> int:
        """Elements of sharded parameters that are whole at a time: two blocks, and what is in none; or stages."""
        if self.layout.pp > 1:
            return (dense + experts) * min(self.layout.vp, GATHERED_STAGES) // self.layout.vp
        return self.ends() + 2 * (dense + experts - self.ends()) // max(1, len(self.layers))

    def sums(self) -> int:
        """Bytes of the gradients of a step, summed over its micro-batches."""
        dense, experts = self.trained()
        size = FP32 if self.plan.recipe.training.grad_reduce_dtype == "fp32" and self.layout.ga > 1 else BF16
        return size * (dense + experts)

    def at_loss_or_block(self) -> dict[str, int]:
        sizes = self.sizes
        kept = [sum(map(sizes.kept, stage)) for stage in self.stages]
        output = BF16 * sizes.hidden * sizes.shard
        holds = [each + output * (self.layout.pp > 1) for each in kept]
        most = max(sum(map(mul, number, holds)) for number in held(self.layout, self.pp_rank))
        working = max(map(sizes.working, self.layers), default=0)
        if self.is_last:
            working = max(working, sizes.head())
        gradients = self.sums() if self.layout.ga > 1 else 0
        return {**self.state(), "gradients": gradients, "activations": most + working}

    def at_reduction(self) -> dict[str, int]:
        buckets = self.buckets() if self.exchanges and self.sharding != "full" else []
        # A bucket is copied before gradients are freed, and two are there at a time.
        copied = sorted(buckets)[-2:] if self.sizes.adds_in_products else buckets[:1]
        return {**self.state(), "gradients": self.sums(), "activations": sum(copied)}

    def buckets(self) -> list[int]:
        """Bytes of parameters that are reduced together: of blocks, and of what is in none."""
        if self.plan.lora is not None:
            return [BF16 * self.sizes.adapters()]
        blocks = [BF16 * (self.sizes.matrices(each) + self.sizes.others(each)) for each in self.layers]
        return [*blocks, BF16 * self.ends()]
