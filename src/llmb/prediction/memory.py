# SPDX-License-Identifier: Apache-2.0
"""Memory of a run's ranks in closed form, as the engine's tensors need it; nothing is fitted."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.catalogue.layout_check import rank_stages, stage_layers
from llmb.catalogue.records import Dtype
from llmb.prediction.sizes import BF16, FP32, GATHERED, Sizes, moments, together_in_turn
from llmb.runs.choices import Parallelism
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_account import GIB, OWNERS, MemoryUse, RankMemory, countable, stage_ranks

MASTER, MOMENTS = FP32, 2 * FP32
DOUBT = 0.05
"""Margin by which the engine's exact count may exceed an estimate, as a fraction of the estimate."""


def why_not_estimated(plan: EnginePlan) -> str | None:
    """Return why the memory of a plan cannot be estimated; None if it can."""
    layout = plan.recipe.layout
    if plan.recipe.dtype is Dtype.FP32:
        return "memory in fp32 (--dtype fp32 or --gpu-type cpu) is not estimated"
    if not plan.compiled:
        return "the memory of blocks that are not compiled (--no-compile or --gpu-type cpu) is not estimated"
    if plan.attention_backend == "math":
        return "the memory of attention without a fused kernel (--attention-backend math) is not estimated"
    if not layout.sequence_parallel:
        return "the memory of a layout without sequence parallelism (--no-sequence-parallel) is not estimated"
    return None


def memory_of(plan: EnginePlan, *, as_published: bool) -> MemoryUse | Missing:
    """Estimate a plan's memory; Missing if that fails, or if a run ``as_published`` needs recompute to fit."""
    if reason := why_not_estimated(plan):
        return Missing(reason)
    use, published = estimate(plan), plan.recipe.published_way("recompute")
    if use.fits is not False or not as_published or plan.recompute != "none" or published in (None, "none"):
        return use
    return Missing(f"the published run recomputed {published}; without this, it would need {use.needed_gib:.0f} GiB")


def estimate(plan: EnginePlan, ranks: Sequence[int] | None = None) -> MemoryUse:
    """Return the peak memory of ``ranks``, by default one per pipeline rank; raise UsageError if it cannot be
    estimated."""
    if why := why_not_estimated(plan):
        raise UsageError(why, do="omit --estimate, if llmb's engine has the model, or avoid the options in parentheses")
    plan, assumptions = countable(plan)
    if names := plan.recipe.model.other_names:
        assumptions = (*assumptions, f"{', '.join(names)}: counted as llmb's engine would hold them, but not measured")
    layout = plan.recipe.layout
    sizes, layers = Sizes(plan), stage_layers(layout)
    found = [
        _Rank(plan, layout.pp * rank // layout.gpus, sizes, layers).memory(rank)
        for rank in ranks or stage_ranks(layout)
    ]
    return MemoryUse(
        method="estimate", capacity_gib=plan.recipe.gpu_memory_gb, assumptions=assumptions, ranks=tuple(found)
    )


def estimate_here(plan: Plan) -> MemoryUse | None:
    """Return the estimate for llmb's engine on GPUs with known memory; None for other runs and unsupported settings."""
    if not isinstance(plan, EnginePlan) or plan.declared_origin or plan.device != "cuda":
        return None
    return None if plan.recipe.gpu_memory_gb is None or why_not_estimated(plan) else estimate(plan)


def clearly_fits(use: MemoryUse) -> bool:
    """Return True if the GPUs' memory is known and suffices, with the margin ``DOUBT``."""
    return use.capacity_gib is not None and use.needed_gib + DOUBT * use.fullest.peak_bytes / GIB <= use.capacity_gib


def settle_sharding(plan: EnginePlan, requested: Parallelism) -> EnginePlan:
    """Return the plan, with ZeRO-1 instead of unrequested full sharding if it then clearly fits."""
    if requested.dp_sharding or plan.parallelism.dp_sharding != "full" or plan.parallelism.dp_shard_size is not None:
        return plan
    parallelism = plan.parallelism.model_copy(update={"dp_sharding": "optimizer"})
    whole = plan.model_copy(update={"parallelism": parallelism})
    use = estimate_here(whole)
    return whole if use is not None and clearly_fits(use) else plan


def _total(by_owner: Mapping[str, int]) -> int:
    return sum(by_owner.values())


class _Bucket(NamedTuple):
    """Parameters whose gradients are reduced together, and the number of ranks that share their update."""

    elements: int
    pieces: int


class _SentBlock(NamedTuple):
    """Memory of a block whose gradients are being sent, in bytes except ``elements`` and ``freed``."""

    elements: int
    freed: int
    saved: int
    working: int
    copied: int
    copies: int
    arriving: int


class _Rank:
    def __init__(self, plan: EnginePlan, pp_rank: int, sizes: Sizes, layers: Sequence[Sequence[int]]) -> None:
        self.plan, self.pp_rank, self.sizes = plan, pp_rank, sizes
        layout = plan.recipe.layout
        numbers = rank_stages(layout, pp_rank)
        self.layout = layout
        self.stages = [list(layers[number]) for number in numbers]
        if numbers[-1] == len(layers) - 1:
            self.stages[-1] += [layout.layers - 1] * plan.recipe.model.multi_token_layers
        self.layers = [layer for stage in self.stages for layer in stage]
        self.unlike = list(dict.fromkeys(map(sizes.alike.__getitem__, self.layers)))
        """One layer of each kind that the rank has."""
        self.is_first, self.is_last = numbers[0] == 0, numbers[-1] == len(layers) - 1
        shared = sizes.is_shared
        self.sharding = plan.parallelism.dp_sharding if shared else "none"
        self.exchanges, self.syncs = shared, plan.syncs_each_pass
        replicas = plan.parallelism.replicas(layout)
        self.pieces = layout.dp * layout.cp // replicas.dense if shared else 1
        self.expert_pieces = layout.edp // replicas.experts if shared else 1

    def ends(self) -> int:
        return self.first_table() + self.last_table()

    def first_table(self) -> int:
        return self.is_first * self.sizes.vocabulary * self.sizes.hidden

    def last_table(self) -> int:
        """Count this rank's elements of the output table, the norm before it, and parts that predict further tokens."""
        tied = self.is_first and self.plan.recipe.model.tied_embeddings
        table = self.sizes.multi_token(self.layout.pp) + (0 if tied else self.sizes.vocabulary * self.sizes.hidden)
        return self.is_last * (self.sizes.norm + table)

    def experts(self, layers: Sequence[int]) -> int:
        each, model = self.sizes.expert_matrices(), self.plan.recipe.model
        return each and each * self.summed(model.is_moe_layer, layers)

    def blocks(self, layers: Sequence[int]) -> int:
        """Count the elements of blocks, without routed experts and adapters."""
        return self.summed(lambda layer: self.sizes.matrices(layer) + self.sizes.others(layer), layers)

    def summed(self, count: Callable[[int], int], layers: Sequence[int]) -> int:
        """Sum ``count`` over layers. Equal layers are counted once, because a search of layouts calls this often."""
        alike = Counter(map(self.sizes.alike.__getitem__, layers))
        return sum(number * count(layer) for layer, number in alike.items())

    def cast(self) -> int:
        sizes, cast = self.sizes, [each for each in self.layers if self.sizes.computes_fp8(each)]
        return self.summed(sizes.matrices, cast) + self.experts(cast)

    def memory(self, rank: int) -> RankMemory:
        in_passes = self.among_blocks() if self.gathers_blocks else self.at_loss_or_block()
        by_owner = max(in_passes, self.at_reduction(), self.at_reduction_of_experts(), self.at_update(), key=_total)
        found = {owner: by_owner.get(owner, 0) for owner in OWNERS}
        found["other"] += self.plan.fused_workspace_bytes
        return RankMemory(rank=rank, pp_stage=self.pp_rank, peak_bytes=sum(found.values()), bytes_by_owner=found)

    def trained(self, stage: int | None = None) -> tuple[int, int]:
        """Count the trained elements, dense and of routed experts, in one of the rank's stages, by default in all."""
        layers = self.layers if stage is None else self.stages[stage]
        return self.whole(stage) if self.plan.lora is None else (len(layers) * self.sizes.adapters(), 0)

    def added(self, stage: int | None = None) -> int:
        """Count the gradient elements that products accumulate into buffers, which exist throughout a step."""
        layers = self.layers if stage is None else self.stages[stage]
        return self.summed(self.sizes.matrices, layers) if self.plan.lora is None else self.trained(stage)[0]

    def whole(self, stage: int | None = None) -> tuple[int, int]:
        """Count the model's elements, trained or frozen, without adapters: dense and of routed experts."""
        layers = self.layers if stage is None else self.stages[stage]
        first = self.first_table() if stage in (None, 0) else 0
        last = self.last_table() if stage in (None, len(self.stages) - 1) else 0
        return self.blocks(layers) + first + last, self.experts(layers)

    def state(self, *, passes: bool = True) -> dict[str, int]:
        """Return the bytes of weights and optimizer state during the passes of a step, or after them."""
        dense, experts = self.trained()
        own = dense // self.pieces + experts // self.expert_pieces
        weights = MASTER * own
        if self.sharding != "full":
            weights += BF16 * (dense + experts)
        if self.plan.lora is not None:
            weights += BF16 * sum(self.whole()) // (self.pieces if self.sharding == "full" else 1)
        if self.sizes.fp8 and passes and (self.sharding != "full" or self.layout.pp > 1):
            weights += 2 * self.cast()
        return {"weights": weights, "optimizer": MOMENTS * own}

    def sums(self, first: int = 0) -> int:
        """Return the bytes of accumulated gradients, if the stages before ``first`` have none yet."""
        if self.syncs:
            return sum(map(self.reduced, range(first, len(self.stages))))
        if first == 0 or self.sizes.adds_in_products:
            return self.gradient_bytes * sum(self.trained())
        return self.gradient_bytes * sum(sum(self.trained(stage)) for stage in range(first, len(self.stages)))

    @property
    def exact(self) -> bool:
        return self.plan.recipe.training.grad_reduce_dtype == "fp32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element."""
        several = self.layout.ga > 1 or (self.exchanges and self.sharding != "full")
        return FP32 if self.exact and several else BF16

    def holds(self) -> list[int]:
        """Return the bytes that a micro-batch holds in each stage between its forward and its backward pass."""
        output = BF16 * self.sizes.hidden * self.sizes.shard * (self.layout.pp > 1)
        return [self.summed(self.sizes.saved_bytes, stage) + output for stage in self.stages]

    @cached_property
    def gathered_stages(self) -> list[int]:
        """Bytes of the full parameters of the n largest stages, by n."""
        sizes = sorted((BF16 * sum(self.whole(stage)) for stage in range(len(self.stages))), reverse=True)
        return [0, *accumulate(sizes)]

    def at_loss_or_block(self) -> dict[str, int]:
        sizes = self.sizes
        holds = self.holds()
        working = max(map(sizes.working, self.unlike), default=0)
        at_end = max(working, sizes.head()) - working if self.is_last else 0
        # The embedding's gradient comes last and is added to that of earlier micro-batches while its own input still
        # exists; another such gradient is being sent.
        table = 0
        if self.is_first and self.plan.lora is None:
            table = BF16 * (
                self.first_table() * (not self.syncs) + sizes.hidden * sizes.shard * (1 + (self.layout.pp > 1))
            )
        beside, after = self.sent_by_passes() if self.syncs else (0, 0)
        if self.syncs and self.is_last and self.plan.lora is None:
            at_end = max(working + beside + BF16 * self.last_table(), sizes.head()) - working - beside
        found = (
            (
                sum(map(mul, each.held, holds)) + each.passes * working + each.ends * at_end + each.adds * table,
                self.begun_gradients(each.begun) + each.passes * beside + each.adds * after,
                self.gathered_stages[each.gathered] if self.sharding == "full" else 0,
            )
            for each in moments(self.layout, self.pp_rank, syncs=self.syncs)
        )
        # Before any pass, parameters are gathered into a buffer and copied out.
        begin = self.gathered_stages[1] + BF16 * (self.ends() + self.blocks(self.stages[0][:1]))
        activations, gradients, gathered = max((0, 0, begin * (self.sharding == "full")), *found, key=sum)
        state = self.state()
        return {
            "weights": state["weights"] + gathered,
            "gradients": gradients + (self.gradient_bytes * self.added() if sizes.adds_in_products else 0),
            "optimizer": state["optimizer"],
            "activations": activations,
        }

    def sent_by_passes(self) -> tuple[int, int]:
        """Return bytes of gradients being reduced: during another block's pass, less freed activations; and after a
        stage's blocks."""
        sizes, size, trained = self.sizes, self.reduced_bytes, self.plan.lora is None
        shard = size + FP32 * (not self.exact)

        def at_once(elements: int, last: int) -> int:
            return int(size * elements + max(BF16 * elements, BF16 * last + shard * elements / self.pieces))

        beside, after = [0], [at_once(self.ends(), self.first_table() or self.last_table()) * trained]
        for layer in self.unlike:
            dense = sizes.matrices(layer) + sizes.others(layer) if trained else sizes.adapters()
            experts = self.experts([layer]) * trained
            of_experts = int((size + max(BF16 * 4 / 3, shard / self.expert_pieces)) * experts)
            of_block = max(of_experts, at_once(dense, min(dense, sizes.hidden * sizes.part.ffn_hidden_size)))
            after.append(of_block + BF16 * self.last_table() * trained * (self.layout.vp == 1))
            beside.append(size * (experts or dense) - sizes.saved_bytes(layer))
        return max(beside) * (max(map(len, self.stages)) > 1), max(after)

    def begun_gradients(self, begun: Sequence[bool]) -> int:
        """Return the bytes of gradients in all stages with gradients, according to ``begun``."""
        first = begun.index(True) if any(begun) else len(begun)
        if self.reduces_in_turn and first < len(begun):
            return self.left_by_passes[first] + self.reduced_after[first]
        return sum(self.left_by_passes[first:])

    @property
    def reduces_in_turn(self) -> bool:
        sharded = self.exchanges and self.sharding in ("optimizer", "full")
        return sharded and self.layout.ga <= together_in_turn(self.layout)

    @cached_property
    def left_by_passes(self) -> list[int]:
        return [self.left_by_pass(stage) for stage in range(len(self.stages))]

    @cached_property
    def reduced_after(self) -> list[int]:
        """For each stage, the bytes of the reduced gradients of all later stages, and of copies being sent."""
        after = [0]
        for stage in reversed(range(1, len(self.stages))):
            after.append(after[-1] + self.reduced(stage))
        copies = [self.sent_block(stage[0]).copies if self.sends_blocks and stage else 0 for stage in self.stages[1:]]
        return [reduced + copied for reduced, copied in zip(reversed(after), [*copies, 0], strict=True)]

    def reduced(self, stage: int) -> int:
        """Return the bytes of this rank's gradient shard of a stage; FSDP keeps it in fp32, like its weights."""
        dense, experts = self.trained(stage)
        size = FP32 if self.sharding == "full" else self.reduced_bytes
        return size * (dense // self.pieces + experts // self.expert_pieces)

    def left_by_pass(self, stage: int) -> int:
        """Return the bytes of a stage's gradients after a backward pass, except gradients that products accumulate."""
        dense, experts = self.trained(stage)
        if self.sizes.adds_in_products:
            return self.gradient_bytes * (dense + experts - self.added(stage))
        if self.syncs or (self.sends_blocks and self.layout.ga == 1 and self.sharding == "optimizer"):
            return self.reduced(stage)
        return self.gradient_bytes * (dense + experts)

    @property
    def gathers_blocks(self) -> bool:
        """Return whether parameters are gathered block by block; in a pipeline they stay gathered longer."""
        return self.sharding == "full" and self.layout.pp == 1

    def among_blocks(self) -> dict[str, int]:
        state, most = self.state(), max(self._moments_of_blocks(), key=sum)
        weights, gradients, activations = most
        return {
            "weights": state["weights"] + weights,
            "gradients": gradients,
            "optimizer": state["optimizer"],
            "activations": activations,
        }

    def _moments_of_blocks(self) -> Iterator[tuple[int, int, int]]:
        sizes, trained, single = self.sizes, self.plan.lora is None, self.layout.ga == 1
        in_turn = single or self.syncs
        ends = BF16 * self.ends()
        dense = [BF16 * (sizes.matrices(each) + sizes.others(each)) for each in self.layers] + [0]
        experts = [BF16 * self.experts([each]) for each in self.layers] + [0]
        held = [0, *accumulate(sizes.saved_bytes(each) + self._saved_casts(each) for each in self.layers)]
        earlier = 0 if single else self.sums()
        sums = earlier + BF16 * self.last_table() * trained * in_turn
        gathered = ends
        for place, layer in enumerate(self.layers):
            of_block, of_experts, before = dense[place], experts[place], held[place]
            following = dense[place + 1] + experts[place + 1]
            yield ends + gathered + 2 * of_block, earlier, before
            yield ends + 2 * of_block + following, earlier, before + sizes.passing(layer)
            if of_experts:
                yield ends + 2 * of_block + 3 * of_experts + following, earlier, before
            gathered = of_experts or of_block
        yield ends + gathered, earlier, held[-1] + sizes.head()
        logits = BF16 * sizes.tokens * sizes.vocabulary * self.plan.keep_logits
        yield 2 * ends, earlier, held[-1] + FP32 * sizes.hidden * sizes.shard + logits
        reduced = shards = 0
        for place, layer in reversed(list(enumerate(self.layers))):
            previous, now = dense[place - 1] if place else 0, held[place + 1]
            if experts[place]:
                yield ends + dense[place] + 3 * experts[place], sums + shards + reduced, now
            working = now + sizes.working(layer)
            yield ends + dense[place] + max(experts[place], previous), sums + shards + reduced, working
            if in_turn and trained:
                reduced = (experts[place] or dense[place]) * self.reduced_bytes // BF16
            if single and trained:
                shards += FP32 * (dense[place] // self.pieces + experts[place] // self.expert_pieces) // BF16
        # The gradients of a tied table come from both ends and are summed.
        tables = 3 if self.plan.recipe.model.tied_embeddings else 1
        yield ends, sums + shards + reduced, BF16 * self.first_table() * trained * tables
        if self.syncs:
            yield 0, earlier + self.sent_by_passes()[1], 0

    def _saved_casts(self, layer: int) -> int:
        if not self.sizes.computes_fp8(layer) or self.plan.recompute == "full":
            return 0
        return self.sizes.matrices(layer)

    @property
    def reduced_bytes(self) -> int:
        """Bytes per gradient element as it is sent."""
        return FP32 if self.exact else BF16

    @property
    def sends_blocks(self) -> bool:
        """Return whether a block's gradients are sent while the gradients of earlier blocks are computed."""
        return self.exchanges and self.sharding != "full"

    def at_reduction(self) -> dict[str, int]:
        """Return the peak by owner in the backward pass of the last micro-batch, or after this pass."""
        if not self.sends_blocks:
            in_turn = self.gathers_blocks and self.layout.ga == 1 and self.exchanges
            gradients = sum(map(self.reduced, range(len(self.stages)))) if in_turn else self.sums()
            return {**self.state(passes=False), "gradients": gradients, "activations": 0}
        *passing, at_end = self._moments_of_reduction()
        ends = ((True, max(passing, key=sum, default=(0, 0))), (False, at_end))
        states = (
            {**self.state(passes=passes), "gradients": gradients, "activations": activations}
            for passes, (gradients, activations) in ends
        )
        return max(states, key=_total)

    def _moments_of_reduction(self) -> Iterator[tuple[int, int]]:
        sizes, holds, together = self.sizes, self.holds(), together_in_turn(self.layout)
        hidden = BF16 * sizes.hidden * sizes.shard
        sent = reduced = travelling = 0
        sums = in_all = self.sums()
        blocks = {layer: self.sent_block(layer) for layer in self.unlike}
        for stage, layers in reversed(list(enumerate(self.stages))):
            if self.layout.ga <= together:
                sums = self.sums(stage)
            sent_of = [blocks[sizes.alike[layer]] for layer in layers]
            saved = sum(block.saved for block in sent_of) + together * sum(holds[:stage])
            for block in reversed(sent_of):
                held = saved + reduced + travelling
                before = held - block.saved + hidden
                yield self.unsent(sums, sent, block.elements), held + block.working
                yield self.unsent(sums, sent, block.elements), before + block.copied
                sent += block.freed
                yield self.unsent(sums, sent, 0), before + block.copies + block.arriving
                saved -= block.saved
                travelling = block.copies
                reduced += block.arriving
        first, ends = (0, 0) if self.plan.lora else (self.first_table(), self.ends())
        yield self.unsent(in_all, sent, first), reduced + travelling + self.reduced_bytes * ends

    def sent_block(self, layer: int) -> _SentBlock:
        sizes, size, buckets = self.sizes, self.reduced_bytes, self.buckets(layer)
        elements = sum(bucket.elements for bucket in buckets)
        return _SentBlock(
            elements,
            # Buffers that products accumulate into stay; the gradients of experts are accumulated by autograd.
            self.experts([layer]) if sizes.adds_in_products else elements,
            sizes.saved_bytes(layer),
            sizes.working(layer),
            size * elements,
            # An unsharded copy is reduced in place.
            size * sum(bucket.elements for bucket in buckets if bucket.pieces > 1),
            sum(size * bucket.elements // bucket.pieces for bucket in buckets),
        )

    def unsent(self, sums: int, sent: int, elements: int) -> int:
        """Return the bytes of gradients that are not yet sent."""
        if self.layout.ga == 1:
            return self.gradient_bytes * (elements + self.last_table() * (self.plan.lora is None))
        return sums - self.gradient_bytes * sent

    def at_reduction_of_experts(self) -> dict[str, int]:
        """Return the peak bytes by owner while a pipeline with experts and sharded parameters reduces gradients; else
        empty."""
        if self.sharding != "full" or self.layout.pp == 1 or self.syncs or not self.experts(self.layers):
            return {}
        experts, size = self.sizes.expert_matrices(), self.reduced_bytes
        state = self.state(passes=False)
        weights = state["weights"] + BF16 * sum(self.trained(0)) + size * experts
        at_end = {**state, "weights": weights, "gradients": size * experts * 4 // 3}
        if self.layout.vp == 1:
            return at_end
        together = together_in_turn(self.layout)
        begun = None if self.layout.ga > together else self.layout.vp - 1
        state = self.state()
        weights = state["weights"] + self.gathered_stages[min(self.layout.vp, GATHERED)] + (size - BF16) * experts
        first = {
            **state,
            "weights": weights,
            "gradients": size * (sum(self.trained(begun)) + experts // 3),
            "activations": together * sum(self.holds()[:-1]),
        }
        return max(at_end, first, key=_total)

    def at_update(self) -> dict[str, int]:
        """Return the peak bytes by owner in the update; empty if no gradient is copied to fp32."""
        size = self.gradient_bytes if self.sharding == "none" else self.reduced_bytes
        if size == FP32 or self.sharding == "full" or self.plan.lora is not None:
            return {}
        stages = range(len(self.stages))
        gradients = self.sums() if self.sharding == "none" else sum(map(self.reduced, stages))
        dense = max(self.first_table(), self.last_table(), self.sizes.hidden * self.sizes.part.ffn_hidden_size)
        experts = self.sizes.expert_matrices() * 2 // 3 if self.experts(self.layers) else 0
        pieces, expert_pieces = (1, 1) if self.sharding == "none" else (self.pieces, self.expert_pieces)
        copied = FP32 * max(dense // pieces, experts // expert_pieces)
        return {**self.state(passes=False), "gradients": gradients, "activations": 0, "other": copied}

    def buckets(self, layer: int) -> list[_Bucket]:
        """Return the buckets of a block: dense parameters, and routed experts, if any; with LoRA, only its adapters."""
        pieces, expert_pieces = (1, 1) if self.sharding == "none" else (self.pieces, self.expert_pieces)
        if self.plan.lora is not None:
            return [_Bucket(self.sizes.adapters(), pieces)]
        dense = _Bucket(self.sizes.matrices(layer) + self.sizes.others(layer), pieces)
        if not self.plan.recipe.model.is_moe_layer(layer):
            return [dense]
        return [dense, _Bucket(self.sizes.expert_matrices(), expert_pieces)]
