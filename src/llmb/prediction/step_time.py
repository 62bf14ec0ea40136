# SPDX-License-Identifier: Apache-2.0
"""The time of a training step: the work of its ranks at the rates that GPUs and links attain."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from types import MappingProxyType
from typing import Literal, NamedTuple

from llmb.base.errors import UsageError
from llmb.catalogue.layout_check import stage_counts
from llmb.catalogue.records import Dtype, Gpu
from llmb.prediction.links import Links
from llmb.prediction.work import LayerKind, MeasuredMachine, Messages, PassWork, RankWork
from llmb.runs.plan import EnginePlan

UPDATE_BYTES = 30.1
"""Bytes per parameter that an update moves: the optimizer in one pass, and the norm of gradients in bf16."""
CAST_BYTES = 4
"""Bytes per parameter and step to cast weights: 2 read (bf16), 1 written per FP8 layout."""
BACKWARD = 2 / 3
"""The fraction of a micro-batch's time that the backward pass takes."""
USUAL_SMS = 132
"""Number of SMs of an H100, assumed for GPU types whose number is unknown."""

Amount = dict[str, float]
"""Seconds at nominal rates by keys of ``TERMS``; counts for keys that end in _s, whose rates are seconds."""


@dataclass(frozen=True, slots=True)
class StepCache:
    """Results for plans that differ only in layout, recompute and sharding, by the values they depend on."""

    parts: dict[tuple[object, ...], Amount] = field(default_factory=dict)
    """Work of a micro-batch in a layer, the embedding or the head."""
    pipelines: dict[tuple[object, ...], "PipelineTime"] = field(default_factory=dict)
    updates: dict[tuple[object, ...], "Update"] = field(default_factory=dict)
    """Exchange of gradients and parameters."""


class PipelineTime(NamedTuple):
    """The first rank of each kind with its work per micro-batch, and the step's bubble."""

    ranks: tuple[tuple[int, Amount], ...]
    bubble: Amount


class Update(NamedTuple):
    """The numbers of dense and of routed experts' parameters that a rank trains, and the seconds of its messages."""

    dense: int
    experts: int
    exchanges: tuple[tuple[Messages, float], ...]


Rates = Mapping[str, float]
"""Factors of kinds of work relative to nominal rates, or seconds if the name ends in _s; see ``rates.yaml``."""
TERMS: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "products bf16",
        "fp8": "products fp8",
        "mxfp8": "products mxfp8",
        "nvfp4": "products nvfp4",
        "experts": "products of experts",
        "attention": "attention",
        "memory": "memory-bound operators",
        "cast": "casts",
        "routed": "permutation of tokens",
        "written": "outputs of products",
        "tp": "tensor-parallel messages",
        "tp_fp8": "tensor-parallel messages",
        "tp_beyond": "tensor-parallel messages",
        "cp": "context-parallel messages",
        "cp_beyond": "context-parallel messages",
        "ep": "messages of experts",
        "ep_beyond": "messages of experts",
        "pp": "messages between stages",
        "pp_beyond": "messages between stages",
        "cp_attention": "attention cut for overlap",
        "dp": "data-parallel messages beside work",
        "dp_beyond": "data-parallel messages waited for",
        "fp8_layer_s": "FP8 scaling",
        "moe_layer_s": "routing",
        "step_s": "once a step",
        "fp8_step_s": "once a step",
        "wait": "waiting for slower ranks",
        "wait_fp8": "waiting for slower ranks",
    }
)
"""The names of rates, with the labels of their terms in reports."""
BUBBLE = "pipeline bubble"


@dataclass(frozen=True, slots=True)
class NominalStep:
    """A step at nominal rates."""

    busy: Amount
    """All work and waits of the slowest rank."""
    bubble: Amount
    """The time in which the pipeline fills and drains."""

    def terms(self, rates: Rates) -> dict[str, float]:
        """Return the seconds of each cause at ``rates``; they sum to the step."""
        found: dict[str, float] = {}
        for name, amount in self.busy.items():
            found[TERMS[name]] = found.get(TERMS[name], 0.0) + amount * rates[name]
        if self.bubble:
            found[BUBBLE] = priced(self.bubble, rates)
        return {name: seconds for name, seconds in found.items() if seconds}

    def seconds(self, rates: Rates) -> float:
        return priced(self.busy, rates) + priced(self.bubble, rates)


def priced(amount: Mapping[str, float], rates: Rates) -> float:
    """Return the seconds of an amount at ``rates``."""
    seconds = 0.0
    for name, each in amount.items():
        seconds += each * rates[name]
    return seconds


def why_not_predicted(plan: EnginePlan, gpu: Gpu) -> str | None:
    """Return why the step of a plan cannot be predicted; None if it can."""
    if plan.recipe.dtype is Dtype.FP32:
        return "steps in fp32 are not predicted: the catalogue has no fp32 peak"
    if plan.recipe.dtype.value not in gpu.peak_tflops:
        return f"the {plan.recipe.dtype} peak of {gpu.gpu_type} is unknown"
    nodes = plan.recipe.layout.gpus > gpu.nvlink_domain_gpus
    if nodes and gpu.network_gb_s is None:
        return f"{plan.recipe.layout.gpus} GPUs need a network, but the network_gb_s of {gpu.gpu_type} is unknown"
    return None


def nominal_step(
    plan: EnginePlan,
    gpu: Gpu,
    rates: Rates,
    cache: StepCache | None = None,
    machine: MeasuredMachine | None = None,
    joined: Container[str] = (),
) -> NominalStep:
    """Return the step at nominal rates; ``rates`` decide which rank is slowest. Raise UsageError if it cannot be
    predicted."""
    return _Step(plan, gpu, rates, cache or StepCache(), machine or MeasuredMachine(), joined).nominal()


CHIP = ("bf16", "fp8", "mxfp8", "nvfp4", "attention", "memory", "cast", "routed", "written")
"""Rates that the efficiency of a chip scales."""
COMPUTED = (*CHIP, "experts", "fp8_layer_s", "moe_layer_s")
"""Rates of the work that a rank does alone, without communication."""


def computed_seconds(plan: EnginePlan, gpu: Gpu, rates: Rates, pp_stage: int) -> float:
    """Return a pipeline rank's seconds per step for the work of ``COMPUTED``; raise UsageError if it cannot be
    predicted."""
    return _Step(plan, gpu, rates, StepCache(), MeasuredMachine()).computed(pp_stage)


class _Step:
    def __init__(
        self,
        plan: EnginePlan,
        gpu: Gpu,
        rates: Rates,
        cache: StepCache,
        machine: MeasuredMachine,
        joined: Container[str] = (),
    ) -> None:
        if why := why_not_predicted(plan, gpu):
            do = "describe the GPUs with --hardware FILE, or pass another --gpu-type"
            raise UsageError(why, do="pass --dtype bf16" if plan.recipe.dtype is Dtype.FP32 else do)
        self.plan, self.gpu, self.rates, self.cache = plan, gpu, rates, cache
        layout = self.layout = plan.recipe.layout
        replicas = plan.parallelism.replicas(layout)
        shares = 1 / rates["nvlink"], 1 / rates["network"]
        self.links = Links(layout, replicas, gpu, *shares, machine.links, joined, machine.exchanges)
        sizes = (layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, layout.seq_len, layout.sequence_parallel)
        ways = (plan.recipe.published_way("cuda_graphs"), plan.recipe.published_way("dispatcher"))
        self.key = (*sizes, layout.pp > 1, plan.recompute, plan.communication, *ways)
        casts, joins = rates["tp_gathers_casts"] > 0, self._joins_copies()
        self.work = RankWork(plan, gpu.sms or USUAL_SMS, machine, joins_copies=joins, gathers_casts=casts)
        self.casts = self.work.sizes.fp8
        self.replays = plan.recipe.published_way("cuda_graphs") == "full iteration" and rates["replays_graphs"] > 0

    def _joins_copies(self) -> bool:
        return self.rates["ep_joins_copies"] > 0 and self.plan.recipe.published_way("dispatcher") != "alltoall"

    def nominal(self) -> NominalStep:
        pipeline = self._cached_pipeline()
        bubble_s = priced(pipeline.bubble, self.rates)
        steps = [self._busy(rank, amount, bubble_s) for rank, amount in pipeline.ranks]
        return NominalStep(max(steps, key=lambda busy: priced(busy, self.rates)), pipeline.bubble)

    def _busy(self, rank: int, amount: Amount, bubble_s: float) -> Amount:
        busy = {name: each * self.layout.ga for name, each in amount.items()}
        if bubble_s:
            self._defer_head(busy, rank, bubble_s)
        busy_s = priced(busy, self.rates)
        waits = self._waits(busy_s + bubble_s)
        _add(busy, self._once(rank, busy_s / self.layout.ga))
        _add(busy, waits)
        return busy

    def computed(self, stage: int) -> float:
        rank = self._rank(self.work.stages[stage], is_first=stage == 0, is_last=stage == self.layout.pp - 1)
        of_step = self._once(stage, 0.0)
        whole = {name: self.layout.ga * rank.get(name, 0.0) + of_step.get(name, 0.0) for name in COMPUTED}
        return priced(whole, self.rates)

    @cached_property
    def split(self) -> tuple[object, ...]:
        """Cache key that is equal for layouts that differ only in their global batch size."""
        layout = self.layout
        split = (layout.pp, layout.vp, layout.layers, layout.first_stage_layers, layout.last_stage_layers)
        return (*self.key, *split, layout.counts_embedding_and_loss, layout.gpus)

    def _cached_pipeline(self) -> PipelineTime:
        if self.split not in self.cache.pipelines:
            self.cache.pipelines[self.split] = self._pipeline()
        return self.cache.pipelines[self.split]

    def _pipeline(self) -> PipelineTime:
        layout, alike = self.layout, self._ranks()
        bubble: Amount = {}
        for _, amount, ranks in alike if layout.pp > 1 else ():
            _add(bubble, amount, (layout.pp - 1) / layout.vp * ranks / layout.pp)
        if stage_counts(layout) is None:
            # Other programs place each layer so that the ranks of the pipeline have the same work.
            mean: Amount = {}
            for _, amount, ranks in alike:
                _add(mean, amount, ranks / layout.pp)
            return PipelineTime(((alike[0][0], mean),), bubble)
        return PipelineTime(tuple((rank, amount) for rank, amount, _ in alike), bubble)

    def _cached_update(self, rank: int) -> Update:
        parallelism = self.plan.parallelism
        per_micro_batch = self.layout.ga if parallelism.dp_sharding == "full" else 1
        ways = (parallelism.dp_sharding, parallelism.dp_shard_size, parallelism.gradient_sync)
        key = (*self.split, rank, *ways, per_micro_batch)
        if key not in self.cache.updates:
            self.cache.updates[key] = self._update(rank)
        return self.cache.updates[key]

    def _update(self, rank: int) -> Update:
        parameters = self.work.parameters(rank)
        messages = self.work.of_step(rank)
        links = self.links
        timed = ((each, links.travel(each) + links.bucket_latency(each, parameters[0])) for each in messages)
        return Update(*parameters, tuple(timed))

    def _ranks(self) -> list[tuple[int, Amount, int]]:
        """Return, for each kind of pipeline rank, the first such rank, its work per micro-batch, and their number."""
        last = self.layout.pp - 1
        same = [(layers, rank == 0, rank == last) for rank, layers in enumerate(self.work.stages)]
        return [
            (same.index(one), self._rank(one[0], is_first=one[1], is_last=one[2]), ranks)
            for one, ranks in Counter(same).items()
        ]

    def _rank(self, layers: tuple[tuple[LayerKind, int], ...], *, is_first: bool, is_last: bool) -> Amount:
        amount: Amount = {}
        for kind, count in layers:
            _add(amount, self._part(kind), count)
        if is_first:
            _add(amount, self._part("first"))
        if is_last:
            _add(amount, self._part("last"))
        if not (is_first and is_last):
            # Without virtual stages a rank has nothing else to compute when it sends or receives.
            hides = priced(amount, self.rates) if self.layout.vp > 1 else 0.0
            _add(amount, self._delays("pp", [self.work.between_stages()], hides))
        return amount

    def _part(self, part: LayerKind | Literal["first", "last"]) -> Amount:
        key = (part, *self.key)
        if key not in self.cache.parts:
            ends = {"first": self.work.first, "last": self.work.last}
            amount: Amount = {}
            for each in ends[part]() if isinstance(part, str) else self.work.layer(part):
                _add(amount, self._amount(each))
            self.cache.parts[key] = amount
        return self.cache.parts[key]

    def _amount(self, work: PassWork) -> Amount:
        peaks = self.gpu.peak_tflops
        found = {kind: flops / peaks[kind] / 1e12 for kind, flops in work.flops.items()}
        (precision,) = found or ("bf16",)
        if work.experts:
            of_experts = work.experts / peaks[precision] / 1e12
            found[precision] -= of_experts
            found["experts"] = of_experts * self.rates[precision]
        products = priced(found, self.rates)
        found["attention"] = attention = work.attention / peaks["bf16"] / 1e12
        if self.layout.cp > 1 and attention:
            found["cp_attention"] = attention
        found["written"] = work.written / self.bytes_per_s
        found["memory"] = work.moved / self.bytes_per_s
        found["cast"] = work.cast / self.bytes_per_s
        routed = work.routed / self.bytes_per_s
        if self.replays:
            # One graph of a whole step launches its kernels without the host, and permutes tokens in fused kernels.
            found["memory"] += routed
        else:
            found |= {"routed": routed, "fp8_layer_s": work.cast_layers, "moe_layer_s": work.expert_layers}
        groups = self._by_group(work.messages)
        _add(found, self._delays("tp_fp8" if precision != "bf16" else "tp", groups["tp"], products))
        _add(found, self._delays("cp", groups["cp"], attention * self.rates["attention"]))
        beside = sum(self.links.travel(each) for each in groups["ep"] if each.beside)
        hides = min(beside, found.get("experts", 0.0) * self.rates["experts"])
        _add(found, self._delays("ep", groups["ep"], hides + priced(found, self.rates) * self.rates["ep_hidden"]))
        return {name: each for name, each in found.items() if each}

    def _by_group(self, messages: Iterable[Messages]) -> Mapping[str, list[Messages]]:
        found: dict[str, list[Messages]] = {"tp": [], "cp": [], "ep": []}
        for each in messages:
            found["ep" if each.group == "etp" else each.group].append(each)
        return found

    def _delays(self, name: str, messages: Sequence[Messages], hides: float) -> Amount:
        travel = sum(map(self.links.travel, messages))
        shared = travel - sum(self.links.travel(each) for each in messages if each.beside)
        beyond = max(0.0, travel - hides - shared * self.rates[name])
        return {name: shared, f"{name.removesuffix('_fp8')}_beyond": beyond}

    @property
    def bytes_per_s(self) -> float:
        return self.gpu.memory_bandwidth_tb_s * 1e12

    def _defer_head(self, busy: Amount, rank: int, bubble_s: float) -> None:
        """Move the weight gradients of the head into the bubble of the last rank, up to its length."""
        if rank != self.layout.pp - 1:
            return
        each = self.work.head_weight_gradient() / self.gpu.peak_tflops["bf16"] / 1e12
        busy["bf16"] -= min(self.layout.ga * each, bubble_s / self.rates["bf16"])

    def _waits(self, busy_s: float) -> Amount:
        """Return the time spent waiting for slower ranks, proportional to the work and to the doublings of nodes."""
        doublings = max(0.0, log2(self.layout.gpus / self.gpu.gpus_per_node))
        return {"wait_fp8" if self.casts else "wait": doublings * busy_s} if doublings else {}

    def _once(self, rank: int, micro_batch_s: float) -> Amount:
        """Return the work outside of micro-batches: the update, and the exchange of gradients and parameters."""
        layout, (dense, experts, exchanges) = self.layout, self._cached_update(rank)
        replicas = self.plan.parallelism.replicas(layout)
        shard = dense * replicas.dense / (layout.dp * layout.cp) + experts * replicas.experts / layout.edp
        moved = UPDATE_BYTES * shard + (CAST_BYTES * (dense + experts) if self.casts and self.plan.lora is None else 0)
        found = {"memory": moved / self.bytes_per_s, "step_s": 1.0}
        if self.casts:
            found["fp8_step_s"] = 1.0
        _add(found, self._exchange(exchanges, micro_batch_s))
        return found

    def _exchange(self, exchanges: Sequence[tuple[Messages, float]], micro_batch_s: float) -> Amount:
        layout = self.layout
        gathered = sum(seconds for message, seconds in exchanges if message.kind == "all_gather")
        reduced = sum(seconds for message, seconds in exchanges if message.kind != "all_gather")
        window = micro_batch_s * self.rates["dp_hidden"]
        ends = window * (min(layout.pp, layout.ga) if layout.vp > 1 else 1)
        hidden = min(reduced, (window * layout.ga if self.plan.syncs_each_pass else ends) * BACKWARD)
        if self.work.gathers == 1:
            hidden += min(gathered, ends * (1 - BACKWARD))
        else:
            passes = window * layout.ga
            hidden += min(gathered / 2, passes * (1 - BACKWARD)) + min(gathered / 2, passes * BACKWARD - hidden)
        return {"dp": hidden, "dp_beyond": gathered + reduced - hidden}


def _add(to: Amount, amount: Mapping[str, float], times: float = 1.0) -> None:
    for name, each in amount.items():
        to[name] = to.get(name, 0.0) + each * times
