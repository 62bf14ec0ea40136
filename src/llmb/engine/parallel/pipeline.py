# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a step, in pipelines by 1F1B or interleaved 1F1B (Narayanan et al., 2021)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime

from llmb.catalogue.layout_check import rank_stages, stage_layers
from llmb.catalogue.records import Layout, Model
from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.attention import DocumentSegments
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import local_tensor
from llmb.engine.parallel.context_parallel import rank_positions
from llmb.engine.parallel.data_parallel import compute_dtype
from llmb.engine.parallel.exchange import Stages, TrainedStage
from llmb.engine.parallel.mesh import Ranks, new_group
from llmb.runs.plan import EnginePlan


class Passes(Protocol):
    """Runs the passes of a step on this rank's part of the model."""

    @property
    def stages(self) -> Stages: ...

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor | None:
        """Accumulate gradients of the summed loss divided by ``count``; return this rank's loss, 0-d fp64, or None."""


def build_passes(stages: list[TrainedStage], plan: EnginePlan, ranks: Ranks) -> Passes:
    layout = plan.recipe.layout
    positions = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)
    if layout.pp == 1:
        return Accumulation(stages[0], layout, positions, syncs_each=plan.syncs_each_pass)
    passes = Pipeline(stages, layout, positions, compute_dtype(plan.recipe.dtype), ranks)
    for stage in passes.placed:
        stage.syncs_each = plan.syncs_each_pass
    return passes


def set_gradient_sync(model: nn.Module, *, syncs_each: bool, is_last: bool) -> None:
    """Make the next backward pass of a sharded model reduce its gradients, or accumulate them unsharded."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs_each or is_last)
        model.set_requires_all_reduce(is_last)
        # Otherwise the buffer of the last reduction would stay in memory during the next passes.
        model.set_is_last_backward(syncs_each or is_last)


class Accumulation:
    """Runs micro-batches one by one through the full model."""

    def __init__(self, stage: TrainedStage, layout: Layout, positions: Tensor, *, syncs_each: bool) -> None:
        self.stages = [stage]
        self.layout = layout
        self.syncs_each = syncs_each
        self.positions = positions

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor:
        model, ga = self.stages[0].model, self.layout.ga
        # fp64: in fp32 the last digit of the mean would depend on the order of the losses.
        total = torch.zeros((), device=self.positions.device, dtype=torch.float64)
        for index, batch in enumerate(batches):
            set_gradient_sync(model, syncs_each=self.syncs_each, is_last=index == ga - 1)
            # Divided here, not afterwards, which would round bf16 gradients once more.
            loss = model(
                batch.tokens[:, self.positions],
                batch.labels[:, self.positions],
                self.positions,
                batch.starts,
                count * ga,
                batch.segments,
            )
            loss.backward()
            total += loss.detach()
        return total


@torch.no_grad()
def reduce_tied_gradients(stages: Sequence[Decoder], pp: DeviceMesh) -> None:
    """Sum the gradients of a tied matrix's two copies, on the first and the last rank of ``pp``."""
    for stage in stages:  # of which at most one is an end of the pipeline
        embedding = stage.embed_tokens
        if not stage.model.tied_embeddings or embedding is None or not embedding.weight.requires_grad:
            continue
        assert embedding.weight.grad is not None, "both ends of a pipeline use the embedding"
        gradient = local_tensor(embedding.weight.grad)
        group, other, received = pp.get_group(), pp.size() - 1 - pp.get_local_rank(), torch.empty_like(gradient)
        exchanges = [
            dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(exchanges):
            work.wait()
        gradient.add_(received)


def build_stages(model: Model, layout: Layout, pp_rank: int) -> list[Decoder]:
    """Return this rank's stages, in the order in which a token passes them; without a pipeline the full model."""
    layers = stage_layers(layout)
    return [
        Decoder(model, layers[index], embedding=index == 0, head=index == len(layers) - 1)
        for index in rank_stages(layout, pp_rank)
    ]


class Lanes(NamedTuple):
    """Groups for transfers to the next stage and back, by lane; with one group, receives would delay sends."""

    forward: Mapping[int, dist.ProcessGroup]
    backward: Mapping[int, dist.ProcessGroup]


def lane(stage: int, ranks: int) -> int:
    """Return the lane between a stage and the next one. A rank's lanes to its two neighbors differ."""
    sender = stage % ranks
    return 2 if ranks % 2 and sender == ranks - 1 else sender % 2


def connect_lanes(layout: Layout, pp: DeviceMesh) -> Lanes:
    """Create the groups of all lanes. A collective of all ranks."""
    apart = layout.gpus // layout.pp
    parts = tuple(tuple(range(first, layout.gpus, apart)) for first in range(apart))
    numbers = sorted({lane(stage, layout.pp) for stage in range(layout.pp * layout.vp - 1)})
    forward = {number: new_group(parts, f"pp forward {number}") if number else pp.get_group() for number in numbers}
    if layout.vp == 1:  # torch then sends to a neighbor and receives from it in one call, which is for one group
        return Lanes(forward, forward)
    return Lanes(forward, {number: new_group(parts, f"pp backward {number}") for number in numbers})


class Stage(PipelineStage):
    """A stage with a group per lane, whose received tensors are allocated on receipt and freed after use."""

    lanes: Lanes
    new_hidden: Callable[..., Tensor]
    """Allocates hidden states of a micro-batch."""
    micro_batch = 0
    positions: Tensor | None = None
    count: Tensor | float = 1.0
    segments: Sequence[DocumentSegments | None] = ()
    """Segments of each micro-batch."""
    syncs_each = False

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (as torch declares it)
        result = super()._prepare_forward_infra(1, *args, **options)
        self.args_recv_info = self._one_each(self.args_recv_info[0], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (as torch declares it)
        result = super()._prepare_backward_infra(1, *args, **options)
        self.grad_recv_info = self._one_each(self.grad_recv_info[0], num_microbatches)
        self.chunks = num_microbatches
        return result

    def _one_each(self, infos: tuple[Any, ...], micro_batches: int) -> dict[int, tuple[Any, ...]]:
        each = {number: tuple(map(copy, infos)) for number in range(micro_batches)}
        for number in each:
            self._release(each[number])
        return each

    def _allocate(self, infos: tuple[Any, ...], *, requires_grad: bool) -> None:
        for info in infos:
            info.buffer = self.new_hidden(requires_grad=requires_grad)

    def _release(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if getattr(info, "buffer", None) is not None:  # tokens are not received
                info.buffer = torch.empty(0, device=self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (as torch declares it)
        self.micro_batch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:  # noqa: ANN401 (as torch declares it)
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self._release(self.grad_recv_info[bwd_chunk_id])

    def forward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 (as torch declares it)
        segments = self.segments[self.micro_batch]
        return self.submod(*args, positions=self.positions, count=self.count, segments=segments, **options)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:  # noqa: ANN401 (as torch declares it)
        if not self.syncs_each:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        set_gradient_sync(self.submod, syncs_each=True, is_last=last_backward)
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_reshard_after_backward(False)
        passed = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*passed), None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], requires_grad=True)
        return self._in(self.lanes.forward, self.stage_index - 1, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._in(self.lanes.forward, self.stage_index, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info[bwd_chunk_id], requires_grad=False)
        return self._in(self.lanes.backward, self.stage_index, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._in(self.lanes.backward, self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _in(
        self, groups: Mapping[int, dist.ProcessGroup], stage: int, operations: list[dist.P2POp]
    ) -> list[dist.P2POp]:
        for operation in operations:
            operation.group = groups[lane(stage, self.group_size)]
        return operations


class Pipeline:
    """Runs the passes of a step over all pipeline ranks."""

    def __init__(self, stages: Stages, layout: Layout, positions: Tensor, dtype: torch.dtype, ranks: Ranks) -> None:
        self.stages = stages
        self.ranks = ranks
        self.positions = positions
        numbers = rank_stages(layout, ranks.pp_rank)
        self.has_embedding = numbers[0] == 0
        self.has_loss = numbers[-1] == layout.pp * layout.vp - 1
        seq = len(positions) // layout.sequence_shards
        new_hidden = partial(
            torch.empty, layout.mbs, seq, stages[0].model.model.hidden_size, dtype=dtype, device=ranks.device
        )
        count, group = layout.pp * layout.vp, ranks.mesh.get_group("pp")
        self.placed = [
            Stage(stage.model, number, count, ranks.device, *_shapes(stage.model, layout, new_hidden), group=group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        lanes = connect_lanes(layout, ranks.mesh["pp"])
        for stage in self.placed:
            stage.positions, stage.lanes, stage.new_hidden = positions, lanes, new_hidden
        self.micro_batches = layout.ga
        self.schedule: PipelineScheduleSingle | _PipelineScheduleRuntime
        # The last stage computes the loss itself. Without such a function there is no backward pass.
        options: dict[str, Any] = {"loss_fn": lambda loss, _labels: loss, "scale_grads": False}
        if layout.vp == 1:
            self.schedule = Schedule1F1B(self.placed[0], layout.ga, **options)
        else:
            self.schedule = ScheduleInterleaved1F1B(list(self.placed), layout.ga, **options)

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor | None:
        tokens, labels, starts, _, segments = zip(*batches, strict=True)
        for stage in self.placed:
            # Divided here, not afterwards: gradients of a block are on their way before the step's passes end.
            stage.count, stage.segments = count * self.micro_batches, segments
        inputs = (torch.cat(tokens)[:, self.positions],) if self.has_embedding else ()
        # Every stage needs the starts of its micro-batch: the schedule splits keyword arguments too.
        packed: dict[str, Any] = {} if starts[0] is None else {"starts": torch.cat(starts)}
        losses: list[Tensor] = []
        if self.has_loss:
            target = torch.cat(labels)[:, self.positions]
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, labels=target, **packed)
        else:
            self.schedule.step(*inputs, return_outputs=False, **packed)
        reduce_tied_gradients([stage.model for stage in self.stages], self.ranks.mesh["pp"])
        return torch.stack([loss.detach().double() for loss in losses]).sum() if losses else None


def _shapes(stage: Decoder, layout: Layout, new_hidden: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Return an example input and output of a stage for a micro-batch, so that torch need not infer shapes."""
    hidden = new_hidden(requires_grad=True)
    loss = torch.empty((), device=hidden.device, requires_grad=True)
    tokens = torch.empty(layout.mbs, layout.seq_len // layout.cp, dtype=torch.int64, device=hidden.device)
    return tokens if stage.embeds else hidden, hidden if stage.lm_head is None else loss
