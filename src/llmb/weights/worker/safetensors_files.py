# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files, without mapping them into memory: mapped pages count as memory of the process."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmb.errors import UsageError
from llmb.huggingface.tensors import StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LENGTH_BYTES = 8
"""A file begins with the length of its header, which is JSON."""


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """Tensors of the files in ``folder``, read chunk by chunk on request."""

    folder: Path
    stored: dict[str, StoredTensor]
    offsets: dict[str, int]
    """The first byte of each tensor in its file."""

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows ``first`` to ``end`` (exclusive) of a tensor's first dimension, in its stored dtype.

        Raises UsageError if a value is not finite or cannot be read.
        """
        stored = self.stored[name]
        dtype, below = DTYPES[stored.dtype], stored.shape[1:]
        row_bytes = dtype.itemsize * math.prod(below)
        part = torch.empty((end - first) * math.prod(below), dtype=dtype)
        try:
            complete = _read_into(part, self.folder / stored.file, self.offsets[name] + first * row_bytes)
        except OSError as error:
            raise UsageError(f"{name} in {stored.file} cannot be read: {error.strerror}") from error
        if not complete:
            raise UsageError(f"{name} in {stored.file} is truncated: the file became shorter", do="download it again")
        if not_finite(part):
            raise UsageError(f"{name} in {stored.file} has values that are not finite (NaN or infinite)")
        return part.view(end - first, *below)

    def whole(self, name: str) -> Tensor:
        return self.rows(name, 0, self.stored[name].shape[0])


def not_finite(values: Tensor) -> bool:
    """Without a temporary tensor: NaN passes through minimum and maximum."""
    return values.numel() > 0 and not all(math.isfinite(extreme.item()) for extreme in values.aminmax())


def open_files(folder: Path, names: Sequence[str]) -> SafetensorsFiles:
    """Reads the headers. Raises UsageError if a file is not a safetensors file, or is incomplete."""
    files = SafetensorsFiles(folder, {}, {})
    for file in names:
        for name, (stored, offset) in _read_header(folder, file).items():
            if name in files.stored:
                raise UsageError(f"{name} is in {files.stored[name].file} and in {file}")
            files.stored[name], files.offsets[name] = stored, offset
    return files


def _read_header(folder: Path, file: str) -> dict[str, tuple[StoredTensor, int]]:
    path = folder / file
    try:
        with safe_open(path, framework="pt"):  # checks the header, and that it fits the file
            pass
        start, header = _header(path)
    except (SafetensorError, OSError) as error:
        what = f"{file} is not a complete safetensors file: {error}{_truncated(path)}"
        raise UsageError(what, where=str(path), do="download it again") from error
    return {
        name: (StoredTensor(file, tuple(entry["shape"]), entry["dtype"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """The first byte of the data, and the entry of each tensor. Raises ValueError if it is not a safetensors file."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return LENGTH_BYTES + length, header


def _truncated(path: Path) -> str:
    """The first tensor that a file lacks the end of, if its header can be read."""
    try:
        start, header = _header(path)
        size = path.stat().st_size
        ends = {name: start + entry["data_offsets"][1] for name, entry in header.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return ""
    lacking = sorted((end, name) for name, end in ends.items() if end > size)
    return f"; it has {size} bytes, and {lacking[0][1]} ends at {lacking[0][0]}" if lacking else ""


def _read_into(values: Tensor, path: Path, offset: int) -> bool:
    """False if the file ends before ``values`` are complete."""
    view = values.view(torch.uint8).numpy().data
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while view:
            size = stream.readinto(view)
            if not size:
                return False
            view = view[size:]
    return True
