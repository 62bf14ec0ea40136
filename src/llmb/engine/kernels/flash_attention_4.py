# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 4 with the interface of torch 2.13's hook, which imports this module by its name."""

from functools import partial
from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _call(name: str, results: int, *inputs: Any, **options: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 (passed on)
    """Return the first ``results`` outputs of the package's function ``name``; make any error a RuntimeError."""
    try:
        outputs: tuple[Tensor, ...] = getattr(interface, name)(*inputs, **options)
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"FlashAttention 4: {error!r}") from error
    return outputs[:results]


_flash_attn_fwd = partial(_call, "_flash_attn_fwd", 2)
_flash_attn_bwd = partial(_call, "_flash_attn_bwd", 3)
