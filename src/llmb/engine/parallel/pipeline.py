# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each rank holds some of the model's stages and passes micro-batches on to the next.

One forward and one backward pass alternate on a rank (1F1B; Narayanan et al., 2021, section 2.2). With virtual stages a
rank holds every PP-th stage (interleaved 1F1B), which shortens the idle time at both ends of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from llmb.catalogue.records import Layout, Model
from llmb.catalogue.stages import stage_layers
from llmb.engine.data.synthetic import MicroBatch
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.loss import CrossEntropy
from llmb.engine.parallel.mesh import Ranks


def build_stages(model: Model, layout: Layout, pp_rank: int) -> list[Decoder]:
    """This rank's stages, in the order a token passes them; without pipeline parallelism the whole model."""
    layers = stage_layers(layout)
    return [
        Decoder(model, layers[index], embedding=index == 0, head=index == len(layers) - 1)
        for index in stage_numbers(layout, pp_rank)
    ]


def stage_numbers(layout: Layout, pp_rank: int) -> range:
    return range(pp_rank, layout.pp * layout.vp, layout.pp)


class Pipeline:
    """Runs the passes of a step over all pipeline ranks."""

    def __init__(
        self, stages: Sequence[Decoder], layout: Layout, positions: Tensor, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        self.stages = stages
        self.positions = positions
        for stage in stages:
            # The method, not the module, is replaced: FSDP looks at the module that a stage runs.
            stage.forward = partial(stage.forward, positions=positions)  # type: ignore[method-assign]
        numbers = stage_numbers(layout, ranks.pp_rank)
        self.has_embedding = numbers[0] == 0
        self.has_loss = numbers[-1] == layout.pp * layout.vp - 1
        group = ranks.pp.get_group()
        placed = [
            PipelineStage(
                stage, number, layout.pp * layout.vp, ranks.device, *_shapes(stage, layout, dtype, ranks), group=group
            )
            for stage, number in zip(stages, numbers, strict=True)
        ]
        # Ranks without a loss need a function all the same: a schedule without one has no backward pass.
        self.loss = stages[-1].loss or CrossEntropy()
        self.count: Tensor | float = 1.0
        self.schedule = _schedule(placed, layout.ga, lambda logits, labels: self.loss(logits, labels, self.count))

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor | None:
        self.count = count
        tokens, labels, starts = zip(*batches, strict=True)
        inputs = (torch.cat(tokens)[:, self.positions],) if self.has_embedding else ()
        # Every stage gets the starts of its micro-batch: the schedule cuts what it is given by name too.
        packed: dict[str, Any] = {} if starts[0] is None else {"starts": torch.cat(starts)}
        if not self.has_loss:
            self.schedule.step(*inputs, return_outputs=False, **packed)
            return None
        losses: list[Tensor] = []
        target = torch.cat(labels)[:, self.positions]
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **packed)
        return torch.stack([loss.detach().double() for loss in losses]).mean()


def _schedule(
    placed: list[PipelineStage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    if len(placed) == 1:
        return Schedule1F1B(placed[0], micro_batches, loss_fn=loss)
    return ScheduleInterleaved1F1B(list(placed), micro_batches, loss_fn=loss)


def _shapes(stage: Decoder, layout: Layout, dtype: torch.dtype, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """What a stage takes and gives for one micro-batch, so that no forward pass has to be spent on learning it."""
    seq = layout.seq_len // layout.cp
    float_like = partial(torch.empty, device=ranks.device, dtype=dtype, requires_grad=True)
    hidden = float_like(layout.mbs, seq // layout.tp if layout.sequence_parallel else seq, stage.model.hidden_size)
    logits = float_like(layout.mbs, seq, stage.model.vocab_size // layout.tp)
    tokens = torch.empty(layout.mbs, seq, dtype=torch.int64, device=ranks.device)
    return hidden if stage.embed_tokens is None else tokens, hidden if stage.lm_head is None else logits
