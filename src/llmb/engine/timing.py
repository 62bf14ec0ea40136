# SPDX-License-Identifier: Apache-2.0
"""Times and values of steps, read late enough that the device need not wait for the host.

A GPU works through a queue that the host fills. If the host waits for a loss, the queue runs empty. The values of a
step are therefore read after the next step is queued. Without a queue they are read immediately.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.engine.data.steps import Figures, StepData
from llmb.engine.device import Memory, Moment, memory
from llmb.engine.expert_load import ExpertLoadCounter
from llmb.engine.layer_times import LayerTimes, Span, seconds_of
from llmb.engine.optimizer import learning_rate
from llmb.engine.parallel.gloo import gloo_backend
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.plan import Plan
from llmb.runs.steps import ExpertLoad, Fp8Counts, Step


@dataclass(slots=True)
class PendingStep:
    """A step that the device may still be working on. ``values`` are valid once ``ended`` has passed.

    values: this rank's loss (0 without one) and the gradient norm, then, if there are any, the load of experts and the
    counts of FP8.
    """

    number: int
    saving: bool
    began: Moment
    ended: Moment
    has_loss: bool
    values: Tensor
    memory: Memory
    figures: Figures
    wait_s: float
    pause_s: float
    layers: Sequence[Sequence[Span]]


class StepReader:
    """Called when a step begins and ends; returns a step when its values are known. All ranks call it alike."""

    def __init__(self, plan: Plan, ranks: Ranks, load: ExpertLoadCounter, layers: LayerTimes) -> None:
        self.plan = plan
        self.ranks = ranks
        self.load = load
        self.layers = layers
        self.read_s: float | None = None
        self.queues = ranks.device.type == "cuda"
        self.pending: deque[PendingStep] = deque()
        # Values that hosts know are exchanged between hosts: on the GPU they would be queued after the next step.
        self.group = dist.new_group(backend=gloo_backend(), group_desc="figures of steps") if self.queues else None

    def begin(self, number: int, *, saving: bool) -> None:
        """A step begins where the one before ends, if that is still running. ``saving`` is as in ``Step``."""
        self.number, self.saving = number, saving
        self.pause_s = time.perf_counter() - self.read_s if self.read_s is not None else 0.0
        self.layers.begin()
        self.began = self.pending[-1].ended if self.pending else Moment(self.ranks.device)

    def end(self, loss: Tensor | None, norm: Tensor, data: StepData, fp8: Tensor | None = None) -> None:
        """Called when all of the step is queued: this rank's loss, if any, the norm, 0-d fp64, and FP8 counts, [2]."""
        load = self.load.of_step()
        parts = [torch.zeros_like(norm) if loss is None else loss, norm]
        parts += [value for values in (load, fp8) if values is not None for value in values]
        values = torch.stack(parts).to("cpu", non_blocking=True)
        ended, used = Moment(self.ranks.device), memory(self.ranks.device)
        of_host = (data.figures, data.wait_s, self.pause_s, self.layers.spans)
        self.pending.append(
            PendingStep(self.number, self.saving, self.began, ended, loss is not None, values, used, *of_host)
        )

    def read(self, *, all_steps: bool) -> Iterator[tuple[Step, Memory]]:
        """The steps to read now, with this rank's memory: ``all_steps``, or those that need no waiting."""
        left = 1 if self.queues and not all_steps else 0
        while len(self.pending) > left:
            step = self.pending.popleft()
            yield self._read(step), step.memory
        self.read_s = time.perf_counter()

    def _read(self, pending: PendingStep) -> Step:
        """One step over all ranks; every rank gets the same."""
        asked_s = time.perf_counter()
        pending.ended.wait()
        seen_s = time.time()
        ahead_s = time.perf_counter() - asked_s
        loss, norm, *counts = pending.values.tolist()
        load, fp8 = (counts[:-2], counts[-2:]) if self.plan.fp8_recipe else (counts, None)
        own_s = pending.ended.seconds_since(pending.began)
        layers = seconds_of(pending.layers, pending.began)
        mine = [float(pending.has_loss), loss, norm, own_s, float(pending.memory.peak_bytes), pending.wait_s]
        mine += [pending.pause_s, ahead_s, layers.layer_s, max(0.0, layers.outside_s - pending.wait_s)]
        with_loss, losses, norms, times, peaks, waits, *others = self._exchange([*mine, *map(float, pending.figures)])
        pauses, aheads, layer_times, outside, *sums = others
        recipe = self.plan.recipe
        # Ranks that have the same samples have the same figures.
        tokens, labels, squares, chunked = (int(sum(each)) * recipe.layout.dp // self.ranks.world_size for each in sums)
        return Step(
            step=pending.number,
            # Without a queue, the exchange is part of the step: nothing overlaps it.
            step_time_s=max(times) if self.queues else time.perf_counter() - pending.began.time_s,
            loss=sum(losses) / sum(with_loss),
            grad_norm=norms[0],
            lr=learning_rate(recipe.training, pending.number),
            tokens=tokens,
            padded_tokens=recipe.layout.gbs * recipe.layout.seq_len,
            counted_labels=labels,
            sum_of_squares=squares or None,
            chunked_sum_of_squares=chunked if chunked != squares else None,
            data_wait_s=max(waits),
            pause_s=max(pauses),
            host_ahead_s=min(aheads) if self.queues else None,
            layer_s_median=statistics.median_low(layer_times),
            layer_s_max=max(layer_times),
            slowest_layer_rank=layer_times.index(max(layer_times)),
            outside_layers_s=min(outside),
            ended_s=round(seen_s if self.queues else time.time(), 4),
            peak_memory_bytes=int(max(peaks)),
            peak_memory_rank=peaks.index(max(peaks)),
            rank_step_time_s_min=min(times),
            rank_step_time_s_max=max(times),
            slowest_rank=times.index(max(times)),
            saving=pending.saving,
            profiled=self.plan.slows_down(pending.number),
            expert_load=ExpertLoad(max_over_mean=load[0], idle_experts=int(load[1]), dropped_share=load[2])
            if load
            else None,
            fp8=Fp8Counts(saturated_tensors=int(fp8[0]), not_finite_tensors=int(fp8[1])) if fp8 else None,
        )

    def _exchange(self, mine: list[float]) -> list[list[float]]:
        """The values of every rank."""
        values = torch.tensor(mine, dtype=torch.float64)
        gathered = [torch.empty_like(values) for _ in range(self.ranks.world_size)]
        dist.all_gather(gathered, values, group=self.group)
        by_value: list[list[float]] = torch.stack(gathered).T.tolist()
        return by_value
