# SPDX-License-Identifier: Apache-2.0
"""Attention of a context-parallel rank in parts without a mask, and the exact attention that it is compared with."""

import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llmb.engine import attention_backend
from llmb.engine.attention_backend import BOUNDS, accuracy_problem, distances_of, exact_attention
from llmb.engine.collectives import Group
from llmb.engine.kernels import span_attention
from llmb.engine.model.attention import Reach
from llmb.engine.parallel.context_parallel import SpanAttention, rank_positions, span_kernel
from llmb.engine.transformations import _policy

SEQ = 128
CPU = torch.device("cpu")
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 0.008}


def heads_of(ranks: int, dtype: torch.dtype, seq: int = SEQ) -> tuple[list[Tensor], Tensor]:
    """A rank's query, key and value of the full sequence, with grouped heads; and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, seq // ranks, 6, 16), (2, seq, 2, 16), (2, seq, 2, 16), (2, seq // ranks, 6, 16))
    *heads, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [part.requires_grad_() for part in heads], gradient


def seen_by(rank: int, ranks: int, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    places = rank_positions(SEQ, rank, ranks, CPU)[None]
    return places - places % (chunk_size or SEQ), places


def results(core: torch.nn.Module, heads: list[Tensor], gradient: Tensor) -> list[Tensor]:
    seen = core(*heads)
    return [seen.detach(), *torch.autograd.grad(seen, heads, gradient)]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((one.float() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("chunk_size", [None, 24, 32, 100])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parts_together_are_exact_attention(
    ranks: int, chunk_size: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact attention, too, is computed in parts."""
    monkeypatch.setattr(attention_backend, "MOST_SCORES", 2**14)
    heads, gradient = heads_of(ranks, dtype)
    for rank in range(ranks):
        core = SpanAttention(Group("", ranks, rank), SEQ, Reach(chunk_size))
        exact = exact_attention(heads, gradient, *seen_by(rank, ranks, chunk_size))
        assert distance(results(core, heads, gradient), exact) < CLOSE[dtype]
        core.repeats_heads = True
        assert distance(results(core, heads, gradient), exact) < CLOSE[dtype]
        core.backend = "math"
        assert distance(results(core, heads, gradient), exact) < CLOSE[dtype]


def test_scores_far_apart_are_joined_without_overflow() -> None:
    """A query that sees a key before its span alone, and one that sees its own alone."""
    heads, gradient = heads_of(2, torch.float32)
    with torch.no_grad():
        heads[0][:, 40], heads[0][:, 41] = 200 * heads[1][:, 1, :1], 200 * heads[1][:, 73, :1]
    core = SpanAttention(Group("", 2, 1), SEQ)
    found = results(core, heads, gradient)
    assert distance(found, exact_attention(heads, gradient, *seen_by(1, 2, None))) < 1e-4  # of scores of 800


class Sizes(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        parts = made if isinstance(made, tuple | list) else (made,)
        self.most = max([self.most, *(part.numel() for part in parts if isinstance(part, Tensor))])
        return made


def test_nothing_is_made_for_every_pair_of_tokens() -> None:
    seq, ranks = 2048, 2
    heads, gradient = heads_of(ranks, torch.float32, seq)
    core = SpanAttention(Group("", ranks, 1), seq)
    with Sizes() as sizes:
        results(core, heads, gradient)
    assert sizes.most == max(part.numel() for part in heads) < (seq // 2) ** 2 / 4


@pytest.mark.parametrize(("kept", "count"), [(True, 4), (False, 8)])
def test_selective_recomputation_keeps_the_joined_result(kept: bool, count: int) -> None:
    heads, gradient = heads_of(2, torch.float32)
    core = SpanAttention(Group("", 2, 1), SEQ)
    expected = results(core, heads, gradient)
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(_policy)} if kept else {}
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        seen = checkpoint(core, *heads, use_reentrant=False, **options)
        found = [seen.detach(), *torch.autograd.grad(seen, heads, gradient)]
    assert all(map(torch.equal, found, expected))
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == count  # two spans of two parts


def test_it_is_compiled_as_one_graph() -> None:
    heads, gradient = heads_of(2, torch.float32)
    core = SpanAttention(Group("", 2, 1), SEQ, Reach(24))
    compiled = torch.compile(core, fullgraph=True, dynamic=False, backend="aot_eager")
    assert all(map(torch.equal, results(compiled, heads, gradient), results(core, heads, gradient)))


def test_operators_of_cudnn_are_called_as_torch_declares_them() -> None:
    """By their shapes alone: nothing computes."""
    assert span_kernel("cudnn", CPU) == "cudnn"
    kernel = span_attention.KERNELS["cudnn"]
    query, seen, gradient = (torch.empty(2, 6, 8, 16, device="meta", dtype=torch.bfloat16) for _ in range(3))
    key, value = (torch.empty(2, 2, 24, 16, device="meta", dtype=torch.bfloat16) for _ in range(2))
    found, lse = kernel.forward(query, key, value, causal=False, scale=None)
    assert (found.shape, lse.shape, lse.dtype) == (query.shape, (2, 6, 8), torch.float32)
    gradients = kernel.backward(gradient, query, key, value, seen, lse, causal=False, scale=None)
    assert [part.shape for part in gradients] == [query.shape, key.shape, value.shape]


def test_a_wrong_result_is_told_from_a_rounded_one() -> None:
    exact = [torch.linspace(-1, 1, 1000) for _ in range(4)]
    rounded = [part.bfloat16() for part in exact]

    def problem(found: list[Tensor]) -> str | None:
        return accuracy_problem(distances_of(found, exact), BOUNDS[found[0].dtype])

    assert problem(rounded) is None
    rounded[1] = (1.03 * exact[1]).bfloat16()
    assert problem(rounded) == ("its gradient of queries differs by 3 % from exact attention; the limit is 2 %")
    rounded[1] = exact[1].bfloat16()
    rounded[3][7] = math.nan
    assert problem(rounded) == "its gradient of values is not finite"
    assert problem([part * 1.002 for part in exact]) == (
        "its result differs by 0.2 % from exact attention; the limit is 0.1 %"
    )
