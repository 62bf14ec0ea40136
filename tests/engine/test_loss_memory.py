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
from llmb.engine.model.loss import Head
from llmb.engine.model.softmax import SMALLEST_BYTES


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


SHAPES = {
    "llama3.1 8b, one GPU": Shape(8192, 128256, 4096),
    "llama3.1 8b, CP2": Shape(4096, 128256, 4096),
    "llama3.1 70b, TP4 CP2": Shape(4096, 128256 // 4, 8192),
    "llama3.1 405b, one GPU": Shape(8192, 128256, 16384),
    "llama3.1 405b, TP8 CP2": Shape(4096, 128256 // 8, 16384),
    "nemotron4 15b, MBS4": Shape(4 * 4096, 256000, 6144),
    "nemotron4 340b, TP8": Shape(4096, 256000 // 8, 18432),
    "llama4 maverick, TP8": Shape(8192, 202048 // 8, 5120),
}


def test_the_shapes_are_those_of_the_catalogue() -> None:
    models = Catalogue().models
    for name, shape in SHAPES.items():
        family, size = name.replace("maverick,", "maverick 400b,").split(",")[0].replace("llama4 ", "llama4-").split()
        model = models[family, size]
        assert shape.hidden == model.hidden_size, name
        assert model.vocab_size % shape.columns == 0, name


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


@pytest.mark.parametrize("name", SHAPES)
def test_the_loss_takes_less_than_an_eighth_of_the_whole_logits(name: str) -> None:
    shape = SHAPES[name]
    whole = 4 * shape.rows * shape.columns
    share = memory_of(shape, lambda head, hidden, labels: head(hidden, labels, float(shape.rows))) / whole
    print(f"{name}: {share * whole / 2**20:.1f} of {whole / 2**20:.1f} MiB, {share:.4f}")
    assert 1 / 16 < share < 1 / 8


def test_kept_logits_take_half_of_the_whole_ones_and_little_more() -> None:
    shape = SHAPES["llama3.1 8b, CP2"]
    whole = 4 * shape.rows * shape.columns
    assert 0.5 < memory_of(shape, lambda head, hidden, labels: head(hidden, labels, 1.0), math.inf) / whole < 0.53


def test_whole_logits_are_seen_by_the_tracker() -> None:
    shape = SHAPES["llama3.1 8b, CP2"]
    used = memory_of(shape, lambda head, hidden, labels: functional.cross_entropy(head(hidden)[0].float(), labels[0]))
    assert used > 4 * shape.rows * shape.columns


def test_the_tracker_counts_real_tensors_at_their_peak() -> None:
    given = torch.ones(1000)
    with StorageTracker() as tracker:
        first = given + 1
        second = first.view(10, 100) + 1
        del first
        third = torch.cat((second, second))
        second.add_(1)
        del second
        fourth = third + 1
    assert tracker.peak_bytes(without=[]) == 16000
    assert tracker.peak_bytes(without=[fourth]) == 12000
    assert tracker.peak_bytes(without=[third, fourth]) == 8000
