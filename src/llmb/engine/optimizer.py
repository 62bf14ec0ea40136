# SPDX-License-Identifier: Apache-2.0
"""AdamW with linear warm-up, cosine decay and gradient clipping."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.catalogue.records import Training
from llmb.engine.model.linear import local_tensor
from llmb.engine.parallel.exchange import RankPart, TrainedStage

SMALLEST_NORM = 1e-6
"""Added to a norm before dividing by it, as in torch."""

RUN, MOST_RUNS = 2**18, 64


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A parameter and the tensors that its update writes; master and moments are sharded alike."""

    parameter: nn.Parameter
    part: RankPart | None
    """Elements that this rank updates; None for its whole shard."""
    master: Tensor
    """Their fp32 values; the parameter's own if it is fp32."""
    first: Tensor
    second: Tensor
    steps: Tensor
    """Number of updates, 0-d, on the host, so that reading it does not wait for the device."""
    weight_decay: float
    copies: int | None
    """Number of ranks with the same update; None for the replica of another stage's embedding."""

    @property
    def gradient(self) -> Tensor | None:
        return self.parameter.grad if self.part is None else self.part.gradient

    @property
    def weight(self) -> Tensor | None:
        """The tensor to round the master to; None if the master is the parameter or a part of it."""
        if self.part is not None:
            return self.part.weight
        return None if self.master is self.parameter else local_tensor(self.parameter)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return master, gradient and moments; FSDP may replace a parameter's local shard, so they are not cached."""
        assert self.gradient is not None
        master, gradient = local_tensor(self.master), local_tensor(self.gradient)
        return master, gradient, local_tensor(self.first), local_tensor(self.second)

    def drop_gradient(self) -> None:
        self.parameter.grad = None
        if self.part is not None:
            self.part.gradient = None


class AdamW:
    """AdamW with torch's fused kernel. Gradients are divided by ``divisor``, 0-d fp32 on the device."""

    def __init__(self, trained: Sequence[Trained], training: Training, device: torch.device) -> None:
        self.trained = trained
        self.training, self.lr = training, training.peak_lr
        self.divisor = torch.ones((), device=device)
        self.state = {
            each.parameter: {"step": each.steps, "exp_avg": each.first, "exp_avg_sq": each.second} for each in trained
        }

    @torch.no_grad()
    def step(self) -> None:
        due = [each for each in self.trained if each.gradient is not None]
        if due:
            torch._foreach_add_([each.steps for each in due], 1)
        if not self.divisor.is_cpu or any(each.tensors()[1].dtype != torch.float32 for each in due):
            for each in due:  # one by one, so that only one bf16 gradient at a time has the fp32 copy for the kernel
                self.update([each], each.weight_decay)
            return
        for decay in {each.weight_decay for each in due}:  # one call for many: small models spend their time in calls
            self.update([each for each in due if each.weight_decay == decay], decay)

    def update(self, trained: Sequence[Trained], weight_decay: float) -> None:
        masters, gradients, first, second = zip(*(each.tensors() for each in trained), strict=True)
        # The kernel uses the same offsets for all four; with other strides it would mix up elements.
        assert all(part.is_contiguous() for parts in (masters, gradients, first, second) for part in parts)
        steps = [each.steps for each in trained]
        if not self.divisor.is_cpu:
            steps = [torch.full((), float(each), device=self.divisor.device) for each in steps]
        torch._fused_adamw_(
            masters,
            [gradient.float() for gradient in gradients],
            first,
            second,
            [],
            steps,
            lr=self.lr,
            beta1=self.training.beta1,
            beta2=self.training.beta2,
            weight_decay=weight_decay,
            eps=self.training.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self.divisor,
            found_inf=None,
        )
        for each, master in zip(trained, masters, strict=True):
            if each.weight is not None:
                each.weight.copy_(master)

    def zero_grad(self) -> None:
        for trained in self.trained:
            trained.drop_gradient()


def build_optimizer(stage: TrainedStage, training: Training) -> AdamW:
    """Return the optimizer of a stage. Trained matrices have weight decay; norm weights and biases do not."""
    return AdamW(list(trained_in(stage, training)), training, next(stage.model.parameters()).device)


def trained_in(stage: TrainedStage, training: Training) -> Iterator[Trained]:
    """Yield the parameters, or the parts of them, that this rank updates."""
    copies = {each: bucket.peers.copies for bucket in stage.buckets for each in bucket.parameters}
    for _, parameter, master, part in stage.held():
        if parameter.requires_grad:
            yield Trained(
                parameter,
                part,
                master,
                torch.zeros_like(master),
                torch.zeros_like(master),
                torch.zeros(()),
                training.weight_decay if parameter.ndim > 1 else 0.0,
                None if parameter is stage.model.replica else copies.get(parameter, 1) * ranks_with_a_copy(parameter),
            )


def learning_rate(training: Training, step: int) -> float:
    """Return the learning rate of ``step``, from 0: linear warm-up, then cosine decay to the minimum."""
    if step < training.warmup_steps:
        return training.peak_lr * (step + 1) / (training.warmup_steps + 1)
    span = max(1, training.decay_steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / span)
    return training.min_lr + (training.peak_lr - training.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def clip_gradients(optimizers: Sequence[AdamW], largest_norm: float) -> Tensor:
    """Make the next step clip gradients to ``largest_norm``; return the norm before, 0-d fp64. A collective."""
    trained = [each for optimizer in optimizers for each in optimizer.trained]
    norm = gradient_norm([(one.gradient, one.copies) for one in trained if one.gradient is not None and one.copies])
    scale = ((norm + SMALLEST_NORM) / largest_norm).clamp(min=1.0).float()
    for optimizer in optimizers:
        optimizer.divisor = scale
    return norm


def gradient_norm(gradients: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the norm of all ranks' gradients, each with its number of copies: 0-d fp64 (fp32 would depend on
    sharding)."""
    shared: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, copies in gradients:
        shared[copies].append(local_tensor(gradient))
    # Divided by a number: a tensor of numbers would be copied from the host, which waits for all queued work.
    total = torch.stack([squared_norm(alike) / copies for copies, alike in shared.items()]).sum()
    if dist.is_initialized() and dist.get_world_size() > 1:  # gloo would wait for its thread even then
        dist.all_reduce(total)
    return total.sqrt()


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, 0-d fp64."""
    if any(gradient.is_cuda for gradient in gradients):
        return torch.stack(torch._foreach_norm(gradients, 2.0, torch.float64)).square().sum()
    sums = []
    for values in (gradient.flatten() for gradient in gradients):
        # On a CPU, convert chunks that fit in the cache to fp64 one by one, at most MOST_RUNS of a tensor. BLAS takes
        # half as long as torch's own norm.
        for run in values.chunk(max(1, min(MOST_RUNS, values.numel() // RUN))):
            exact = run.double()
            sums.append(torch.dot(exact, exact))
    return torch.stack(sums).sum()


def ranks_with_a_copy(tensor: Tensor) -> int:
    """Return the number of ranks that hold the same shard of a DTensor; 1 for any other tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
