# SPDX-License-Identifier: Apache-2.0
"""Attention by every backend that a GPU has, at the head sizes of the recipes."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from llmb.engine.attention_backend import attention_kernel, choose_attention
from llmb.engine.loop import prepare_stages
from llmb.engine.model.attention import attend
from llmb.engine.parallel.collectives import Group
from llmb.engine.parallel.context_parallel import SpanAttention
from llmb.engine.parallel.mesh import arrange
from llmb.runs.attention import BACKENDS
from llmb.runs.plan import Plan

pytestmark = pytest.mark.gpu
FUSED = BACKENDS["cuda"][:-1]


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
    backend: str, head_dim: int, kind: str, gpu: torch.device
) -> None:
    torch.manual_seed(1)
    shapes = ((1, 256, 8, head_dim), (1, 512, 2, head_dim), (1, 512, 2, head_dim))
    if kind != "context-parallel":
        shapes = tuple((1, 512, heads, head_dim) for _, _, heads, _ in shapes)
    exact = [torch.randn(shape, device=gpu).bfloat16().float().requires_grad_() for shape in shapes]
    rounded = [part.detach().bfloat16().requires_grad_() for part in exact]
    places = torch.arange(512, device=gpu)
    mask = ((places[:, None] >= places) & (places[:, None] // 100 == places // 100))[None, None]
    spans = SpanAttention(Group("", 2, 0), 512, None)

    def compute(parts: list[torch.Tensor], repeats_heads: bool) -> list[torch.Tensor]:
        spans.repeats_heads = repeats_heads
        if kind == "context-parallel":
            seen = spans(*parts)
        else:
            seen = attend(*parts, mask=mask if kind == "masked" else None, repeats_heads=repeats_heads)
        return [seen, *torch.autograd.grad(seen.float().square().sum(), parts)]

    with attention_kernel("math"):
        expected = compute(exact, False)
    refusals = 0
    for repeats_heads in (False, True):
        with attention_kernel(backend):
            try:
                found = compute(rounded, repeats_heads)
            except RuntimeError:
                refusals += 1
                continue
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() < 0.02 * other.norm()
    if backend == "flash" and kind != "masked":
        assert refusals == 0


def test_auto_times_the_backends_of_a_gpu(gpu: torch.device, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(scale=1, dtype="bf16").model_copy(update={"device": "cuda"})
    layout = plan.recipe.layout
    ranks = arrange(0, gpu, layout, plan.parallelism.replicas(layout))
    report = choose_attention(prepare_stages(plan, ranks), plan, ranks)
    assert [trial.backend for trial in report.trials] == list(FUSED)
    timed = [trial.milliseconds for trial in report.trials if trial.milliseconds is not None]
    assert timed
    assert min(timed) > 0
    assert next(trial.milliseconds for trial in report.trials if trial.backend == report.backend) == min(timed)
    assert all((trial.milliseconds is None) == (trial.problem is not None) for trial in report.trials)
