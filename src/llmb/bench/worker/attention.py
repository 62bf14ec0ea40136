# SPDX-License-Identifier: Apache-2.0
"""Attention with the engine's choice of backend, or with one that is named."""

from functools import partial
from statistics import median

import torch
from torch import Tensor

from llmb.bench.jobs import AttentionCase, CaseList
from llmb.bench.worker.timing import DTYPES, Call, PreparedCall, burst
from llmb.engine.attention_backend import attention_kernel, try_kernel
from llmb.engine.model.attention import attend
from llmb.errors import UsageError
from llmb.runs.attention import AttentionBackend, Trial, select, try_backends
from llmb.runs.host import Device


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
            measure = partial(self._milliseconds, case, backend, timed)
            return try_kernel(backend, measure, grouped=case.heads != case.kv_heads)

        kind: Device = "cuda" if self.device.type == "cuda" else "cpu"
        try:
            report = select(case.backend, try_backends(case.backend, kind, attempt))
        except UsageError as error:
            raise RuntimeError(error.what) from error
        return Trial(backend=report.backend, repeats_heads=report.repeats_heads)

    def _milliseconds(
        self, case: AttentionCase, backend: AttentionBackend, timed: bool, repeats_heads: bool
    ) -> float | None:
        """Raises MemoryError, for which the backend is not to blame, where the device runs out of memory."""
        try:
            call = _call(case, self.device, repeats_heads=repeats_heads, backend=backend)
            with attention_kernel(backend):
                call()
                return 1e3 * median(burst(PreparedCall(call), self.device, self.job)) if timed else None
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


def _call(case: AttentionCase, device: torch.device, *, repeats_heads: bool, backend: AttentionBackend) -> Call:
    """The pass of ``case``, to be called with the backend's context; a backward pass has its forward pass done."""
    *heads, gradient = _heads(case, device)

    def forward() -> Tensor:
        query, key, value = heads
        return attend(query, key, value, repeats_heads=repeats_heads)

    if case.direction == "forward":
        return forward
    if case.direction == "both":
        return lambda: torch.autograd.grad(forward(), heads, gradient)
    with attention_kernel(backend):
        seen = forward()
    return lambda: torch.autograd.grad(seen, heads, gradient, retain_graph=True)


def _heads(case: AttentionCase, device: torch.device) -> list[Tensor]:
    """Query, key and value as projections give them, and the result's gradient: [batch, seq, heads, head_dim]."""
    drawn = [
        torch.randn(case.batch, case.seq_len, number, case.head_dim, dtype=DTYPES[case.dtype], device=device)
        for number in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    return [*(part.requires_grad_() for part in drawn[:3]), drawn[3]]
