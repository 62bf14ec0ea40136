# SPDX-License-Identifier: Apache-2.0
"""Attention with the engine's choice of backend, or with one that is named."""

import warnings
from statistics import median
from typing import NamedTuple, cast

import torch
from torch import Tensor

from llmb.bench.jobs import AttentionCase, CaseList
from llmb.bench.worker.timing import DTYPES, Call, PreparedCall, burst
from llmb.engine.attention_backend import FAILURES, KERNELS, attention_kernel
from llmb.engine.model.attention import attend
from llmb.errors import UsageError
from llmb.runs.attention import AttentionBackend, Trial, problem_text, select, try_backends
from llmb.runs.host import Device


class HeadTensors(NamedTuple):
    """Query, key and value as projections give them, [batch, seq, heads, head_dim], and the result's gradient."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


class AttentionChoices:
    """Which backend the engine would choose for a shape; each shape is tried once."""

    def __init__(self, device: torch.device, job: CaseList) -> None:
        self.device, self.job = device, job
        self.chosen: dict[AttentionCase, Trial] = {}

    def prepare(self, case: AttentionCase) -> PreparedCall:
        """Raises RuntimeError if no backend computes the shape."""
        trial = self._trial(case)
        call = _call(case, self.device, repeats_heads=trial.repeats_heads, backend=trial.backend)
        context = attention_kernel(trial.backend)
        return PreparedCall(call, context, backend=trial.backend, flushes=True)

    def _trial(self, case: AttentionCase) -> Trial:
        shape = case.model_copy(update={"direction": "both"})
        if shape not in self.chosen:
            self.chosen[shape] = self._try(shape)
        return self.chosen[shape]

    def _try(self, case: AttentionCase) -> Trial:
        def attempt(backend: AttentionBackend, timed: bool) -> Trial:
            trial = self._attempt(case, backend, timed=timed, repeats_heads=False)
            if trial.problem is None or case.heads == case.kv_heads:
                return trial
            return self._attempt(case, backend, timed=timed, repeats_heads=True)

        kind: Device = "cuda" if self.device.type == "cuda" else "cpu"
        choice = "auto" if case.backend == "auto" else cast("AttentionBackend", case.backend)
        try:
            report = select(choice, try_backends(choice, kind, attempt))
        except UsageError as error:
            raise RuntimeError(error.what) from error
        return Trial(backend=report.backend, repeats_heads=report.repeats_heads)

    def _attempt(self, case: AttentionCase, backend: AttentionBackend, *, timed: bool, repeats_heads: bool) -> Trial:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                call = _call(case, self.device, repeats_heads=repeats_heads, backend=backend)
                with attention_kernel(backend):
                    call()
                    times = burst(PreparedCall(call), self.device, self.job) if timed else []
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                problem = problem_text(str(error), [str(warning.message) for warning in told])
                return Trial(backend=backend, repeats_heads=repeats_heads, problem=problem)
        milliseconds = 1e3 * median(times) if times else None
        return Trial(backend=backend, repeats_heads=repeats_heads, milliseconds=milliseconds)


def _call(case: AttentionCase, device: torch.device, *, repeats_heads: bool, backend: AttentionBackend) -> Call:
    """The pass of ``case``, to be called with the backend's context; a backward pass has its forward pass done."""
    heads = _heads(case, device)

    def forward() -> Tensor:
        return attend(*heads.inputs, repeats_heads=repeats_heads)

    if case.direction == "forward":
        return forward
    if case.direction == "both":
        return lambda: torch.autograd.grad(forward(), heads.inputs, heads.gradient)
    with attention_kernel(backend):
        seen = forward()
    return lambda: torch.autograd.grad(seen, heads.inputs, heads.gradient, retain_graph=True)


def _heads(case: AttentionCase, device: torch.device) -> HeadTensors:
    def random(number: int) -> Tensor:
        shape = (case.batch, case.seq_len, number, case.head_dim)
        return torch.randn(shape, dtype=DTYPES[case.dtype], device=device)

    query, key, value = (random(number).requires_grad_() for number in (case.heads, case.kv_heads, case.kv_heads))
    return HeadTensors(query, key, value, random(case.heads))


def is_backend(name: str) -> bool:
    return name == "auto" or name in KERNELS
