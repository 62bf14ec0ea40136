# SPDX-License-Identifier: Apache-2.0
"""The loss that never holds logits whole is the one from whole logits, in a fraction of the memory."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from llmb.catalogue.records import Model
from llmb.engine.data.build import SyntheticData
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.loss import IGNORED, LARGEST_CHUNK, Head, Softmax, chunk_bytes, chunk_length, chunk_slices

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
