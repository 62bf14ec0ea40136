# SPDX-License-Identifier: Apache-2.0
"""Attention by every backend that a GPU has, at the head sizes of the recipes."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of

from llmb.catalogue.records import Model
from llmb.engine.attention_backend import FAILURES, attention_kernel, choose_attention, groups_heads_of_documents
from llmb.engine.collectives import Group
from llmb.engine.data.batches import moved
from llmb.engine.model.attention import CausalAttention, Reach, attend, document_masks, document_segments
from llmb.engine.parallel.context_parallel import SpanAttention, rank_positions, rank_ranges
from llmb.engine.stages import prepare_stages
from llmb.runs.attention_choice import BACKENDS, AttentionBackend
from llmb.runs.plan import Plan

pytestmark = pytest.mark.gpu
VARLEN, *FUSED, _ = BACKENDS["cuda"]
LENGTHS = [[1, 200, 61, 250], [300, 12, 200]]


@pytest.fixture
def gpu(needs: Callable[..., None]) -> Iterator[torch.device]:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=device)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["causal", "masked", "context-parallel"])
@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("backend", FUSED)
def test_a_backend_computes_what_exact_attention_does_or_refuses(
    backend: AttentionBackend, head_dim: int, kind: str, gpu: torch.device
) -> None:
    torch.manual_seed(1)
    shapes = ((1, 256, 8, head_dim), (1, 512, 2, head_dim), (1, 512, 2, head_dim))
    if kind != "context-parallel":
        shapes = tuple((1, 512, heads, head_dim) for _, _, heads, _ in shapes)
    exact = [torch.randn(shape, device=gpu).bfloat16().float().requires_grad_() for shape in shapes]
    rounded = [part.detach().bfloat16().requires_grad_() for part in exact]
    places = torch.arange(512, device=gpu)
    mask = ((places[:, None] >= places) & (places[:, None] // 100 == places // 100))[None, None]
    spans = SpanAttention(Group("", 2, 1), 512)

    def compute(parts: list[torch.Tensor], computed_by: AttentionBackend, repeats_heads: bool) -> list[torch.Tensor]:
        spans.backend, spans.repeats_heads = computed_by, repeats_heads
        if kind == "context-parallel":
            seen = spans(*parts)
        else:
            seen = attend(*parts, mask=mask if kind == "masked" else None, repeats_heads=repeats_heads)
        return [seen, *torch.autograd.grad(seen.float().square().sum(), parts)]

    with attention_kernel("math"):
        expected = compute(exact, "math", False)
    refusals = 0
    for repeats_heads in (False, True):
        try:
            with attention_kernel(backend):
                found = compute(rounded, backend, repeats_heads)
        except FAILURES:
            refusals += 1
            continue
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() < 0.02 * other.norm()
    if backend == "flash" and kind != "masked":
        assert refusals == 0
    if backend == "cudnn" and kind != "masked" and head_dim == 128 and torch.cuda.get_device_capability(gpu) >= (9, 0):
        assert refusals < 2, "the published figures need it"


def test_auto_times_the_backends_of_a_gpu(gpu: torch.device, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(scale=1, dtype="bf16").model_copy(update={"device": "cuda"})
    ranks = ranks_of(plan, 0, gpu)
    report = choose_attention([stage.model for stage in prepare_stages(plan, ranks)], plan, ranks)
    assert [trial.backend for trial in report.trials] == FUSED
    timed = [trial.milliseconds for trial in report.trials if trial.milliseconds is not None]
    assert timed
    assert min(timed) > 0
    assert next(trial.milliseconds for trial in report.trials if trial.backend == report.backend) == min(timed)
    assert all((trial.milliseconds is None) == (trial.problem is not None) for trial in report.trials)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 128])
@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_without_masks_are_computed_as_with_exact_ones(
    ranks: int, chunk_size: int | None, compiled: bool, gpu: torch.device, models: dict[str, Model]
) -> None:
    torch.manual_seed(1)
    chunked = models["llama4"].chunked_attention.model_copy(update={"chunk_size": 128})
    model = models["llama4"].model_copy(update={"chunked_attention": chunked})
    lengths = [torch.tensor(row) for row in LENGTHS]
    starts = torch.stack([torch.repeat_interleave(row.cumsum(0) - row, row) for row in lengths])
    for rank in range(ranks):
        core = CausalAttention(Reach(chunk_size))
        core = SpanAttention(Group("", ranks, rank), 512, Reach(chunk_size)) if ranks > 1 else core
        core.repeats_heads = not groups_heads_of_documents()
        places = rank_positions(512, rank, ranks, gpu)
        masks = document_masks(model, places, places - starts.to(gpu)[:, places], 512)
        segments = moved(document_segments(model, starts, rank_ranges(512, rank, ranks), 300), gpu)
        shapes = [(2, len(places), 8, 128), (2, 512, 2, 128), (2, 512, 2, 128)]
        exact = [torch.randn(shape, device=gpu).bfloat16().float().requires_grad_() for shape in shapes]
        rounded = [part.detach().bfloat16().requires_grad_() for part in exact]
        with attention_kernel("math"):
            seen = core(*exact, masks)
            expected = [seen, *torch.autograd.grad(seen.square().sum(), exact)]
        with attention_kernel("varlen"):
            seen = (torch.compile(core, dynamic=False) if compiled else core)(*rounded, segments)
            found = [seen, *torch.autograd.grad(seen.float().square().sum(), rounded)]
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() < 0.02 * other.norm()


def test_auto_times_documents_without_masks_too(gpu: torch.device, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(scale=1, dtype="bf16", document_tokens=40).model_copy(update={"device": "cuda"})
    ranks = ranks_of(plan, 0, gpu)
    report = choose_attention([stage.model for stage in prepare_stages(plan, ranks)], plan, ranks)
    assert [trial.backend for trial in report.trials] == [VARLEN, *FUSED]
    assert report.trials[0].problem is None
    assert next(trial for trial in report.trials if trial.backend == "flash").problem
