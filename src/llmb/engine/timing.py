# SPDX-License-Identifier: Apache-2.0
"""Times and values of steps, read after the next step is queued, so that a GPU need not wait."""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.engine.data.batches import Figures, StepData
from llmb.engine.device import Memory, Moment, Span, memory
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import MoELayer, Router, count_choices
from llmb.engine.optimizer import learning_rate
from llmb.engine.parallel.mesh import Ranks, collective_limit
from llmb.engine.parallel.rendezvous import Hosts, all_gather, ranks_of_node
from llmb.runs.folder import write_atomically
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_times import RankTime
from llmb.runs.steps import ExpertLoad, Fp8Counts, Step


class LayerSeconds(NamedTuple):
    """Forward seconds of a rank's first micro-batch: mean of its layers, gap before the first, sum of later gaps."""

    layer_s: float
    before_s: float
    between_s: float


class LayerTimes:
    """Times the layers of ``stages``. Create it last, so that it wraps all other wrappers of forward passes."""

    def __init__(self, stages: Sequence[Decoder], device: torch.device) -> None:
        self.device = device
        self.sizes = [len(stage.layers) for stage in stages]
        self.begin()
        for number, stage in enumerate(stages):
            for block in stage.blocks():
                block.wrap("compute", partial(partial, self._timed, number))

    def begin(self) -> None:
        """Begin a step: discard the times of the previous step."""
        self.spans: list[list[Span]] = [[] for _ in self.sizes]

    def _timed(self, stage: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        spans = self.spans[stage]
        if len(spans) == self.sizes[stage]:
            return forward(*arguments, **options)
        began = Moment(self.device)
        result = forward(*arguments, **options)
        spans.append((began, Moment(self.device)))
        return result


def seconds_of(stages: Sequence[Sequence[Span]], began: Moment) -> LayerSeconds:
    """Return the forward times of a step that began at ``began``; all moments must have passed on the device."""
    own = [ended.seconds_since(start) for spans in stages for start, ended in spans]
    first = [spans[0][0].seconds_since(began) for spans in stages if spans]
    waits = [later[0].seconds_since(earlier[1]) for spans in stages for earlier, later in pairwise(spans)]
    return LayerSeconds(sum(own) / max(len(own), 1), min(first, default=0.0), sum(waits))


class ExpertLoadCounter:
    """Counts the tokens of each routed expert over all ranks. Every rank must call ``of_step`` after the same steps."""

    def __init__(self, stages: Sequence[Decoder], ranks: Ranks) -> None:
        model, self.alone = stages[0].model, ranks.alone
        self.experts = model.moe.experts if model.moe else 0
        numbers = [number for number in range(model.layers) if model.is_moe_layer(number)]
        self.layers = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
        # The last three: dropped tokens, the fullest rank's rows times the number of ranks, and all ranks' rows.
        self.columns = torch.zeros(model.layers, self.experts + 3, dtype=torch.int64, device=ranks.device)
        self.total = torch.zeros_like(self.columns)
        for stage in stages:
            for number, layer in stage.moe_layers().items():
                layer.router.register_forward_hook(partial(self._count, number, layer))
                layer.experts.on_rows = partial(self._count_rows, number)

    def _count(
        self, number: int, layer: MoELayer, _router: Router, _inputs: object, choice: tuple[Tensor, Tensor]
    ) -> None:
        """Add the choices of this rank's tokens, and the dropped ones; if routing is recomputed, each counts twice."""
        _, chosen = choice
        counts = count_choices(chosen, layer.moe.experts)
        self.columns[number, : self.experts] += counts
        capacity = layer.capacity(chosen.numel())
        if capacity is not None:
            self.columns[number, -3] += (counts - capacity).clamp(min=0).sum()

    def _count_rows(self, number: int, rows: Tensor) -> None:
        self.columns[number, -2] += rows.amax() * len(rows)
        self.columns[number, -1] += rows.sum()

    def of_step(self) -> Tensor | None:
        """Return ``summary`` and ``by_layer`` since the last call, flattened; None without experts or other ranks. A
        collective."""
        if not self.experts:
            return None
        dist.all_reduce(self.columns)
        self.total += self.columns
        counts, further = self.columns[:, : self.experts], self.columns[:, self.experts :]
        layers = by_layer(counts[self.layers], further[self.layers, 1:])
        load = torch.cat((summary(counts, further[:, 0]), layers.flatten()))
        self.columns.zero_()
        return None if self.alone else load

    def write(self, path: Path) -> None:
        """Write each expert's fraction of the choices in its layer, over all steps so far, as JSON to ``path``."""
        counts = self.total[:, : self.experts]
        shares = {number: (row.double() / row.sum()).tolist() for number, row in enumerate(counts) if row.any()}
        write_atomically(path, json.dumps({"share_of_tokens": shares}) + "\n")


def summary(counts: Tensor, dropped: Tensor) -> Tensor:
    """Return the first fields of ``ExpertLoad``, [3] fp64. ``counts``: [layers, experts]; ``dropped``: [layers]."""
    used = counts.any(-1)
    rows = counts.double()
    max_over_mean = (rows.amax(-1) / rows.mean(-1)).where(used, 0.0).max()
    idle_experts = ((counts == 0) & used.unsqueeze(-1)).sum()
    dropped_share = dropped.sum().double() / counts.sum().clamp(min=1)
    return torch.stack((max_over_mean, idle_experts.double(), dropped_share))


def by_layer(counts: Tensor, rows: Tensor) -> Tensor:
    """Return each layer's busiest expert and fullest rank relative to the mean, [2, layers] fp64 on the device."""
    experts = counts.amax(-1) / counts.double().mean(-1).clamp(min=1 / counts.shape[1])
    return torch.stack((experts, (rows[:, 0] / rows[:, 1].double().clamp(min=1)).where(rows[:, 1] > 0, 1.0)))


def expert_load(values: Sequence[float]) -> ExpertLoad | None:
    """Return the values of ``of_step`` as a record; None without values."""
    if not values:
        return None
    max_over_mean, idle_experts, dropped_share, *layers = values
    rounded = tuple(round(each, 4) for each in layers)
    return ExpertLoad(
        max_over_mean=max_over_mean,
        idle_experts=int(idle_experts),
        dropped_share=dropped_share,
        layers_max_over_mean=rounded[: len(rounded) // 2],
        layers_rank_max_over_mean=rounded[len(rounded) // 2 :],
    )


@dataclass(slots=True)
class PendingStep:
    """A step that the device may still be working on. ``values`` are valid once ``ended`` has passed."""

    number: int
    saving: bool
    began: Moment
    ended: Moment
    has_loss: bool
    values: Tensor
    """Loss (0 if this rank has none), gradient norm, load of experts and FP8 counts, if any."""
    memory: Memory
    figures: Figures
    wait_s: float
    pause_s: float
    layers: Sequence[Sequence[Span]]
    copies: Sequence[Span]


def rank_time(pending: PendingStep) -> RankTime:
    """Return the parts of this rank's step time; waits for data count as far as they delay the first layer."""
    layers = seconds_of(pending.layers, pending.began)
    copies = [ended.seconds_since(began) for began, ended in pending.copies]
    input_s = min(pending.wait_s, layers.before_s)
    wait_s = layers.before_s - input_s - sum(copies[:1]) + layers.between_s
    return RankTime(input_s, sum(copies), layers.layer_s, max(0.0, wait_s))


class RankStep(NamedTuple):
    """A rank's values of a step, to exchange with others; ``loss`` is 0 if ``has_loss`` is 0."""

    has_loss: float
    loss: float
    norm: float
    step_s: float
    peak_bytes: float
    wait_s: float
    pause_s: float
    ahead_s: float
    input_s: float
    copy_s: float
    layer_s: float
    outside_s: float
    tokens: float
    labels: float
    squares: float
    chunked: float


class CompleteStep(NamedTuple):
    """A step with the values of all ranks. memory: this rank's memory. ranks: the times of each rank."""

    step: Step
    memory: Memory
    ranks: Sequence[RankTime]


class StepReader:
    """Records when steps begin and end, and reads their values later. All ranks must make the same calls."""

    def __init__(self, plan: EnginePlan, ranks: Ranks, load: ExpertLoadCounter, layers: LayerTimes) -> None:
        self.plan = plan
        self.ranks = ranks
        self.load = load
        self.layers = layers
        self.read_s: float | None = None
        self.queues = ranks.device.type == "cuda"
        self.pending: deque[PendingStep] = deque()
        # Values that hosts know are exchanged between hosts: on the GPU they would be queued after the next step.
        per_node = ranks_of_node(ranks.world_size)
        exchanges = self.queues and not ranks.alone
        limit = collective_limit(plan)
        self.hosts = Hosts(ranks.rank, ranks.world_size, per_node, "figures", limit) if exchanges else None

    def begin(self, number: int, *, saving: bool) -> None:
        """Begin a step now or, if the previous step is pending, at that step's end."""
        self.number, self.saving = number, saving
        self.pause_s = time.perf_counter() - self.read_s if self.read_s is not None else 0.0
        self.layers.begin()
        self.began = self.pending[-1].ended if self.pending else Moment(self.ranks.device)

    def end(self, loss: Tensor | None, norm: Tensor, data: StepData, fp8: Tensor | None = None) -> None:
        """End a queued step. loss: this rank's, if any. norm: the gradient norm, 0-d fp64. fp8: ``fp8_counts``, [2]."""
        load = self.load.of_step()
        parts = [torch.stack((torch.zeros_like(norm) if loss is None else loss, norm)), load, fp8]
        values = torch.cat([part for part in parts if part is not None]).to("cpu", non_blocking=True)
        ended, used = Moment(self.ranks.device), memory(self.ranks.device)
        of_host = (data.figures, data.wait_s, self.pause_s, self.layers.spans, data.copies)
        self.pending.append(
            PendingStep(self.number, self.saving, self.began, ended, loss is not None, values, used, *of_host)
        )

    def read(self, *, all_steps: bool) -> Iterator[CompleteStep]:
        """Yield all pending steps or, unless ``all_steps``, only steps that can be read without stalling the device."""
        left = 1 if self.queues and not all_steps else 0
        while len(self.pending) > left:
            yield self._read(self.pending.popleft())
        self.read_s = time.perf_counter()

    def _read(self, pending: PendingStep) -> CompleteStep:
        asked_s = time.perf_counter()
        pending.ended.wait()
        seen_s = time.time()
        ahead_s = time.perf_counter() - asked_s
        loss, norm, *counts = pending.values.tolist()
        load, fp8 = (counts[:-2], counts[-2:]) if self.plan.fp8_recipe else (counts, None)
        step_s, own = pending.ended.seconds_since(pending.began), rank_time(pending)
        waits = pending.wait_s, pending.pause_s, ahead_s
        values = pending.has_loss, loss, norm, step_s, pending.memory.peak_bytes, *waits, *own
        ranks, recipe = self._exchange(RankStep(*values, *pending.figures)), self.plan.recipe
        times, peaks = [rank.step_s for rank in ranks], [rank.peak_bytes for rank in ranks]
        # Ranks that have the same samples have the same figures. One that is alone has only its own.
        alone, dp = self.ranks.alone, recipe.layout.dp
        copies, shares, first = (1, dp, self.ranks.rank) if alone else (len(ranks) // dp, 1, 0)
        squares = int(sum(rank.squares for rank in ranks)) // copies
        chunked = int(sum(rank.chunked for rank in ranks)) // copies
        step = Step(
            step=pending.number,
            # Without a queue, the exchange is part of the step: nothing overlaps it.
            step_time_s=max(times) if self.queues else time.perf_counter() - pending.began.time_s,
            loss=None if alone else sum(rank.loss for rank in ranks) / sum(rank.has_loss for rank in ranks),
            grad_norm=None if alone else ranks[0].norm,
            lr=learning_rate(recipe.training, pending.number),
            tokens=int(sum(rank.tokens for rank in ranks)) // copies,
            padded_tokens=recipe.layout.gbs * recipe.layout.seq_len // shares,
            counted_labels=int(sum(rank.labels for rank in ranks)) // copies,
            sum_of_squares=squares or None,
            chunked_sum_of_squares=chunked if chunked != squares else None,
            data_wait_s=max(rank.wait_s for rank in ranks),
            pause_s=max(rank.pause_s for rank in ranks),
            host_ahead_s=min(rank.ahead_s for rank in ranks) if self.queues else None,
            layer_s_median=statistics.median_low(rank.layer_s for rank in ranks),
            outside_layers_s=min(rank.outside_s for rank in ranks),
            ended_s=round(seen_s if self.queues else time.time(), 4),
            peak_memory_bytes=int(max(peaks)),
            peak_memory_rank=first + peaks.index(max(peaks)),
            rank_step_time_s_min=min(times),
            rank_step_time_s_max=max(times),
            slowest_rank=first + times.index(max(times)),
            saving=pending.saving,
            profiled=self.plan.slows_down(pending.number),
            expert_load=expert_load(load),
            fp8=Fp8Counts(saturated_tensors=int(fp8[0]), not_finite_tensors=int(fp8[1])) if fp8 else None,
        )
        rank_times = [RankTime(rank.input_s, rank.copy_s, rank.layer_s, rank.outside_s) for rank in ranks]
        return CompleteStep(step, pending.memory, rank_times)

    def _exchange(self, mine: RankStep) -> list[RankStep]:
        if self.ranks.world_size == 1 or self.ranks.alone:
            return [mine]
        values = torch.tensor(mine, dtype=torch.float64)
        gathered = self.hosts.all_gather(values) if self.hosts else all_gather(values)
        return [RankStep(*each) for each in gathered.tolist()]
