# SPDX-License-Identifier: Apache-2.0
"""The loop that all adapters share: the same data, the same work and the same timing for each engine."""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.engine.engines.job import Job, Measured


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
        (loss * share).backward()  # type: ignore[no-untyped-call]
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
    """Trains ``job``. A step ends when its loss is on the host, and so with everything before it."""
    generator = torch.Generator(job.device).manual_seed(job.seed)
    times, losses = [], []
    for number in range(job.warmup_steps + job.timed_steps):
        shape = (job.ga, job.mbs, job.seq_len + 1)
        batches = torch.randint(job.model.vocab_size, shape, generator=generator, device=job.device)
        finish(job.device)
        began = time.perf_counter()
        total = torch.zeros((), device=job.device)
        for tokens in batches:
            total += trainee.add_gradients(tokens, 1 / job.ga).float()
        trainee.update()
        losses.append(total.item() / job.ga)
        finish(job.device)
        times.append(time.perf_counter() - began)
        sys.stderr.write(f"step {number}: {times[-1]:.4f} s, loss {losses[-1]:.4f}\n")
    return Measured(
        parameters=trainee.parameters,
        step_times_s=tuple(times[job.warmup_steps :]),
        losses=tuple(losses),
        peak_memory_bytes=peak_memory(job.device),
        versions={"torch": torch.__version__, **trainee.versions},
        conventions=trainee.conventions,
    )


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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
