# SPDX-License-Identifier: Apache-2.0
"""Whichever Triton module is deleted, a GPU computes by the torch code beside it."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmb.engine.kernels import adamw, fp8_cast, norm, rotary
from llmb.engine.kernels.arguments import AdamWNumbers, Casts, Heads, NormOf, OfParameter, Rotation

FOLDER = Path(fp8_cast.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*_triton.py"))
E4M3 = torch.float8_e4m3fn
Made = Callable[[Tensor], Tensor]


class OnGpu(Tensor):
    """Says that it is on a GPU; computes where it is."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def updated(place: Made) -> object:
    tensors = OfParameter(
        *(place(random(each, 4, 6).float().abs()) for each in range(3)), random(3, 4, 6), random(4, 4, 6)
    )
    casts = Casts(torch.ones(()), random(5, 4, 6).to(E4M3), random(6, 6, 4).to(E4M3), torch.zeros(()))
    adamw.update(tensors, torch.ones(()), AdamWNumbers(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
    adamw.update_and_cast(tensors, torch.ones(()), AdamWNumbers(0.1, 0.9, 0.95, 1e-8, 0.1, 2), casts)
    return tensors, casts


def cast_values(place: Made) -> object:
    values, scale = place(random(0, 4, 6)), torch.ones(())
    into = random(1, 4, 6).to(E4M3), random(2, 6, 4).to(E4M3), torch.zeros(())
    fp8_cast.cast_into(values, scale, *into)
    return (
        into,
        fp8_cast.cast_both_ways(values, scale, E4M3),
        fp8_cast.cast_activated(values, scale, "swiglu", E4M3),
        fp8_cast.cast_activation_gradient(values, random(3, 4, 3), scale, "swiglu", E4M3),
    )


def normalized(place: Made) -> object:
    hidden, weight, scale = place(random(0, 2, 3, 8)), torch.ones(8), torch.ones(())
    found = norm.normalize_and_cast(hidden, hidden, NormOf(weight, None, 1e-5), scale, E4M3)
    gradients = hidden, hidden, place(found.hidden)
    back = norm.normalize_backward_and_cast(*gradients, None, found.factor, weight, scale, E4M3)
    return found, back


def rotated(place: Made) -> object:
    rotation = Rotation(random(0, 3, 2).float(), random(1, 3, 2).float(), interleaved=False)
    product, heads = (
        place(random(2, 6, 16)),
        [place(random(each, 2, 3, count, 4)) for each, count in enumerate((2, 1, 1))],
    )
    rotary.rotate_in_place(product, rotation, 3, 4)
    return product, rotary.cast_rotated_gradient(Heads(*heads), rotation, torch.ones(()), E4M3)


WORK = {"adamw_triton": updated, "fp8_cast_triton": cast_values, "norm_triton": normalized, "rotary_triton": rotated}


def leaves(results: object) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results.as_subclass(Tensor).float()]
    return [leaf for each in results for leaf in leaves(each)] if isinstance(results, tuple | list) else []


@pytest.mark.parametrize("deleted", MODULES)
def test_a_gpu_computes_without_a_deleted_module(deleted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"llmb.engine.kernels.{deleted}", None)
    # A kernel that is left would need a real GPU.
    monkeypatch.setattr(fp8_cast, "_casts", lambda _device: False)
    expected, found = leaves(WORK[deleted](as_is)), leaves(WORK[deleted](on_gpu))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert not fp8_cast.is_there(deleted)


def test_modules_that_build_on_a_deleted_one_count_as_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.delitem(sys.modules, f"llmb.engine.kernels.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "llmb.engine.kernels.fp8_cast_triton", None)
    assert not fp8_cast.is_there("norm_triton")
    assert not fp8_cast.is_there("rotary_triton")


def test_missing_triton_is_an_error_and_no_slower_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llmb.engine.kernels.adamw_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match="triton"):
        fp8_cast.is_there("adamw_triton")


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
    return []


def test_no_module_needs_a_kernel_when_it_is_imported() -> None:
    """Only functions import Triton modules, once they know that the module is there."""
    for path in FOLDER.parent.rglob("*.py"):
        if path.stem not in MODULES:
            names = [name for node in ast.parse(path.read_text()).body for name in imports(node)]
            assert not [name for name in names if name.rpartition(".")[2] in MODULES], path
