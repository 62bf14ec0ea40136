# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 is used while it is asked for, and whatever is wrong with its package is said."""

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention import _fa4

from llmb.engine import attention_backend
from llmb.engine.attention_backend import attempt_heads
from llmb.engine.flash_attention_4 import check_flash_attention_4, flash_attention_4
from llmb.engine.model.attention import CausalAttention
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.plan import Plan

ACTIVE = nn.attention.current_flash_attention_impl


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with the names that torch looks for."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["flash_attn.cute.interface"]
    module._flash_attn_fwd = module._flash_attn_bwd = lambda: None  # type: ignore[attr-defined]
    _fa4._fa4_import_module.cache_clear()
    yield module
    _fa4._fa4_import_module.cache_clear()


def test_it_replaces_flash_within_the_context_alone(package: ModuleType) -> None:
    with flash_attention_4():
        assert ACTIVE() == "FA4"
    assert ACTIVE() is None
    with pytest.raises(KeyError), flash_attention_4():
        raise KeyError
    assert ACTIVE() is None


def test_what_torch_says_of_the_replacement_is_not_passed_on(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        nn.attention, "activate_flash_attention_impl", lambda _: warnings.warn("Overriding", stacklevel=1)
    )
    monkeypatch.setattr(nn.attention, "restore_flash_attention_impl", lambda: None)
    with flash_attention_4():
        pass  # a warning is an error in tests


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(RuntimeError, match=r"pip install flash-attn-4==4\.0\.0b12"), flash_attention_4():
        pass
    assert ACTIVE() is None


def test_an_incomplete_package_is_a_problem(package: ModuleType) -> None:
    del package._flash_attn_bwd
    with pytest.raises(RuntimeError, match="does not expose FA4 kernels"), flash_attention_4():
        pass


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.attention, "activate_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"has no FlashAttention-4; 2\.11 or later is needed"), flash_attention_4():
        pass


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.05, float("nan")])
def test_other_results_are_refused(factor: float, package: ModuleType) -> None:
    def once() -> tuple[torch.Tensor, ...]:
        return (torch.ones(8, dtype=torch.bfloat16), torch.ones(8) * (factor if ACTIVE() else 1.0))

    if factor < 1.02:
        check_flash_attention_4(once)
        return
    with pytest.raises(RuntimeError, match="its results differ from those of flash by"):
        check_flash_attention_4(once)


@pytest.mark.parametrize("error", [TypeError, ValueError, AssertionError, RuntimeError])
def test_whatever_the_package_raises_is_recorded_as_the_problem(
    error: type[Exception], package: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny_plan: Callable[..., Plan]
) -> None:
    def failing() -> tuple[torch.Tensor, ...]:
        if ACTIVE():
            raise error("too many values to unpack")
        return (torch.ones(1),)

    monkeypatch.setattr(attention_backend, "passes", lambda *_: failing)
    for name in ("query_key_value", "documents_of"):
        monkeypatch.setattr(attention_backend, name, lambda *_, **__: None)
    ranks = Ranks.__new__(Ranks)
    trial = attempt_heads(
        [CausalAttention()], tiny_plan(), ranks, "flash4", timed=False, takes_parts=False, repeats_heads=False
    )
    assert trial.problem == "too many values to unpack"
    assert ACTIVE() is None
