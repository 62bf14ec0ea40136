# SPDX-License-Identifier: Apache-2.0
"""Attention by every backend that a CPU has: the same code as on a GPU, with another clock."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from llmb.base.errors import UsageError
from llmb.engine import attention_backend
from llmb.engine.attention_backend import (
    KERNELS,
    attempt,
    attention_cores,
    attention_kernel,
    choose_attention,
    documents_of,
    query_key_value,
)
from llmb.engine.collectives import Group
from llmb.engine.model import attention
from llmb.engine.model.attention import Attention, CausalAttention, Reach, SegmentOptions, Segments, attend
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.context_parallel import SpanAttention
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.stages import prepare_stages
from llmb.runs.plan import Plan

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
Alone = Callable[..., tuple[Plan, Ranks]]


def models_of(plan: Plan, ranks: Ranks) -> list[Decoder]:
    return [stage.model for stage in prepare_stages(plan, ranks)]


@pytest.fixture
def alone(tiny_plan: Callable[..., Plan]) -> Iterator[Alone]:
    """A plan of one process, and its ranks."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def start(workload: str = "pretrain_llama3.1", **options: Any) -> tuple[Plan, Ranks]:
        plan = tiny_plan(workload, scale=1, **options)
        return plan, ranks_of(plan)

    yield start
    dist.destroy_process_group()


def operators_of(core: CausalAttention, plan: Plan, ranks: Ranks) -> set[str]:
    heads, masks = query_key_value(plan, ranks), documents_of(plan, ranks, varlen=False)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        core(*heads, masks).sum().backward()
    return {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize("backend", OPERATORS)
@pytest.mark.parametrize("document_tokens", [None, 40])
@pytest.mark.parametrize(
    "core",
    [CausalAttention(), CausalAttention(Reach(32)), SpanAttention(Group("", 1, 0), 128, Reach(32))],
    ids=["causal", "chunked", "context-parallel"],
)
def test_every_kind_of_attention_is_computed_by_the_chosen_backend(
    core: CausalAttention, document_tokens: int | None, backend: Any, alone: Alone
) -> None:
    plan, ranks = alone(document_tokens=document_tokens)
    core.backend = backend
    with attention_kernel(backend):
        found = operators_of(core, plan, ranks)
    assert OPERATORS[backend] in found
    assert found.isdisjoint(set(OPERATORS.values()) - {OPERATORS[backend]})


@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "finetune_llama4-maverick"])
def test_a_cpu_takes_flash_attention_unless_told_otherwise(workload: str, alone: Alone) -> None:
    plan, ranks = alone(workload)
    stages = models_of(plan, ranks)
    report = choose_attention(stages, plan, ranks)
    assert (report.backend, report.repeats_heads) == ("flash", False)
    told = choose_attention(stages, plan.model_copy(update={"attention_backend": "math"}), ranks)
    assert (told.backend, told.why, len(told.trials)) == ("math", "chosen", 1)


def test_a_trial_times_all_layers(alone: Alone) -> None:
    plan, ranks = alone("finetune_llama4-maverick", overrides={"seq_len": 256})
    cores = attention_cores(models_of(plan, ranks))
    assert {core.reach.chunk for core in cores} == {None, plan.recipe.model.chunked_attention.chunk_size}
    for backend in OPERATORS:
        trials = attempt(cores, plan, ranks, backend, True)
        assert [(trial.problem, trial.repeats_heads) for trial in trials] == [(None, False), (None, True)]
        assert all(trial.milliseconds > 0 for trial in trials)
    assert attempt(cores, plan, ranks, "math", False)[0].milliseconds is None


def test_documents_have_repeated_heads_where_torch_groups_none(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11, whose kernel for a GPU has no option for them."""

    def of_torch_2_11(query: Any, *_more: Any, return_aux: None = None, scale: None = None, window_size: Any) -> Any:
        return query

    plan, ranks = alone(document_tokens=40)
    cores, on_gpu = attention_cores(models_of(plan, ranks)), plan.model_copy(update={"device": "cuda"})
    found = attempt(cores, on_gpu, ranks, "varlen", False)
    for module in (attention, attention_backend):
        monkeypatch.setattr(module, "varlen_attn", of_torch_2_11)
    found += attempt(cores, on_gpu, ranks, "varlen", False)
    assert [(trial.problem, trial.repeats_heads) for trial in found] == [(None, False), (None, True)]
    heads, segments = torch.randn(8, 2, 4), Segments(torch.tensor([0, 8]), torch.tensor([0, 8]), None)
    assert attention.varlen_kernel(heads, heads, heads, segments, SegmentOptions(8)) is heads


def test_a_backend_that_is_not_there_says_so_before_training(alone: Alone) -> None:
    plan, ranks = alone()
    with pytest.raises(UsageError, match=r"(?s)attention backend cudnn cannot compute .*No viable backend"):
        choose_attention(models_of(plan, ranks), plan.model_copy(update={"attention_backend": "cudnn"}), ranks)


class Wrong(CausalAttention):
    """Computes something else in one backend."""

    error: Callable[[Tensor, Tensor], Tensor]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Any = None) -> Tensor:
        seen = super().forward(query, key, value, documents)
        return self.error(seen, key) if self.backend == "flash" else seen


def wrong_gradient(seen: Tensor, key: Tensor) -> Tensor:
    if key.requires_grad:
        key.register_hook(lambda gradient: 1.1 * gradient)
    return seen


def dead(_seen: Tensor, _key: Tensor) -> Tensor:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


WRONG = {
    "result": (lambda seen, _key: 1.1 * seen, "its result differs by 10 % from exact attention; the limit is 0.1 %"),
    "gradient": (wrong_gradient, "its gradient of keys differs by 10 % from exact attention; the limit is 0.1 %"),
    "not finite": (lambda seen, _key: seen * math.inf, "its result is not finite"),
}


def with_cores(core: type[CausalAttention], stages: Sequence[Decoder]) -> Sequence[Decoder]:
    for attention_of_block in [part for stage in stages for part in stage.modules() if isinstance(part, Attention)]:
        attention_of_block.core = core()
    return stages


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_is_named_and_left_out(name: str, alone: Alone, capsys: pytest.CaptureFixture[str]) -> None:
    error, problem = WRONG[name]
    core = type("Wrongly", (Wrong,), {"error": staticmethod(error)})
    plan, ranks = alone(dtype="fp32")
    stages = with_cores(core, models_of(plan, ranks))
    report = choose_attention(stages, plan, ranks)
    assert report.backend == "math"
    assert report.trials[0].problem == problem
    assert f"llmb: attention backend flash computes wrong results for this run: {problem}\n" in capsys.readouterr().out
    with pytest.raises(UsageError, match=rf"(?s)attention backend flash cannot compute .*flash: {problem}"):
        choose_attention(stages, plan.model_copy(update={"attention_backend": "flash"}), ranks)


def test_no_other_backend_is_tried_on_a_dead_device(alone: Alone) -> None:
    core = type("Dead", (Wrong,), {"error": staticmethod(dead)})
    plan, ranks = alone()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        choose_attention(with_cores(core, models_of(plan, ranks)), plan, ranks)


@pytest.mark.parametrize("document_tokens", [None, 40])
@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "finetune_llama4-maverick"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_layer_of_a_run_is_compared_with_exact_attention(
    workload: str, document_tokens: int | None, dtype: str, alone: Alone
) -> None:
    """Full and chunked, of whole sequences and of documents, with masks and without."""
    plan, ranks = alone(workload, document_tokens=document_tokens, dtype=dtype, overrides={"seq_len": 192})
    cores = attention_cores(models_of(plan, ranks))
    for backend in ("flash",) if document_tokens is None else ("flash", "varlen"):
        assert attempt(cores, plan, ranks, backend, False)[0].problem is None


def test_flash_attention_3_is_used_while_it_is_asked_for_and_where_it_is_installed(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, ranks = alone()
    cores = attention_cores(models_of(plan, ranks))
    (missing,) = attempt(cores, plan, ranks, "flash3", False)
    assert missing.problem == "No module named 'flash_attn_interface'"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    (incomplete,) = attempt(cores, plan, ranks, "flash3", False)
    assert incomplete.problem == "Module 'flash_attn_interface' does not expose FA3 forward kernels"
    kernels = SimpleNamespace(fwd=None, bwd=None)
    monkeypatch.setitem(torch.ops.__dict__, "flash_attn_3", kernels)
    with attention_kernel("flash3"):
        assert nn.attention.current_flash_attention_impl() == "FA3"
    assert nn.attention.current_flash_attention_impl() is None


def test_flash_attention_4_may_return_more_than_torch_unpacks(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ranks = alone()
    (missing,) = attempt(attention_cores(models_of(plan, ranks)), plan, ranks, "flash4", False)
    assert missing.problem == "No module named 'flash_attn'"

    def refuse(*_: object, **_more: object) -> tuple[()]:
        raise AssertionError("Unsupported compute capability")

    cute = ModuleType("flash_attn.cute")
    cute.interface = SimpleNamespace(_flash_attn_fwd=lambda *_, causal: (*"ol", causal), _flash_attn_bwd=refuse)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    with attention_kernel("flash4"):
        assert nn.attention.current_flash_attention_impl() == "FA4"
    assert nn.attention.current_flash_attention_impl() is None
    module = sys.modules["llmb.engine.kernels.flash_attention_4"]
    assert module._flash_attn_fwd(causal=True) == ("o", "l")
    with pytest.raises(RuntimeError, match=r"FlashAttention 4: AssertionError.*capability"):
        module._flash_attn_bwd()


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_see_what_grouped_ones_see(masked: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 24, heads, 8, generator=generator, requires_grad=True) for heads in (6, 2, 2))
    mask = torch.rand(2, 1, 24, 24, generator=generator) < 0.5 if masked else None
    results = []
    for backend in OPERATORS:
        for repeats_heads in (False, True):
            with attention_kernel(backend):
                seen = attend(query, key, value, mask=mask, repeats_heads=repeats_heads)
                results.append((seen, *torch.autograd.grad(seen.nan_to_num().square().sum(), (query, key, value))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], equal_nan=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, when it compiles
def test_compiled_code_is_kept_apart_by_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash alone is compiled in a second or two; what differs from its second use is the tag alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    heads = [torch.randn(1, 16, 2, 8) for _ in range(3)]
    found = []
    for kernel in (attention_kernel("flash"), attention_kernel("flash"), sdpa_kernel(SDPBackend.FLASH_ATTENTION)):
        torch.compiler.reset()
        counters.clear()
        with kernel:
            torch.compile(CausalAttention())(*heads)
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]


def test_every_backend_has_a_tag_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = set()
    monkeypatch.setattr(attention_backend, "separate_flash_attention", lambda _: nullcontext())  # not installed
    for backend in KERNELS:
        with attention_kernel(backend):
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == len(KERNELS)
    assert torch.compiler.config.cache_key_tag not in tags
