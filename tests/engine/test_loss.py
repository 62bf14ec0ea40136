# SPDX-License-Identifier: Apache-2.0
"""The loss that never holds logits whole is the one from whole logits, in a fraction of the memory."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.engine.data.build import SyntheticData
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.loss import (
    IGNORED,
    LARGEST_CHUNK,
    SMALLEST_BYTES,
    Head,
    Softmax,
    chunk_bytes,
    chunk_length,
    chunk_slices,
)

IN_ONE, IN_PIECES = math.inf, 0
SO_FEW = 50
"""Rows whose logits are small enough for torch's cross entropy."""


def plain_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy as everybody writes it."""
    rows = logits.flatten(0, 1).float()
    total = functional.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / ((labels != IGNORED).sum() if count is None else count)


def head_and_batch(
    smallest_bytes: float, dtype: torch.dtype = torch.float32, vocab: int = 1000, rows: int = 150
) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(1)
    head = Head(48, vocab).to(dtype)
    head.smallest_bytes = smallest_bytes
    hidden = torch.randn(2, rows, 48, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (2, rows))
    labels[:, ::7] = IGNORED
    labels[0, :3] = torch.tensor([0, vocab - 1, vocab // 2])
    return head, hidden, labels


def gradients(loss: Tensor, head: Head, hidden: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, head.weight]))


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize(("smallest_bytes", "rows"), [(IN_ONE, 150), (IN_PIECES, 150), (IN_ONE, SO_FEW)])
@pytest.mark.parametrize("count", [None, 77.0, torch.tensor(77.0)])
def test_loss_and_gradients_are_those_of_whole_logits(
    smallest_bytes: float, rows: int, count: Tensor | float | None
) -> None:
    head, hidden, labels = head_and_batch(smallest_bytes, rows=rows)
    ours, theirs = head(hidden, labels, count), plain_loss(head(hidden), labels, count)
    assert abs(ours.item() - theirs.item()) <= 1e-6 * max(1.0, theirs.item())
    # Multiplied, so that what comes from behind the loss matters.
    for found, expected in zip(gradients(3 * ours, head, hidden), gradients(3 * theirs, head, hidden), strict=True):
        assert error(found, expected) <= 1e-6


def test_a_batch_without_a_label_that_counts_changes_nothing() -> None:
    head, hidden, labels = head_and_batch(IN_PIECES)
    loss = head(hidden, torch.full_like(labels, IGNORED), 5.0)
    assert loss.item() == 0
    assert [found.abs().max().item() for found in gradients(loss, head, hidden)] == [0, 0]


def test_large_logits_do_not_overflow() -> None:
    head, hidden, labels = head_and_batch(IN_PIECES)
    ours, theirs = head(1000 * hidden, labels), plain_loss(head(1000 * hidden), labels)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("smallest_bytes", [IN_ONE, IN_PIECES])
def test_bf16_gradients_are_no_worse_than_those_of_whole_logits(smallest_bytes: float) -> None:
    head, hidden, labels = head_and_batch(smallest_bytes, torch.bfloat16, vocab=500, rows=1000)
    exact_weight, exact_hidden = (tensor.detach().double().requires_grad_() for tensor in (head.weight, hidden))
    exact_loss = plain_loss(functional.linear(exact_hidden, exact_weight), labels)
    exact = torch.autograd.grad(exact_loss, [exact_hidden, exact_weight])
    ours, theirs = (gradients(loss, head, hidden) for loss in (head(hidden, labels), plain_loss(head(hidden), labels)))
    for found, usual, right in zip(ours, theirs, exact, strict=True):
        assert error(found, right) <= 1.05 * error(usual, right)


@pytest.mark.parametrize("name", ["llama", "nemotron4", "llama4", "qwen3-tied"])
@pytest.mark.parametrize("document_tokens", [None, 20])
def test_every_parameter_of_a_model_gets_its_gradient(
    name: str, document_tokens: int | None, models: dict[str, Model], randomised: Callable[[Model], Decoder]
) -> None:
    model = randomised(models[name])
    assert model.lm_head is not None
    model.lm_head.smallest_bytes = IN_PIECES
    data = SyntheticData(models[name].vocab_size, 96, 1, "uniform", document_tokens)
    tokens, labels, starts, *_ = data.micro_batch(range(2))
    ours, theirs = model(tokens, labels, starts=starts), plain_loss(model(tokens, starts=starts), labels)
    assert abs(ours.item() - theirs.item()) <= 1e-6 * theirs.item()
    parameters = dict(model.named_parameters())
    found, expected = (torch.autograd.grad(loss, list(parameters.values())) for loss in (ours, theirs))
    for parameter, one, other in zip(parameters, found, expected, strict=True):
        assert error(one, other) <= 2e-6, parameter


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    head, hidden, labels = head_and_batch(IN_PIECES)
    with torch.no_grad():
        assert not head(hidden, labels).requires_grad


def test_rows_of_a_piece_do_not_see_each_other() -> None:
    """Taken a few at a time or all at once, as compiled code does."""
    logits, places = torch.randn(70, 30), torch.randint(-1, 30, (70,))
    shares = torch.rand(70)
    sliced, whole = Softmax(), Softmax()
    whole.sliced = False
    found = [each.statistics(logits, places, 16) for each in (sliced, whole)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    made = [logits.clone(), logits.clone()]
    for each, piece in zip((sliced, whole), made, strict=True):
        each.to_gradient(piece, places, found[0][0], shares, 16)
    assert torch.equal(*made)


SIZES = st.integers(1, 5000)


@settings(deadline=None)  # how long it takes is a matter of the machine
@given(length=SIZES, width=SIZES, itemsize=st.sampled_from([2, 4]), most_bytes=st.integers(0, 2**24))
def test_pieces_cover_all_and_keep_to_their_bytes(length: int, width: int, itemsize: int, most_bytes: int) -> None:
    piece = chunk_length(length, width, itemsize, most_bytes)
    covered = [place for part in chunk_slices(length, piece) for place in range(part.start, part.stop)]
    assert covered == list(range(length))
    assert piece == 1 or piece * width * itemsize <= most_bytes
    # No more pieces than needed, but for alignment.
    needed = math.ceil(length / max(1, most_bytes // (width * itemsize)))
    assert len(list(chunk_slices(length, piece))) <= 2 * needed


def test_small_logits_are_one_piece_and_large_ones_even_pieces() -> None:
    assert chunk_length(128, 1024, 4, chunk_bytes(128, 1024)) == 128
    assert chunk_length(8192, 128256, 2, chunk_bytes(8192, 128256, math.inf)) == 8192
    assert chunk_length(8192, 128256, 2, chunk_bytes(8192, 128256)) == 1024
    # 9 pieces: an eighth is no multiple of 64.
    assert chunk_length(128256, 8192, 2, chunk_bytes(8192, 128256)) == 14272 == 223 * 64
    assert LARGEST_CHUNK == 1 / 16


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
