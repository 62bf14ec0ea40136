# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each rank holds some of the model's stages and passes micro-batches on (1F1B, interleaved with VP).

One forward and one backward pass alternate per rank (Narayanan et al., 2021, section 2.2); with several virtual stages
a rank holds every PP-th stage, which shortens the idle time at both ends of a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from llmb.catalogue.records import Layout, Model
from llmb.catalogue.stages import stage_layers
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.loss import CrossEntropy


def build_stages(model: Model, layout: Layout, pp_rank: int) -> list[Decoder]:
    """This rank's stages, in the order a token passes them; without pipeline parallelism the whole model."""
    stages = stage_layers(layout)
    return [
        Decoder(model, stages[index], embedding=index == 0, head=index == len(stages) - 1)
        for index in range(pp_rank, len(stages), layout.pp)
    ]


class Pipeline:
    """Runs the forward and backward passes of a step over all pipeline ranks."""

    def __init__(self, stages: Sequence[Decoder], layout: Layout, group: ProcessGroup, device: torch.device) -> None:
        rank, count = torch.distributed.get_rank(group), layout.pp * layout.vp
        indices = range(rank, count, layout.pp)
        self.has_embedding = indices[0] == 0
        self.has_loss = indices[-1] == count - 1
        # Ranks without a loss need a function all the same: a schedule without one has no backward pass.
        self.loss = stages[-1].loss or CrossEntropy()
        placed = [
            PipelineStage(stage, index, count, device, *_shapes(stage, layout, device), group=group)
            for stage, index in zip(stages, indices, strict=True)
        ]
        self.schedule = self._schedule(placed, layout.ga)

    def _schedule(
        self, placed: list[PipelineStage], micro_batches: int
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        if len(placed) == 1:
            return Schedule1F1B(placed[0], micro_batches, loss_fn=self.loss)
        # The type says stages of a class it does not export.
        return ScheduleInterleaved1F1B(placed, micro_batches, loss_fn=self.loss)  # type: ignore[arg-type]

    def train(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Gradients of the mean loss over all micro-batches; that loss, 0-d, on ranks that have it, else null.

        tokens and labels: [GA * MBS, seq], the same on all ranks of a pipeline.
        """
        losses: list[Tensor] = []
        inputs = (tokens,) if self.has_embedding else ()
        if self.has_loss:
            self.schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).double().mean()
        self.schedule.step(*inputs, return_outputs=False)
        return None


def _shapes(stage: Decoder, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a stage takes and gives for one micro-batch, so that nothing has to be tried out to learn it."""
    tokens = (layout.mbs, layout.seq_len)
    hidden = torch.empty(*tokens, stage.model.hidden_size, device=device, requires_grad=True)
    logits = torch.empty(*tokens, stage.model.vocab_size, device=device, requires_grad=True)
    given = hidden if stage.embed_tokens is None else torch.empty(tokens, dtype=torch.int64, device=device)
    return given, hidden if stage.lm_head is None else logits
