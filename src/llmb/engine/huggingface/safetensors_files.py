# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmb.errors import UsageError
from llmb.huggingface.tensors import Stored


class SafetensorsFiles:
    """Open files; tensors are read chunk by chunk on request."""

    def __init__(self, handles: dict[str, Any]) -> None:
        self.handles = handles
        self.stored: dict[str, Stored] = {}
        for file, handle in handles.items():
            for name in handle.keys():  # noqa: SIM118 (no dict)
                if name in self.stored:
                    raise UsageError(f"{name} is in {self.stored[name].file} and in {file}")
                part = handle.get_slice(name)
                self.stored[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows ``first`` to ``end`` (exclusive) of a tensor's first dimension, fp32.

        Raises UsageError if a value is not finite.
        """
        file = self.stored[name].file
        part: Tensor = self.handles[file].get_slice(name)[first:end]
        if not_finite(part):
            raise UsageError(f"{name} in {file} has values that are not finite (NaN or infinite)")
        return part.to(torch.float32)

    def whole(self, name: str) -> Tensor:
        return self.rows(name, 0, self.stored[name].shape[0])


def not_finite(values: Tensor) -> bool:
    """Without a temporary tensor: NaN passes through minimum and maximum."""
    return values.numel() > 0 and not all(math.isfinite(extreme.item()) for extreme in values.aminmax())


@contextmanager
def open_files(folder: Path, names: Sequence[str]) -> Iterator[SafetensorsFiles]:
    """Raises UsageError if a file is not a safetensors file, or is incomplete."""
    with ExitStack() as stack:
        handles = {}
        for name in names:
            try:
                handles[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UsageError(
                    f"{name} is not a complete safetensors file: {error}",
                    where=str(folder / name),
                    do="download it again",
                ) from error
        yield SafetensorsFiles(handles)
