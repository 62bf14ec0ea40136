# SPDX-License-Identifier: Apache-2.0
"""Which folders are taken for checkpoints, and what a plan makes of them."""

import json
import shutil
import zlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.throughput import checkpoint_bytes
from llmb.reports.install_report import checkpoint_table
from llmb.runs import checkpoint_use as checkpoints
from llmb.runs.checkpoint_use import check_space
from llmb.runs.checkpoints.checkpoint import (
    CheckpointRecord,
    ImportSource,
    checkpoint_name,
    model_differences,
    read_checkpoint,
    saved_checkpoints,
)
from llmb.runs.checkpoints.checkpoint_files import partial_path
from llmb.runs.checkpoints.origin import random_and_synthetic
from llmb.runs.choices import DEFAULT_SEED, Choices
from llmb.runs.plan import Plan, Start, make_plan

FILES = {"weights/.metadata": b"m" * 30, "weights/__0_0.distcp": b"w" * 500, "weights/__1_0.distcp": b"w" * 400}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Make:
    """Makes a whole checkpoint below ``tmp_path``."""

    def checkpoint(step: int = 50, seed: int = 7, **changes: object) -> Path:
        plan = tiny_plan(seed=seed, peak_lr=0.125)
        path = tmp_path / checkpoint_name(step, step * 8)
        for name, content in FILES.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        record = CheckpointRecord(
            llmb_version="0.1",
            saved_at="2026-01-01",
            workload=plan.recipe.workload,
            size="tiny",
            dtype=plan.recipe.dtype,
            model=plan.recipe.model,
            layout=plan.recipe.layout,
            training=plan.recipe.training,
            seed=seed,
            step=step,
            consumed_samples=step * 8,
            files={name: len(content) for name, content in FILES.items()},
            crc32={name: f"{zlib.crc32(content):08x}" for name, content in FILES.items()},
        )
        (path / "checkpoint.json").write_text(record.model_copy(update=changes).model_dump_json())
        return path

    return checkpoint


def test_a_whole_checkpoint_is_read(make: Make) -> None:
    found = read_checkpoint(make())
    assert found.path.name == "step=50-consumed_samples=400"
    assert (found.record.step, found.size_bytes) == (50, 930)


def test_its_table_says_what_the_training_began_with_and_its_data(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    path = make(origin=random_and_synthetic(tiny_plan().recipe.training))
    rows = dict(row[:2] for row in checkpoint_table(read_checkpoint(path)).rows)
    assert (rows["weights"], rows["data"]) == ("random, before the first step", "synthetic zipf")
    older = dict(row[:2] for row in checkpoint_table(read_checkpoint(make(step=60))).rows)
    assert not {"weights", "data"} & set(older)


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_to_be_there_with_its_size(make: Make, name: str) -> None:
    path = make()
    (path / name).write_bytes(FILES[name][:-1])
    with pytest.raises(UsageError, match=rf"incomplete:\n  - {name} has \d+ of {len(FILES[name])} bytes"):
        read_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(UsageError, match=f"{name} is missing"):
        read_checkpoint(path)


def test_one_that_was_never_finished_is_not_taken_for_one(make: Make, tmp_path: Path) -> None:
    path = make()
    partial = path.rename(partial_path(path))
    with pytest.raises(UsageError, match="this checkpoint is incomplete: llmb is still writing"):
        read_checkpoint(partial)
    assert saved_checkpoints(tmp_path) == []


def test_the_newest_comes_last_and_damaged_ones_are_left_out(make: Make, tmp_path: Path) -> None:
    for step in (100, 9, 20):
        make(step)
    shutil.rmtree(make(1000) / "weights")
    assert [found.record.step for found in saved_checkpoints(tmp_path)] == [9, 20, 100]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("context/model.yaml", "NeMo 2"),
        ("latest_checkpointed_iteration.txt", "Megatron"),
        ("run_config.yaml", "Megatron-Bridge"),
        ("model-00001-of-00002.safetensors", "Hugging Face"),
        ("consolidated.00.pth", "Llama"),
        (".metadata", "torch.distributed.checkpoint by another program"),
        ("weights/.metadata", "torch.distributed.checkpoint by another program"),
        ("readme.txt", "it has no 'checkpoint.json'"),
    ],
)
def test_what_others_made_is_named(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    with pytest.raises(UsageError, match=f"not a checkpoint of llmb: .*{said}"):
        read_checkpoint(tmp_path)


def test_a_folder_close_by_leads_to_the_right_one(make: Make, tmp_path: Path) -> None:
    path = make()
    make(9)
    with pytest.raises(UsageError) as caught:
        read_checkpoint(path / "weights")
    assert caught.value.choices == (str(path),)
    with pytest.raises(UsageError) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.choices == ("step=9-consumed_samples=72", "step=50-consumed_samples=400")


def test_what_is_not_there_or_no_folder_is_said(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="it is a file"):
        read_checkpoint(make() / "checkpoint.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty folder"):
        read_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"schema_version": 99, "shards": 3}', "\x00\x01"])
def test_a_record_of_somebody_else_is_refused(make: Make, content: str) -> None:
    path = make()
    (path / "checkpoint.json").write_text(content)
    with pytest.raises(UsageError, match="cannot be read by this version of llmb"):
        read_checkpoint(path)


def test_a_record_of_a_later_schema_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="schema_version"):
        read_checkpoint(make(schema_version=2))


def test_a_plan_goes_on_where_the_checkpoint_stopped(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    path = make()
    plan = tiny_plan(steps=10, checkpoint=read_checkpoint(path), overrides={"gbs": 16})
    assert (plan.first_step, plan.last_step) == (50, 59)
    assert (plan.window.first, plan.window.last) == (57, 58)
    assert [plan.samples_before(step) for step in (50, 51, 60)] == [400, 416, 560]
    assert plan.seed == 7
    assert plan.recipe.training.peak_lr == 0.125
    assert plan.start is not None
    assert plan.start.path == str(path)
    assert tiny_plan(steps=10, checkpoint=read_checkpoint(path), peak_lr=0.5).recipe.training.peak_lr == 0.5


def test_imported_weights_begin_a_training_of_the_recipe(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    origin = ImportSource(format="huggingface", path="/models/x", files=("model.safetensors",))
    of_a_run = {"dtype": None, "layout": None, "training": None, "seed": None}
    path = make(step=0, optimizer_state=False, imported_from=origin, **of_a_run)
    plan = tiny_plan(steps=10, checkpoint=read_checkpoint(path))
    assert plan.start == Start(path=str(path), step=0, consumed_samples=0, optimizer_state=False)
    assert (plan.first_step, plan.seed) == (0, DEFAULT_SEED)
    assert plan.recipe.training == tiny_plan().recipe.training
    assert tiny_plan(steps=10, checkpoint=read_checkpoint(path), seed=5).seed == 5


def test_a_record_older_than_imports_holds_optimizer_state(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    path = make()
    record = json.loads((path / "checkpoint.json").read_text())
    del record["optimizer_state"], record["imported_from"]
    (path / "checkpoint.json").write_text(json.dumps(record))
    start = tiny_plan(steps=10, checkpoint=read_checkpoint(path)).start
    assert start is not None
    assert start.optimizer_state


def test_another_model_or_seed_is_refused_with_what_differs(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    checkpoint = read_checkpoint(make())
    recipe = tiny_plan().recipe
    other = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"vocab_size": 2000, "hidden_size": 256})}
    )
    with pytest.raises(UsageError) as caught:
        make_plan(other, Choices(seed=3), device="cpu", checkpoint=checkpoint)
    for said in ("vocab_size is 1024 in the checkpoint and 2000", "hidden_size is 128", "trained with 7"):
        assert said in str(caught.value)


def test_names_and_sources_make_no_other_model(tiny_plan: Callable[..., Plan]) -> None:
    model = tiny_plan().recipe.model
    renamed = model.model_copy(update={"model": "other", "source": "elsewhere", "init_std": 0.5, "max_seq_len": 7})
    assert list(model_differences(model, renamed)) == []


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, []),
        ({"save_checkpoint": True}, [11]),
        ({"checkpoint_interval": 5}, [4, 9, 11]),
        ({"save_checkpoint": True, "checkpoint_interval": 4}, [3, 7, 11]),
        ({"checkpoint_interval": 100}, [11]),
    ],
)
def test_when_checkpoints_are_saved(
    tiny_plan: Callable[..., Plan], options: dict[str, object], saved: list[int]
) -> None:
    plan = tiny_plan(steps=12, **options)
    assert [step for step in range(12) if plan.saves_after(step)] == saved


def test_intervals_count_through_the_whole_training(make: Make, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(steps=12, checkpoint_interval=20, checkpoint=read_checkpoint(make()))
    assert [step for step in range(50, 62) if plan.saves_after(step)] == [59, 61]


def test_a_checkpoint_keeps_three_fp32_values_a_parameter(tiny_plan: Callable[..., Plan]) -> None:
    """8.03 billion parameters, for which the recipe documents print about 105 GB: theirs hold bf16 weights too."""
    model = tiny_plan().recipe.model
    grown = {"layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "head_dim": 128, "vocab_size": 128256}
    llama_8b = model.model_copy(update={**grown, "attention_heads": 32, "kv_heads": 8})
    assert checkpoint_bytes(llama_8b) == pytest.approx(96.4e9, rel=0.001)


def test_a_disk_without_room_is_said_before_anything_starts(
    tiny_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    plan = tiny_plan(steps=12, checkpoint_interval=5)
    need = 3 * checkpoint_bytes(plan.recipe.model)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage(need - 1))
    with pytest.raises(EnvironmentProblem, match=r"3 checkpoints need about 0.0413 GB; the disk has 0.0413 GB"):
        check_space(plan, tmp_path / "not" / "yet" / "there")
    check_space(tiny_plan(steps=12, save_checkpoint=True), tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage(0))
    check_space(tiny_plan(steps=12), tmp_path)
