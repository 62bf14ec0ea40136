# SPDX-License-Identifier: Apache-2.0
"""A document packed with others is computed as by itself."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from llmb.engine.data.batches import MicroBatch
from llmb.engine.data.build import SyntheticData
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.loss import IGNORED

ALL = ["llama", "llama-scaled", "nemotron4", "llama4", "qwen3-tied", "mixtral"]
DOCUMENTS = [[1, 40, 7, 32], [33, 2, 45]]
"""Lengths in each sequence of 80 tokens; some are longer than the 32 tokens of an attention chunk."""


def starts_of(documents: list[list[int]]) -> Tensor:
    rows = []
    for lengths in documents:
        ends = torch.tensor(lengths).cumsum(0)
        rows.append(torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths)))
    return torch.stack(rows)


def packed(vocab_size: int) -> MicroBatch:
    tokens, labels = torch.randint(0, vocab_size, (2, 2, 80), generator=torch.Generator().manual_seed(2))
    starts = starts_of(DOCUMENTS)
    places = torch.arange(80)
    last = torch.stack([torch.isin(places + 1, torch.tensor(lengths).cumsum(0)) for lengths in DOCUMENTS])
    return MicroBatch(tokens, labels.masked_fill(last, IGNORED), starts)


def one_by_one() -> Iterator[tuple[int, int, int]]:
    """Row, first and end place of every document."""
    for row, lengths in enumerate(DOCUMENTS):
        for length, end in zip(lengths, accumulate(lengths), strict=True):
            yield row, end - length, end


@pytest.mark.parametrize("name", ALL)
def test_every_document_has_the_logits_and_gradients_that_it_has_by_itself(name, models, randomised):
    together, alone = randomised(models[name]), randomised(models[name])
    tokens, labels, starts, *_ = packed(models[name].vocab_size)
    count = (labels != IGNORED).sum()
    loss = together(tokens, labels, starts=starts)
    loss.backward()

    their_loss = torch.zeros(())
    with torch.no_grad():
        logits = together(tokens, starts=starts)
    for row, first, end in one_by_one():
        parts = tokens[row : row + 1, first:end], labels[row : row + 1, first:end]
        torch.testing.assert_close(logits[row, first:end], alone(parts[0])[0].detach(), rtol=1e-4, atol=1e-4)
        if end - first > 1:
            part = alone(*parts, count=count)
            part.backward()
            their_loss += part.detach()

    torch.testing.assert_close(loss.detach(), their_loss)
    for (parameter, ours), theirs in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-6, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["llama", "llama4"])
def test_a_block_with_masks_is_one_graph_for_the_compiler(name, models, randomised):
    model = models[name]
    decoder: Decoder = randomised(model).to(torch.bfloat16)
    batch = packed(model.vocab_size)
    with torch.no_grad():
        expected = decoder(batch.tokens, starts=batch.starts)
        for layer, block in decoder.layers.items():
            # Experts are not compiled: their shapes depend on the tokens.
            if not model.is_moe_layer(int(layer)):
                block.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(decoder(batch.tokens, starts=batch.starts), expected)


def data(document_tokens: int | None = 12, seed: int = 1) -> SyntheticData:
    return SyntheticData(1000, 64, seed, "uniform", document_tokens)


def test_documents_fill_a_sequence_and_their_last_tokens_predict_nothing():
    batch = data().micro_batch(range(5, 9))
    for row, starts in enumerate(batch.starts.tolist()):
        begins = sorted(set(starts))
        assert begins[0] == 0
        assert starts == [max(begin for begin in begins if begin <= place) for place in range(64)]
        lengths = [end - begin for begin, end in zip(begins, [*begins[1:], 64], strict=True)]
        assert max(lengths) <= 23
        ignored = (batch.labels[row] == IGNORED).nonzero().flatten().tolist()
        assert ignored == [begin - 1 for begin in begins[1:]] + [63]
        assert int((batch.labels[row] != IGNORED).sum()) == 64 - len(begins)
    plain = data(document_tokens=None).micro_batch(range(5, 9))
    counts = batch.labels != IGNORED
    assert torch.equal(batch.tokens, plain.tokens)
    assert torch.equal(batch.labels[counts], plain.labels[counts])


def test_documents_depend_on_seed_and_number_and_have_the_mean_length_that_was_asked_for():
    assert torch.equal(data().document_starts(5, 12), data().document_starts(5, 12))
    assert not torch.equal(data().document_starts(5, 12), data().document_starts(6, 12))
    assert not torch.equal(data().document_starts(5, 12), data(seed=2).document_starts(5, 12))
    whole = [begins.diff() for n in range(400) for begins in [data().document_starts(n, 12).unique()]]
    first = torch.cat([lengths[:1] for lengths in whole]).double()
    assert first.mean().item() == pytest.approx(12, abs=1)
    assert (first.min(), first.max()) == (1, 23)
