# SPDX-License-Identifier: Apache-2.0
"""The bytes of live storages by owner, and the most that were live at a time; of real and of fake tensors."""

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes in use at one moment, by owner."""

    bytes: int = 0
    by: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Storage:
    reference: "weakref.ref[torch.UntypedStorage]"
    owner: str
    bytes: int


class LiveBytes:
    """Every storage counts from ``add`` until it is freed, with the size that it has; an owner is any name."""

    def __init__(self) -> None:
        self.total = 0
        self.peak = Use()
        self.live: Counter[str] = Counter()
        self._known: dict[int, _Storage] = {}

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: Tensor, owner: str) -> None:
        """The storage of a tensor that is not known."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._known[key] = _Storage(weakref.ref(storage, partial(self._freed, key)), owner, size)
        self._grow(owner, size)

    def give(self, tensor: Tensor, owner: str) -> None:
        """Changes the owner of a storage, if it is known."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None and known.owner != owner:
            self._grow(known.owner, -known.bytes)
            known.owner = owner
            self._grow(owner, known.bytes)

    def resize(self, storage: torch.UntypedStorage) -> bool:
        """Follows a storage that may have been resized, which dispatches nothing: FSDP frees and allocates so."""
        known = self._known.get(storage._cdata)
        if known is None or known.bytes == storage.nbytes():
            return False
        self._grow(known.owner, storage.nbytes() - known.bytes)
        known.bytes = storage.nbytes()
        return True

    def note_peak(self, more: Mapping[str, int] | None = None) -> None:
        """Keeps the present use if it is the most so far; ``more`` is in use beside the storages."""
        total = self.total + sum((more or {}).values())
        if total > self.peak.bytes:
            self.peak = Use(total, {owner: size for owner, size in (self.live + Counter(more)).items() if size})

    def forget_peak(self) -> None:
        self.peak = Use()
        self.note_peak()

    def _grow(self, owner: str, size: int) -> None:
        self.live[owner] += size
        self.total += size

    def _freed(self, key: int, _reference: object) -> None:
        known = self._known.pop(key)
        self._grow(known.owner, -known.bytes)
