# SPDX-License-Identifier: Apache-2.0
"""The loss takes a fraction of the memory that whole logits take, at the shapes of the recipes."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmb.catalogue.load import Catalogue
from llmb.engine.model.loss import SMALLEST_BYTES, Head


class StorageTracker(TorchDispatchMode):
    """Notes when the storages come and go that operators make while it is active; each counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.changes: list[tuple[int, int]] = []
        """Number of a storage, bytes that it takes or gives back."""
        self.numbers: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.known.setdefault(id(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage()))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.known and self.known[key]() is storage:
            return
        number = len(self.numbers) and max(self.numbers.values()) + 1
        self.numbers[key], size = number, storage.nbytes()
        self.changes.append((number, size))
        self.known[key] = weakref.ref(storage, lambda _: self.changes.append((number, -size)))

    def peak_bytes(self, without: Sequence[Tensor]) -> int:
        """The most that lived at a time, of storages that ``without`` does not have."""
        left_out = {self.numbers[id(tensor.untyped_storage())] for tensor in without}
        now = peak = 0
        for number, size in self.changes:
            now += 0 if number in left_out else size
            peak = max(peak, now)
        return peak


class Shape(NamedTuple):
    """Of one rank: rows are MBS x sequence / CP, columns vocabulary / TP."""

    rows: int
    columns: int
    hidden: int


def shape_of(model: str, rows: int, tp: int = 1) -> Shape:
    record = Catalogue().models[tuple(model.split())]
    return Shape(rows, record.vocab_size // tp, record.hidden_size)


SHAPES = {
    "llama3.1 8b, one GPU": shape_of("llama3.1 8b", 8192),
    "llama3.1 8b, CP2": shape_of("llama3.1 8b", 4096),
    "llama3.1 70b, TP4 CP2": shape_of("llama3.1 70b", 4096, tp=4),
    "llama3.1 405b, one GPU": shape_of("llama3.1 405b", 8192),
    "llama3.1 405b, TP8 CP2": shape_of("llama3.1 405b", 4096, tp=8),
    "nemotron4 15b, MBS4": shape_of("nemotron4 15b", 4 * 4096),
    "nemotron4 340b, TP8": shape_of("nemotron4 340b", 4096, tp=8),
    "llama4 maverick, TP8": shape_of("llama4-maverick 400b", 8192, tp=8),
}


EVERY_TIME = ("llama3.1 8b, CP2", "llama3.1 405b, TP8 CP2")


def memory_of(
    shape: Shape, loss: Callable[[Head, Tensor, Tensor], Tensor], smallest_bytes: float = SMALLEST_BYTES
) -> int:
    """Bytes that the passes of the loss take at most, beyond hidden states, weight and the gradients of both."""
    with FakeTensorMode():
        head = Head(1, 1)
        head.smallest_bytes = smallest_bytes
        head.weight = nn.Parameter(torch.empty(shape.columns, shape.hidden, dtype=torch.bfloat16))
        hidden = torch.empty(1, shape.rows, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, shape.rows, dtype=torch.int64)
        with StorageTracker() as tracker:
            made = torch.autograd.grad(loss(head, hidden, labels), [hidden, head.weight])
        return tracker.peak_bytes(without=made)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.measured] * (name not in EVERY_TIME)) for name in SHAPES]
)
def test_the_loss_takes_less_than_an_eighth_of_the_whole_logits(name: str) -> None:
    shape = SHAPES[name]
    whole = 4 * shape.rows * shape.columns
    share = memory_of(shape, lambda head, hidden, labels: head(hidden, labels, float(shape.rows))) / whole
    assert 1 / 16 < share < 1 / 8


def test_kept_logits_take_half_of_the_whole_ones_and_little_more() -> None:
    shape = SHAPES["llama3.1 8b, CP2"]
    whole = 4 * shape.rows * shape.columns
    assert 0.5 < memory_of(shape, lambda head, hidden, labels: head(hidden, labels, 1.0), math.inf) / whole < 0.53


def test_whole_logits_are_seen_by_the_tracker() -> None:
    shape = SHAPES["llama3.1 8b, CP2"]
    used = memory_of(shape, lambda head, hidden, labels: functional.cross_entropy(head(hidden)[0].float(), labels[0]))
    assert used > 4 * shape.rows * shape.columns
