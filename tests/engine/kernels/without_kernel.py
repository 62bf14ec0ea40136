# SPDX-License-Identifier: Apache-2.0
"""Computes as on a GPU, by torch and the Triton modules that are there, in Triton's interpreter.

Arguments: the Triton module that was deleted. Run by ``test_without_kernels.py``.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import CustomOpDef
from triton.runtime import interpreter
from triton_interpreter import convert

import llmb.engine
from llmb.engine.kernels import fp8_cast, rotary
from llmb.engine.kernels.arguments import Heads, Rotation

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


def rotated(place: Made) -> object:
    rotation = Rotation(random(0, 3, 2).float(), random(1, 3, 2).float(), interleaved=False)
    heads = [place(random(each, 2, 3, count, 4)) for each, count in enumerate((2, 1, 1))]
    return rotary.cast_rotated_gradient(Heads(*heads), rotation, torch.ones(()), E4M3)


WORK = {"fp8_cast_triton": cast_values, "rotary_triton": rotated}


def leaves(results: object) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results.as_subclass(Tensor).float()]
    return [leaf for each in results for leaf in leaves(each)] if isinstance(results, tuple | list) else []


def pretend_gpu() -> None:
    """Kernels run in the interpreter, which takes them as they are and rounds as a GPU does."""
    interpreter._convert_float = convert
    fp8_cast._casts = lambda _device: True
    for name in WORK:
        if fp8_cast.is_there(name):
            module = importlib.import_module(f"llmb.engine.kernels.{name}")
            operators = {key: value for key, value in vars(module).items() if isinstance(value, CustomOpDef)}
            vars(module).update({key: operator._init_fn for key, operator in operators.items()})
            vars(module)["wrap_triton"] = as_is


def main(deleted: str) -> None:
    for found in pkgutil.walk_packages(llmb.engine.__path__, "llmb.engine."):
        if not found.name.endswith("_triton"):
            importlib.import_module(found.name)
    pretend_gpu()
    left = {name for name in WORK if fp8_cast.is_there(name)}
    built_on_casts = {"rotary_triton"} if deleted == "fp8_cast_triton" else set()
    assert left == WORK.keys() - {deleted} - built_on_casts
    for name in sorted(WORK.keys() - left):
        expected, got = leaves(WORK[name](as_is)), leaves(WORK[name](on_gpu))
        assert len(got) == len(expected) > 0
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


main(sys.argv[1])
