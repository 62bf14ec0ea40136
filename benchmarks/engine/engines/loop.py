# SPDX-License-Identifier: Apache-2.0
"""The loop that all adapters share: the same data, the same work and the same timing for each engine."""

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.engine.engines.job import Job, Measured
from llmb.engine.device import Moment


class Trainee(Protocol):
    """A model in training, in the form of its engine."""

    conventions: tuple[str, ...]
    versions: dict[str, str]

    @property
    def parameters(self) -> int: ...

    def add_gradients(self, tokens: Tensor, share: float) -> Tensor:
        """Adds ``share`` of the gradient of the mean loss of [mbs, seq_len + 1] tokens. Returns that loss, 0-d."""

    def update(self) -> None:
        """Clips the gradients, updates the parameters, resets the gradients."""


@dataclass
class PlainTrainee:
    """A torch module with a torch optimizer."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    """Takes inputs and labels, each [mbs, seq_len]."""
    optimizer: torch.optim.Optimizer
    clip_grad: float
    conventions: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def add_gradients(self, tokens: Tensor, share: float) -> Tensor:
        loss = self.loss(tokens[:, :-1], tokens[:, 1:])
        (loss * share).backward()
        return loss.detach()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def adamw(parameters: Sequence[nn.Parameter], job: Job) -> torch.optim.Optimizer:
    """The recipe's AdamW, fused. The learning rate is constant: it does not affect speed."""
    training = job.training
    betas = (training.beta1, training.beta2)
    return torch.optim.AdamW(
        parameters, lr=training.peak_lr, betas=betas, eps=training.eps, weight_decay=training.weight_decay, fused=True
    )


def measure(trainee: Trainee, job: Job) -> Measured:
    """Trains ``job`` and times its steps as llmb does: between two moments on the device's own clock.

    A step begins where the one before ended, and its loss is read when the next is queued. The data of all steps exists
    beforehand.
    """
    device = torch.device(job.device)
    generator = torch.Generator(device).manual_seed(job.seed)
    shape = (job.warmup_steps + job.timed_steps, job.ga, job.mbs, job.seq_len + 1)
    steps = torch.randint(job.model.vocab_size, shape, generator=generator, device=device)
    moments = [Moment(device)]
    pending: list[Tensor] = []
    times: list[float] = []
    losses: list[float] = []
    for batches in steps:
        pending.append(do_step(trainee, batches, device))
        moments.append(Moment(device))
        while len(pending) > (device.type == "cuda" and len(moments) <= len(steps)):
            number = len(times)
            moments[number + 1].wait()
            times.append(moments[number + 1].seconds_since(moments[number]))
            losses.append(pending.pop(0).item() / job.ga)
            sys.stderr.write(f"step {number}: {times[-1]:.4f} s, loss {losses[-1]:.4f}\n")
    return Measured(
        parameters=trainee.parameters,
        step_times_s=tuple(times[job.warmup_steps :]),
        losses=tuple(losses),
        peak_memory_bytes=peak_memory(job.device),
        versions={"torch": torch.__version__, **trainee.versions},
        conventions=trainee.conventions,
    )


def do_step(trainee: Trainee, batches: Tensor, device: torch.device) -> Tensor:
    """The sum of the losses of [ga, mbs, seq_len + 1] tokens, 0-d, on the host once the device is done with the step.

    Copied within the device's queue: reading it from there later would wait for the next step, too.
    """
    total = torch.zeros((), device=device)
    for tokens in batches:
        total += trainee.add_gradients(tokens, 1 / len(batches)).float()
    trainee.update()
    return total.to("cpu", non_blocking=True)


def peak_memory(device: str) -> int:
    """On a GPU the peak memory allocated by PyTorch; on a CPU the largest resident set of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_adapter(build: Callable[[Job], Trainee]) -> None:
    """The main function of an adapter: ``PROGRAM JOB_FILE RESULT_FILE``."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    torch.manual_seed(job.seed)
    measured = measure(build(job), job)
    Path(sys.argv[2]).write_text(measured.model_dump_json())
