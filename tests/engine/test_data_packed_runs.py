# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a packed dataset: their steps' figures, and what resumes from their checkpoints."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import packed_data
import pytest
import torch.distributed as dist
from ranks import ranks_of

from llmb.base.errors import UsageError
from llmb.engine import loop
from llmb.engine.data.batches import Figures, figures
from llmb.engine.data.build import build_data
from llmb.engine.watchdog import Progress
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan, Start, TrainingDataset
from llmb.runs.steps import Step, read_steps

SEQ_LEN, GBS, PACKS = 32, 2, 5
MakePlan = Callable[..., EnginePlan]
Train = Callable[[EnginePlan, str], list[Step]]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
    gc.enable()  # a training switches it off


@pytest.fixture
def dataset(tmp_path: Path) -> TrainingDataset:
    return packed_data.small_dataset(tmp_path / "packed", seq_len=SEQ_LEN, packs=PACKS)


@pytest.fixture
def plan(tiny_plan: MakePlan, dataset: TrainingDataset) -> EnginePlan:
    sizes = {"gbs": GBS, "layers": 1, "seq_len": SEQ_LEN}
    return tiny_plan(scale=1, steps=6, checkpoint_interval=4, overrides=sizes).model_copy(update={"dataset": dataset})


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def train(plan: EnginePlan, name: str) -> list[Step]:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        loop.train(plan, folder, ranks_of(plan), Progress(plan.first_step))
        return read_steps(folder.steps)

    return train


def resumed(plan: EnginePlan, checkpoint: Path) -> EnginePlan:
    record = read_checkpoint(checkpoint).record
    start = Start(path=str(checkpoint), step=record.step, consumed_samples=record.consumed_samples)
    return plan.model_copy(update={"start": start, "steps": plan.steps - record.step, "save_checkpoint": False})


def checkpoint_of(run: Path, step: int) -> Path:
    (found,) = RunFolder(run).checkpoints.glob(f"step={step}-*")
    return found


def test_a_run_that_resumes_trains_on_the_next_sample(plan: EnginePlan, train: Train, tmp_path: Path) -> None:
    """The fourth step ends with the third sample of the second epoch; the third epoch begins with the sixth step."""
    whole = train(plan, "whole")
    rest = train(resumed(plan, checkpoint_of(tmp_path / "whole", 4)), "rest")
    assert [step.step for step in rest] == [4, 5]
    for ours, theirs in zip(rest, whole[4:], strict=True):
        assert (ours.loss, ours.grad_norm, ours.tokens) == (theirs.loss, theirs.grad_norm, theirs.tokens)
    assert len({step.loss for step in whole}) == 6


def test_steps_tell_what_they_trained_on(plan: EnginePlan, train: Train) -> None:
    data = build_data(plan)
    for step in train(plan, "run"):
        samples = range(step.step * GBS, (step.step + 1) * GBS)
        expected = figures(data.micro_batch(samples), None)
        found = Figures(step.tokens, step.counted_labels, step.sum_of_squares, expected.chunked_sum_of_squares)
        assert found == expected
        assert step.padded_tokens == GBS * SEQ_LEN > step.tokens
        assert step.chunked_sum_of_squares is None
        assert 0 <= step.data_wait_s < step.step_time_s


def test_steps_of_unpacked_sequences_have_no_squares(tiny_plan: MakePlan, train: Train) -> None:
    (step,) = train(tiny_plan(scale=1, steps=1, overrides={"gbs": 1, "layers": 1, "seq_len": 16}), "run")
    assert (step.tokens, step.padded_tokens, step.counted_labels, step.sum_of_squares) == (16, 16, 16, None)


def test_a_checkpoint_remembers_its_dataset_and_refuses_another(
    plan: EnginePlan, train: Train, tmp_path: Path, dataset: TrainingDataset
) -> None:
    train(plan, "whole")
    checkpoint = checkpoint_of(tmp_path / "whole", 4)
    assert read_checkpoint(checkpoint).record.dataset == dataset.packed
    lengths = [[20, 10], [30]]
    packs = [packed_data.documents(row, 512, seed=9) for row in lengths]
    other = packed_data.write_packed(tmp_path / "other", packs, SEQ_LEN, 512, name="other")
    trained = "trained on squad training, packed to 32, tokenizer llmb/tiny, CRC-32 [0-9a-f]{8}"
    for given, named in ((other, "other training, packed to 32"), (None, "synthetic tokens")):
        again = resumed(plan, checkpoint).model_copy(update={"dataset": given})
        with pytest.raises(UsageError, match=f"(?s)the checkpoint was {trained}, but this run trains on {named}"):
            train(again, named)
