# SPDX-License-Identifier: Apache-2.0
"""The time of a training step: the work of its ranks at the rates that GPUs and links attain. Pure.

A pipeline takes the time of its slowest rank for all micro-batches, plus the time to fill and drain. Seconds are first
computed at nominal rates; ``Rates`` has the factor by which each kind of work takes longer. Sources of the rates, and
which of them were fitted to published steps, are in ``rates.yaml``.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from types import MappingProxyType
from typing import Literal, NamedTuple

from llmb.base.errors import UsageError
from llmb.catalogue.records import Dtype, Gpu
from llmb.prediction.work import Amounts, LayerKind, MeasuredMachine, Messages, RankWork
from llmb.runs.plan import EnginePlan

START_S, NVLINK_HOP_S, NETWORK_HOP_S = 8.4e-6, 3.4e-6, 9.6e-6
"""Base latency of a ring with the protocol Simple, and latency of a step (NCCL, src/graph/tuning.cc at 01afd20)."""
UPDATE_BYTES = 30.1
"""Moved per parameter and step by an optimizer in one pass over memory, with the norm of gradients in bf16."""
CAST_BYTES = 4
"""Moved per parameter and step by casts of weights: bf16 is read, FP8 is written in both layouts."""
BUCKET, BUCKET_OF_REPLICA = 40e6, 1e6
"""Parameters per bucket: the larger of the first, and the second times the data-parallel ranks (Megatron-core,
distributed_data_parallel.py, bucket_size)."""

Amount = dict[str, float]
"""Seconds at nominal rates, by keys of ``TERMS``."""


@dataclass(frozen=True, slots=True)
class StepCache:
    """Results shared by plans that differ only in layout and number of layers, for one GPU type and its rates. Keys
    are the sizes that decide a result. parts: a micro-batch in a layer, an embedding or a head; pipelines: on the ranks
    of a pipeline; updates: once a step."""

    parts: dict[tuple[object, ...], Amount] = field(default_factory=dict)
    pipelines: dict[tuple[object, ...], "PipelineTime"] = field(default_factory=dict)
    updates: dict[tuple[object, ...], "Update"] = field(default_factory=dict)


class PipelineTime(NamedTuple):
    """The slowest rank, its work and seconds per micro-batch, and the bubble in which all ranks wait."""

    slowest: int
    amount: Amount
    seconds: float
    bubble: Amount


class Update(NamedTuple):
    """Elements that a rank trains, dense and of routed experts, and the seconds of each exchange of them."""

    dense: int
    experts: int
    exchanges: tuple[tuple[Messages, float], ...]


Rates = Mapping[str, float]
"""Factors relative to nominal rates, by keys of ``TERMS``; those that end in _s are seconds.

bf16, fp8, attention, memory: products and bytes. written: outputs of products. tp, cp, ep, pp, dp: the fraction of
messages that delays a rank. tp_bf16, tp_fp8, cp_attention: the slowdown of products and attention that are split for
overlap. exposed: data-parallel messages beyond what a step can hide. fp8_layer_s: per layer and micro-batch. step_s,
fp8_step_s: per step. wait_step_s, wait_micro_batch_s: per doubling of the nodes, because ranks synchronize once a step,
and in FP8 once a micro-batch, to reduce maxima.
"""
TERMS: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "products bf16",
        "fp8": "products fp8",
        "attention": "attention",
        "memory": "memory-bound operators",
        "written": "outputs of products",
        "tp": "tensor-parallel messages",
        "tp_bf16": "products cut for overlap",
        "tp_fp8": "products cut for overlap",
        "cp": "context-parallel messages",
        "cp_attention": "attention cut for overlap",
        "ep": "messages of experts",
        "pp": "messages between stages",
        "dp": "data-parallel messages beside work",
        "exposed": "data-parallel messages waited for",
        "fp8_layer_s": "FP8 scaling",
        "step_s": "once a step",
        "fp8_step_s": "once a step",
        "wait_step_s": "waiting for slower ranks",
        "wait_micro_batch_s": "waiting for slower ranks",
    }
)
"""Names of rates, and their labels in reports."""
BUBBLE = "pipeline bubble"


@dataclass(frozen=True, slots=True)
class NominalStep:
    """A step at nominal rates.

    busy: work of the slowest rank in all micro-batches and once a step. bubble: while the pipeline fills and drains.
    """

    busy: Amount
    bubble: Amount

    def terms(self, rates: Rates) -> dict[str, float]:
        """Return the seconds by cause, which sum to the step."""
        found: dict[str, float] = {}
        for name, amount in self.busy.items():
            found[TERMS[name]] = found.get(TERMS[name], 0.0) + amount * rates[name]
        if self.bubble:
            found[BUBBLE] = priced(self.bubble, rates)
        return {name: seconds for name, seconds in found.items() if seconds}

    def seconds(self, rates: Rates) -> float:
        return priced(self.busy, rates) + priced(self.bubble, rates)


def priced(amount: Amount, rates: Rates) -> float:
    """Return the seconds of an amount at real rates."""
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
    plan: EnginePlan, gpu: Gpu, rates: Rates, cache: StepCache | None = None, machine: MeasuredMachine | None = None
) -> NominalStep:
    """Return the step at nominal rates; ``rates`` decide the slowest rank and how much of the exchange it hides.

    cache: shared by many plans for one machine. Raises UsageError if ``why_not_predicted`` gives a reason.
    """
    return _Step(plan, gpu, rates, cache or StepCache(), machine or MeasuredMachine()).nominal()


COMPUTED = ("bf16", "fp8", "attention", "memory", "written", "fp8_layer_s")
"""Rates of the work that a rank does alone, without communication."""


def computed_seconds(plan: EnginePlan, gpu: Gpu, rates: Rates, pp_stage: int) -> float:
    """Return the seconds that a rank of a stage computes in a step, without messages and work split for overlap.
    Raises UsageError if ``why_not_predicted`` gives a reason."""
    return _Step(plan, gpu, rates, StepCache(), MeasuredMachine()).computed(pp_stage)


class _Step:
    def __init__(self, plan: EnginePlan, gpu: Gpu, rates: Rates, cache: StepCache, machine: MeasuredMachine) -> None:
        if why := why_not_predicted(plan, gpu):
            raise UsageError(why, do="see 'llmb list' for GPU types, or specify the hardware with --hardware FILE")
        self.plan, self.gpu, self.rates, self.cache, self.links = plan, gpu, rates, cache, machine.links
        layout = self.layout = plan.recipe.layout
        sizes = (layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs, layout.seq_len, layout.sequence_parallel)
        self.key = (*sizes, layout.pp > 1, plan.recompute)
        self.work = RankWork(plan, gpu.sms, machine)
        self.fp8 = plan.recipe.dtype is Dtype.FP8

    def nominal(self) -> NominalStep:
        slowest, amount, seconds, bubble = self._cached_pipeline()
        busy = {name: each * self.layout.ga for name, each in amount.items()}
        if bubble:
            self._defer_head(busy, slowest, priced(bubble, self.rates))
        _add(busy, self._once(slowest, seconds))
        return NominalStep(busy, bubble)

    def computed(self, stage: int) -> float:
        rank = self._rank(self.work.stages[stage], is_first=stage == 0, is_last=stage == self.layout.pp - 1)
        of_step = self._once(stage, 0.0)
        whole = {name: self.layout.ga * rank.get(name, 0.0) + of_step.get(name, 0.0) for name in COMPUTED}
        return priced(whole, self.rates)

    @cached_property
    def split(self) -> tuple[object, ...]:
        """Cache key that is equal for layouts that differ only in their batch."""
        layout = self.layout
        split = (layout.pp, layout.vp, layout.layers, layout.first_stage_layers, layout.last_stage_layers)
        return (*self.key, *split, layout.counts_embedding_and_loss, layout.gpus)

    def _cached_pipeline(self) -> PipelineTime:
        if self.split not in self.cache.pipelines:
            self.cache.pipelines[self.split] = self._pipeline()
        return self.cache.pipelines[self.split]

    def _pipeline(self) -> PipelineTime:
        layout, alike = self.layout, self._ranks()
        seconds = {rank: priced(amount, self.rates) for rank, amount, _ in alike}
        slowest = max(seconds, key=seconds.__getitem__)
        bubble: Amount = {}
        for _, amount, ranks in alike if layout.pp > 1 else ():
            _add(bubble, amount, (layout.pp - 1) / layout.vp * ranks / layout.pp)
        busy = next(amount for rank, amount, _ in alike if rank == slowest)
        return PipelineTime(slowest, busy, seconds[slowest], bubble)

    def _cached_update(self, rank: int) -> Update:
        sharding = self.plan.parallelism.dp_sharding
        key = (*self.split, rank, sharding, self.layout.ga if sharding == "full" else 1)
        if key not in self.cache.updates:
            self.cache.updates[key] = self._update(rank)
        return self.cache.updates[key]

    def _update(self, rank: int) -> Update:
        parameters = self.work.parameters(rank)
        messages = self.work.of_step(parameters)
        timed = ((each, self.travel(each) + self._bucket_latency(each, parameters[0])) for each in messages)
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
        amount: Amount = {} if is_first and is_last else self._message(self.work.between_stages())
        for kind, count in layers:
            _add(amount, self._part(kind), count)
        if is_first:
            _add(amount, self._part("first"))
        if is_last:
            _add(amount, self._part("last"))
        return amount

    def _part(self, part: LayerKind | Literal["first", "last"]) -> Amount:
        key = (part, *self.key)
        if key not in self.cache.parts:
            ends = {"first": self.work.first, "last": self.work.last}
            self.cache.parts[key] = self._amount(ends[part]() if isinstance(part, str) else self.work.layer(part))
        return self.cache.parts[key]

    def _amount(self, work: Amounts) -> Amount:
        """Return the seconds of ``work`` at nominal rates."""
        peaks = self.gpu.peak_tflops
        found = {kind: flops / peaks["fp8" if kind == "fp8" else "bf16"] / 1e12 for kind, flops in work.flops.items()}
        layout = self.layout
        if layout.tp > 1 and work.fp8_layers + (work.flops.get("attention", 0) > 0):
            cut = "fp8" if work.fp8_layers else "bf16"
            found[f"tp_{cut}"] = found[cut]
        if layout.cp > 1 and "attention" in found:
            found["cp_attention"] = found["attention"]
        found["written"] = work.written / self.bytes_per_s
        found["memory"] = (work.moved + work.cast) / self.bytes_per_s
        found["fp8_layer_s"] = work.fp8_layers
        for message in work.messages:
            _add(found, self._message(message))
        return found

    @property
    def bytes_per_s(self) -> float:
        return self.gpu.memory_bandwidth_tb_s * 1e12

    def _message(self, message: Messages) -> Amount:
        if message.beside:
            return {}
        name = {"etp": "ep", "edp": "dp"}.get(message.group, message.group)
        return {name: self.travel(message)}

    def travel(self, message: Messages) -> float:
        """Return the seconds of messages over links at nominal rates, with the latency of rings."""
        ranks, within = self.groups[message.group]
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // within)
        latency = START_S + (ranks - nodes) * NVLINK_HOP_S + (nodes - 1) * NETWORK_HOP_S
        nvlink = self.links.get(message.kind, self.gpu.nvlink_gb_s / 2 * 1e9)
        volume = message.size * (2 if message.kind == "all_reduce" else 1)
        if message.kind == "send":
            link = nvlink if nodes == 1 else self._network
            return message.number * (START_S + volume / link)
        if nodes == 1:
            return message.number * (latency + volume * (ranks - 1) / ranks / nvlink)
        if message.kind == "all_to_all":
            return message.number * (latency + volume * (ranks - within) / ranks / self._network)
        # Each member of the group in a node uses its own adapter.
        link = min(nvlink, within * self._network)
        return message.number * (latency + volume * (ranks - 1) / ranks / link)

    @property
    def _network(self) -> float:
        assert self.gpu.network_gb_s is not None, "checked before"
        return self.gpu.network_gb_s * 1e9

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """The ranks of each group, and how many of them share an NVLink domain."""
        layout, domain = self.layout, self.gpu.nvlink_domain_gpus
        found = {
            "tp": (layout.tp, 1),
            "cp": (layout.cp, layout.tp),
            "dp": (layout.cp * layout.dp, layout.tp),
            "etp": (layout.etp, 1),
            "ep": (layout.ep, layout.etp),
            "edp": (layout.edp, layout.etp * layout.ep),
            "pp": (min(layout.pp, 2), layout.gpus // layout.pp),
        }
        return {name: (ranks, max(1, min(ranks, domain // stride))) for name, (ranks, stride) in found.items()}

    def _defer_head(self, busy: Amount, slowest: int, bubble_s: float) -> None:
        """Move the head's weight gradients into the bubble of the last rank, as far as they fit."""
        if slowest != self.layout.pp - 1:
            return
        each = self.work.head_weight_gradient() / self.gpu.peak_tflops["bf16"] / 1e12
        busy["bf16"] -= min(self.layout.ga * each, bubble_s / self.rates["bf16"])

    def _once(self, rank: int, micro_batch_s: float) -> Amount:
        """Return the seconds of the exchange of gradients and parameters, and of the update."""
        layout, (dense, experts, exchanges) = self.layout, self._cached_update(rank)
        shard = dense / (layout.dp * layout.cp) + experts / layout.edp
        if self.plan.parallelism.dp_sharding == "none":
            shard = float(dense + experts)
        moved = UPDATE_BYTES * shard + (CAST_BYTES * (dense + experts) if self.fp8 and self.plan.lora is None else 0)
        found = {"memory": moved / self.bytes_per_s, "step_s": 1.0}
        doublings = max(0.0, log2(layout.gpus / self.gpu.gpus_per_node))
        found["wait_step_s"] = doublings
        if self.fp8:
            found |= {"fp8_step_s": 1.0, "wait_micro_batch_s": doublings * layout.ga}
        # A stage's part of the exchange begins when the stage is done: an interleaved pipeline can hide it in one
        # micro-batch per rank, any other only in the last or the first.
        window = micro_batch_s * (min(layout.pp, layout.ga) if layout.vp > 1 else 1)
        for message, travel in exchanges:
            of_window = {"reduce_scatter": 2 / 3, "all_reduce": 2 / 3, "all_gather": message.number / 3}
            waited = max(0.0, travel - of_window[message.kind] * window)
            _add(found, {"dp": travel, "exposed": waited})
        return found

    def _bucket_latency(self, message: Messages, elements: int) -> float:
        """Return the latency of all buckets but the first, whose latency is in ``travel``."""
        ranks, within = self.groups[message.group]
        buckets = max(1.0, elements / max(BUCKET, BUCKET_OF_REPLICA * ranks))
        return (buckets - 1) * (-(-ranks // within) - 1) * NETWORK_HOP_S


def _add(to: Amount, amount: Mapping[str, float], times: float = 1.0) -> None:
    for name, each in amount.items():
        to[name] = to.get(name, 0.0) + each * times
