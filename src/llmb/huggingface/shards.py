# SPDX-License-Identifier: Apache-2.0
"""Plans how tensors are divided into safetensors files. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmb.errors import UsageError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB; units are powers of ten. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", text.strip(), re.IGNORECASE)
    size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"'{text}' is not a size", do="give a number and a unit (B, KB, MB, GB, TB), such as 5GB")
    return size


def plan_shards(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Names of tensors by file, in order. A file has at most ``largest`` bytes of tensors, or holds a single tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = largest
        shards[-1].append(name)
        room -= size
    return shards


def shard_files(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_document(shards: Sequence[Sequence[str]], total_bytes: int) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json``."""
    files = shard_files(len(shards))
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
