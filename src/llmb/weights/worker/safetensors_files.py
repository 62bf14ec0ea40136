# SPDX-License-Identifier: Apache-2.0
"""Reads rows of the tensors in safetensors files, by the library of that name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmb.errors import UsageError
from llmb.huggingface.tensors import StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """Tensors of the files in ``folder``, read chunk by chunk on request."""

    folder: Path
    stored: dict[str, StoredTensor]

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows ``first`` to ``end`` (exclusive) of a tensor's first dimension, in its stored dtype.

        Raises UsageError if a value is not finite or cannot be read.
        """
        file = self.stored[name].file
        try:
            with safe_open(self.folder / file, framework="pt") as content:
                part: Tensor = content.get_slice(name)[first:end].clone()  # of the map of the whole file
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{name} in {file} cannot be read: {error}", do="download it again") from error
        if not_finite(part):
            raise UsageError(f"{name} in {file} has values that are not finite (NaN or infinite)")
        return part

    def whole(self, name: str) -> Tensor:
        return self.rows(name, 0, self.stored[name].shape[0])


def not_finite(values: Tensor) -> bool:
    """Without a temporary tensor: NaN passes through minimum and maximum."""
    return values.numel() > 0 and not all(math.isfinite(extreme.item()) for extreme in values.aminmax())


def open_files(folder: Path, names: Sequence[str]) -> SafetensorsFiles:
    """Reads the headers. Raises UsageError if a file is not a safetensors file, or is incomplete."""
    stored: dict[str, StoredTensor] = {}
    for file in names:
        for name, tensor in _read_header(folder, file).items():
            if name in stored:
                raise UsageError(f"{name} is in {stored[name].file} and in {file}")
            stored[name] = tensor
    return SafetensorsFiles(folder, stored)


def _read_header(folder: Path, file: str) -> dict[str, StoredTensor]:
    """The library compares the header with the size of the file."""
    try:
        with safe_open(folder / file, framework="pt") as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 (the library's file has no other iterator)
            return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        what = f"{file} is not a complete safetensors file: {error}"
        raise UsageError(what, where=str(folder / file), do="download it again") from error
