# SPDX-License-Identifier: Apache-2.0
"""Norms with the residual addition before them and the cast to FP8 after them, and their gradients.

Every function has a Triton kernel for GPUs, in ``norm_triton``, and torch code, which is its reference: in bf16 to the
bit what autograd computes of ``torch.nn.functional``. Casts are those of ``fp8_cast``.
"""

import torch
from torch import Tensor

from llmb.engine.kernels.arguments import (
    PROGRAMS,
    ROWS,
    BothWays,
    CastStatistics,
    Normalized,
    NormGradients,
    NormOf,
)
from llmb.engine.kernels.fp8_cast import cast_both_ways, cast_normalized, has_kernel, normalize


def normalize_and_cast(
    hidden: Tensor, update: Tensor | None, norm: NormOf, scale: Tensor, dtype: torch.dtype
) -> Normalized:
    """Norm of ``hidden``, or of the sum with ``update``, [..., columns], which is rounded before it is normalized."""
    if has_kernel(hidden, "norm_triton") and holds_rows(hidden.device, hidden.shape[-1], 1):
        import llmb.engine.kernels.norm_triton as norm_triton

        return norm_triton.normalize_and_cast(hidden, update, norm, scale, dtype)
    total = hidden if update is None else hidden + update
    statistics, result = with_statistics(total, norm)
    if has_kernel(hidden, "fp8_cast_triton"):
        found = cast_normalized(total, statistics, scale, dtype)
    else:
        found = cast_both_ways(result.flatten(0, -2), scale, dtype)
    mean = None if statistics.mean is None else statistics.mean.flatten()
    return Normalized(total, mean, statistics.factor.flatten(), *found)


def with_statistics(hidden: Tensor, norm: NormOf) -> tuple[CastStatistics, Tensor]:
    """Statistics of the rows, and these normalized, rounded once."""
    weight, bias, eps = norm
    if bias is None:
        statistics = CastStatistics(None, torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + eps), weight, None)
        return statistics, normalize(hidden, statistics)
    result, mean, factor = torch.native_layer_norm(hidden.float(), weight.shape, weight, bias, eps)
    return CastStatistics(mean, factor, weight, bias), result.to(hidden.dtype)


def normalize_backward(
    given: Tensor, passed: Tensor, hidden: Tensor, mean: Tensor | None, factor: Tensor, weight: Tensor
) -> NormGradients:
    """Gradients from those of both uses of ``hidden``, [..., columns] each: ``given`` through the norm, and ``passed``.

    mean, factor: [rows], see ``Normalized``; weight: [columns].
    The gradient through the norm is rounded, and so is its sum with ``passed``.
    """
    if has_kernel(hidden, "norm_triton"):
        import llmb.engine.kernels.norm_triton as norm_triton

        return norm_triton.normalize_backward(given, passed, hidden, mean, factor, weight)
    through, to_weight, to_bias = gradients_of(
        given.float(), hidden.float(), None if mean is None else by_row(mean, hidden), by_row(factor, hidden), weight
    )
    return NormGradients(passed + through.to(hidden.dtype), to_weight, to_bias)


def by_row(values: Tensor, hidden: Tensor) -> Tensor:
    return values.view(*hidden.shape[:-1], 1)


def gradients_of(
    given: Tensor, hidden: Tensor, mean: Tensor | None, factor: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All fp32, in autograd's order of operations. mean, factor: [..., 1]."""
    if mean is not None:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
            given, hidden, weight.shape, mean, factor, weight, weight, [True, True, True]
        )
        return found
    scaled = given * weight
    to_factor = (scaled * hidden).sum(-1, keepdim=True)
    to_mean = -0.5 * to_factor * factor.pow(3) / hidden.shape[-1]
    to_weight = (given * (hidden * factor)).flatten(0, -2).sum(0)
    return scaled * factor + to_mean * (2 * hidden), to_weight, None


def normalize_backward_and_cast(
    given: Tensor,
    passed: Tensor,
    hidden: Tensor,
    mean: Tensor | None,
    factor: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[NormGradients, BothWays]:
    """``normalize_backward``, and ``cast_both_ways`` of the rows of the gradient of ``hidden``."""
    if has_kernel(hidden, "norm_triton") and holds_rows(hidden.device, hidden.shape[-1], 2):
        import llmb.engine.kernels.norm_triton as norm_triton

        return norm_triton.normalize_backward_and_cast(given, passed, hidden, mean, factor, weight, scale, dtype)
    found = normalize_backward(given, passed, hidden, mean, factor, weight)
    return found, cast_both_ways(found.hidden.flatten(0, -2), scale, dtype)


def holds_rows(device: torch.device, columns: int, tensors: int) -> bool:
    """Whether a GPU's L2 cache holds the rows of so many tensors that programs read twice, until they do again."""
    cache_bytes, multiprocessors = _cache(device.index or 0)
    return fits(cache_bytes, multiprocessors, columns, tensors)


def fits(cache_bytes: int, multiprocessors: int, columns: int, tensors: int) -> bool:
    """columns: of bf16.

    Of 4096 columns, the rows in flight of one tensor are 132 * 16 * 4096 * 2 bytes = 17.3 MB on an H100, whose cache
    has 52.4 MB. A quarter is left to transposed rows, of which 8 programs write a cache line together (half of a
    tensor's bytes), and to what passes through once, which may leave first. No GPU has confirmed this arithmetic yet.
    """
    return multiprocessors * PROGRAMS * ROWS * columns * 2 * tensors <= 0.75 * cache_bytes


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cache(device: int) -> tuple[int, int]:
    """Bytes of its L2 cache, and its multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return properties.L2_cache_size, properties.multi_processor_count
