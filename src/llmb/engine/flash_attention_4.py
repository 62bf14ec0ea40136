# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 in place of torch's own flash attention: torch 2.11 and later, with a package of its own.

The package is young, and its versions differ in what their functions return. So nothing is taken for granted: whatever
fails is a problem of the backend, and results are compared with flash's before it is used.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NAME = "FA4"
PACKAGE = "flash-attn-4==4.0.0b12"
"""Its functions return what torch 2.11 and 2.13 take; those of 4.0.0b36 return more."""
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError)
"""What a package of another version raises."""
LARGEST_DEVIATION = 0.02
"""Relative, of a gradient in bf16; twice what backends differ by."""


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """torch's flash attention is FlashAttention-4 in this context, in all threads.

    Raises RuntimeError without a torch or a package that has it.
    """
    activate = getattr(nn.attention, "activate_flash_attention_impl", None)
    restore = getattr(nn.attention, "restore_flash_attention_impl", None)
    if activate is None or restore is None:
        raise RuntimeError(f"torch {torch.__version__} has no FlashAttention-4; 2.11 or later is needed")
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that kernels are replaced
            activate(NAME)
    except ImportError as error:
        raise RuntimeError(f"{error}; FlashAttention-4 is in a package: pip install {PACKAGE}") from error
    try:
        yield
    finally:
        restore()


def check_flash_attention_4(once: Callable[[], Sequence[Tensor]]) -> None:
    """Raises RuntimeError if what ``once`` computes by flash attention differs by more than rounding."""
    expected = once()
    with flash_attention_4():
        found = once()
    for one, other in zip(found, expected, strict=True):
        deviation = float((one.float() - other.float()).norm() / other.float().norm())
        if not deviation <= LARGEST_DEVIATION:
            raise RuntimeError(f"its results differ from those of flash by {deviation:.2g}; is {PACKAGE} installed?")
