# SPDX-License-Identifier: Apache-2.0
"""A run on a packed dataset sees each pack once per epoch, as it is written, whatever the layout."""

import collections
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import packed_data
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.engine.data.batches import Figures, Loader, MicroBatch, RankData, StepData, figures, rank_samples
from llmb.engine.data.build import (
    PackedData,
    SyntheticData,
    build_data,
    check_dataset,
    dataset_problems,
    open_packed,
    shuffled,
)
from llmb.engine.model.loss import IGNORED
from llmb.engine.parallel.mesh import arrange
from llmb.runs.checkpoints.prepared_data import DOCUMENTS, PACKS, RECORD, TOKENS
from llmb.runs.plan import EnginePlan, TrainingDataset

SEQ_LEN, VOCAB = 24, 512
WITHIN_S = 120
PACKS_OF_LENGTHS = [[10, 3, 7], [24], [1, 2, 20], [5, 5, 5], [23]]
MakePlan = Callable[..., EnginePlan]


@pytest.fixture
def packs() -> list[list[packed_data.Document]]:
    return [packed_data.documents(lengths, VOCAB, seed) for seed, lengths in enumerate(PACKS_OF_LENGTHS)]


@pytest.fixture
def dataset(tmp_path: Path, packs: list[list[packed_data.Document]]) -> TrainingDataset:
    return packed_data.write_packed(tmp_path / "packed", packs, SEQ_LEN, VOCAB)


@pytest.fixture
def plan(tmp_path: Path, tiny_plan: MakePlan) -> EnginePlan:
    return with_dataset(tiny_plan(scale=1), packed_data.small_dataset(tmp_path / "small"))


def with_dataset(plan: EnginePlan, dataset: TrainingDataset) -> EnginePlan:
    return plan.model_copy(update={"dataset": dataset})


@given(count=st.integers(1, 500), key=st.text(max_size=5))
def test_a_shuffle_has_every_number_once(count: int, key: str) -> None:
    assert sorted(shuffled(place, count, key) for place in range(count)) == list(range(count))


def test_a_shuffle_of_millions_takes_one_place_at_a_time() -> None:
    found = [shuffled(place, 50_000_000, "1 0") for place in range(2000)]
    assert len(set(found)) == 2000
    assert np.mean(found) == pytest.approx(25_000_000, rel=0.05)


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_every_number_is_equally_likely_at_every_place(count: int) -> None:
    keys = 3000
    for place in (0, count // 2, count - 1):
        seen = collections.Counter(shuffled(place, count, str(key)) for key in range(keys))
        deviation = sum((seen[number] - keys / count) ** 2 / (keys / count) for number in range(count))
        assert deviation < count - 1 + 5 * (2 * (count - 1)) ** 0.5


def test_neighbors_do_not_stay_together() -> None:
    found = np.array([shuffled(place, 1000, "3 1") for place in range(1000)])
    assert np.mean(np.abs(np.diff(found)) < 10) < 0.05
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.1


def test_a_sample_is_a_pack_as_it_is_written(dataset: TrainingDataset, packs: list[list[packed_data.Document]]) -> None:
    data = open_packed(dataset, VOCAB, seed=3)
    batch = data.micro_batch(range(5))
    for number in range(5):
        tokens, labels, starts = [], [], []
        for document, answers in packs[data.pack(number)]:
            starts += [len(tokens)] * (len(document) - 1)
            tokens += document[:-1]
            labels += [token if answer else IGNORED for token, answer in zip(document[1:], answers[1:], strict=True)]
        rest = SEQ_LEN - len(tokens)
        assert batch.taken[number] == len(tokens)
        assert batch.starts[number].tolist() == starts + [len(tokens)] * rest
        assert batch.tokens[number].tolist() == tokens + [packed_data.EOS] * rest
        assert batch.labels[number].tolist() == labels + [IGNORED] * rest
    assert all(part.dtype == torch.int64 for part in batch[:3])


def test_every_epoch_has_each_pack_once_in_its_own_order(dataset: TrainingDataset) -> None:
    data = open_packed(dataset, VOCAB, seed=3)
    epochs = [[data.pack(number) for number in range(5 * epoch, 5 * epoch + 5)] for epoch in range(20)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 10
    assert [data.pack(number) for number in range(5)] == epochs[0]
    others = [open_packed(dataset, VOCAB, seed).pack(number) for seed in range(4, 24) for number in range(5)]
    assert others[:50] != epochs[0] * 10


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_a_step_has_the_same_samples_in_every_layout(scale: int, tiny_plan: MakePlan, tmp_path: Path) -> None:
    plan = with_dataset(tiny_plan(scale=scale), packed_data.small_dataset(tmp_path / "small"))
    layout, data = plan.recipe.layout, build_data(plan)
    rows = [
        row
        for rank in range(layout.dp)
        for batch in RankData(data, plan, rank, 0, False, SEQ_LEN).step(3).batches
        for row in batch.tokens.tolist()
    ]
    expected = data.micro_batch(range(3 * layout.gbs, 4 * layout.gbs)).tokens.tolist()
    assert sorted(rows) == sorted(expected)
    assert len(list(rank_samples(layout, 0, 0))) == layout.ga


def test_no_document_and_no_padding_is_longer_than_the_longest(dataset: TrainingDataset, tmp_path: Path) -> None:
    assert open_packed(dataset, VOCAB, seed=3).longest_document() == 24
    packs = [packed_data.documents(lengths, VOCAB) for lengths in ([5, 4, 6], [7, 8])]
    short = packed_data.write_packed(tmp_path / "short", packs, SEQ_LEN, VOCAB)
    assert open_packed(short, VOCAB, seed=3).longest_document() == 9
    assert SyntheticData(VOCAB, SEQ_LEN, 1, "uniform", document_tokens=5).longest_document() == 9
    assert SyntheticData(VOCAB, SEQ_LEN, 1, "uniform", document_tokens=20).longest_document() == SEQ_LEN


def test_figures_are_those_of_the_documents(dataset: TrainingDataset, packs: list[list[packed_data.Document]]) -> None:
    data = open_packed(dataset, VOCAB, seed=3)
    found = figures(data.micro_batch(range(5)), chunk_size=8)
    lengths = [length for of_pack in PACKS_OF_LENGTHS for length in of_pack]
    pieces = [8] * sum(length // 8 for length in lengths) + [length % 8 for length in lengths]
    counted = sum(sum(answers[1:]) for pack in packs for _, answers in pack)
    assert found == Figures(
        sum(lengths), counted, sum(length**2 for length in lengths), sum(piece**2 for piece in pieces)
    )
    assert found[:3] == (dataset.packed.places, dataset.packed.counted_labels, dataset.packed.sum_of_squares)
    assert figures(data.micro_batch(range(5)), None).chunked_sum_of_squares == found.sum_of_squares


def test_a_token_outside_the_vocabulary_names_the_pack(dataset: TrainingDataset) -> None:
    with pytest.raises(ValueError, match=r"pack \d has the token \d+; the vocabulary has 10"):
        open_packed(dataset, 10, seed=3).micro_batch(range(5))


def test_a_good_dataset_has_no_problems(plan: EnginePlan, tiny_plan: MakePlan) -> None:
    assert list(dataset_problems(plan)) == []
    assert list(dataset_problems(tiny_plan())) == []


def truncate(folder: Path) -> None:
    with (folder / TOKENS).open("r+b") as stream:
        stream.truncate(200)


def change_a_token(folder: Path) -> None:
    tokens = np.load(folder / TOKENS)
    tokens[-1] += 1
    np.save(folder / TOKENS, tokens)


def swap_packs(folder: Path) -> None:
    packs = np.load(folder / PACKS)
    packs[[1, 2]] = packs[[2, 1]]
    np.save(folder / PACKS, packs)


def shorten_documents(folder: Path) -> None:
    documents = np.load(folder / DOCUMENTS)
    documents[1] = 1
    np.save(folder / DOCUMENTS, documents)


def overfill(folder: Path) -> None:
    packs = np.load(folder / PACKS)
    packs[1] = packs[2] - 1
    np.save(folder / PACKS, packs)


def prepare_again(folder: Path) -> None:
    text = (folder / RECORD).read_text()
    (folder / RECORD).write_text(text.replace("made for tests", "made anew"))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / TOKENS).unlink(), "tokens.npy is missing"),
        (lambda folder: (folder / RECORD).write_text("{}"), "dataset.json cannot be read"),
        (truncate, "tokens.npy has 200 of"),
        (change_a_token, "tokens.npy has the checksum [0-9a-f]{8}, not [0-9a-f]{8}"),
        (lambda folder: np.save(folder / PACKS, np.zeros(13)), "packs.npy holds float64 .*, not a list of int64"),
        (swap_packs, "packs.npy does not divide the documents"),
        (shorten_documents, "documents.npy does not divide the tokens"),
        (overfill, "a pack has more than 128 tokens"),
        (prepare_again, "it has been prepared again since the run was planned"),
    ],
)
def test_damage_is_found_before_the_first_step(
    damage: Callable[[Path], object], problem: str, plan: EnginePlan
) -> None:
    damage(Path(plan.dataset.path))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        ranks = arrange(0, torch.device("cpu"), plan.recipe.layout, plan.parallelism.replicas(plan.recipe.layout))
        with pytest.raises(
            UsageError, match=rf"(?s)the dataset of this run cannot be used:.*{problem}.*where: .*small"
        ):
            check_dataset(plan, ranks)
    finally:
        dist.destroy_process_group()


def test_a_dataset_for_another_layout_or_model_is_refused(tiny_plan: MakePlan, tmp_path: Path) -> None:
    other = packed_data.small_dataset(tmp_path / "other", seq_len=64, vocab_size=5000)
    assert list(dataset_problems(with_dataset(tiny_plan(), other))) == [
        "it is packed into sequences of 64 tokens, but the layout has sequences of 128",
        "the vocabulary of its tokenizer, llmb/tiny, has 5000 tokens, but the model's has 1024",
    ]


class Slow:
    """Data whose micro-batches wait for a permit, and fail from a sample on."""

    def __init__(self, data: PackedData, fails_at: int = 1_000_000) -> None:
        self.data = data
        self.fails_at = fails_at
        self.made: list[int] = []

    def micro_batch(self, numbers: range) -> MicroBatch:
        if numbers.start >= self.fails_at:
            raise OSError(f"sample {numbers.start} cannot be read")
        self.made.append(numbers.start)
        return self.data.micro_batch(numbers)


def settled(made: list[int], least: int) -> int:
    """The number of micro-batches a moment after ``least`` are made: the thread may wait long for a core."""
    end = time.monotonic() + WITHIN_S
    while len(made) < least and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    return len(made)


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "data"] == []


@pytest.mark.usefixtures("threads")
def test_the_loader_is_ahead_by_two_steps_and_no_more(plan: EnginePlan) -> None:
    slow, layout = Slow(build_data(plan)), plan.recipe.layout
    with Loader(RankData(slow, plan, 0, 0, True, SEQ_LEN), 0, 50) as loader:
        assert settled(slow.made, 2 * layout.ga) == 2 * layout.ga
        taken: list[StepData] = [loader.step(0)]
        assert settled(slow.made, 3 * layout.ga) == 3 * layout.ga
        taken.append(loader.step(1))
        with pytest.raises(ValueError, match="the loader is at step 2, not 5"):
            loader.step(5)
    direct = RankData(build_data(plan), plan, 0, 0, True, SEQ_LEN)
    for number, step in enumerate(taken):
        assert step.figures == direct.step(number).figures
        assert step.wait_s >= 0
        for ours, theirs in zip(step.batches, direct.step(number).batches, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)


@pytest.mark.usefixtures("threads")
def test_an_error_of_the_loader_ends_the_step_that_needs_the_data(plan: EnginePlan) -> None:
    gbs = plan.recipe.layout.gbs
    with Loader(RankData(Slow(build_data(plan), fails_at=2 * gbs), plan, 0, 0, True, SEQ_LEN), 0, 50) as loader:
        loader.step(0)
        loader.step(1)
        with pytest.raises(OSError, match=f"sample {2 * gbs} cannot be read"):
            loader.step(2)
