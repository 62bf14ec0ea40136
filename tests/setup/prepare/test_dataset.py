"""A dataset from local files to packs: splits, tokens, masks, repetition, damage and change."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizer import rows, save_tokenizer, write_lines

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.locks import file_lock
from llmb.runs.checkpoints.prepared_data import ARRAYS, RECORD, map_arrays, prepared_folders
from llmb.setup.prepare import dataset
from llmb.setup.prepare.dataset import LOCK, DatasetRequest, PreparedDataset, prepare_dataset, seq_lens_of
from llmb.setup.prepare.tokenizer import load_tokenizer

WORKLOAD = "finetune_llama3"


def prepare(tmp_path: Path, source: Path | None = None, **changes: Any) -> PreparedDataset:
    options = {"source": source, "tokenizer": tmp_path / "model"} | changes
    request = DatasetRequest(workload=WORKLOAD, size="tiny", **options)
    folders = prepared_folders(tmp_path / "install", WORKLOAD)
    return prepare_dataset(Catalogue(), request, folders, lambda *_: None, lambda _: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "model")
    return write_lines(tmp_path / "squad.jsonl", rows(200))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Of 200 samples, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("prepared")
    save_tokenizer(folder / "model")
    return prepare(folder, write_lines(folder / "squad.jsonl", rows(200)))


def test_folders_are_those_of_the_reference_documents(prepared: PreparedDataset) -> None:
    below = prepared.folder
    parents = ("install", "workloads", WORKLOAD, "checkpoint_and_dataset", "datasets", "squad-tiny")
    assert below.parts[-len(parents) :] == parents
    for split in ("training", "validation", "test"):
        for suffix in ("", ".idx.npy", ".idx.info"):
            assert (below / f"{split}.jsonl{suffix}").is_file()
        assert (below / "packed" / "llmb--llama3-tiny" / f"{split}_128" / RECORD).is_file()
    assert not list((below.parents[1] / "nemo_nlp_tmp").iterdir())
    assert prepared.samples.samples == {"training": 180, "validation": 10, "test": 10}


def test_the_index_leads_to_every_line(prepared: PreparedDataset) -> None:
    path = prepared.folder / "training.jsonl"
    ends = np.load(f"{path}.idx.npy")
    text = path.read_bytes()
    assert [text[end : end + 1] for end in ends] == [b"\n"] * 180
    assert ends[-1] == len(text) - 1
    assert json.loads(text[ends[41] + 1 : ends[42]]) == lines(path)[42]
    assert pickle.loads(Path(f"{path}.idx.info").read_bytes()) == {"newline_int": 10, "version": "0.2"}


def test_splits_are_those_that_nemo_draws(tmp_path: Path, source: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    write_lines(folder / "train.jsonl", rows(101))
    write_lines(folder / "validation.jsonl", rows(7))
    prepared = prepare(tmp_path, folder)
    drawn = datasets.Dataset.from_list(rows(101)).train_test_split(test_size=0.05, seed=1234)
    for split, expected in (("training", drawn["train"]), ("validation", drawn["test"])):
        prompts = [f"Context: {row['context']} Question: {row['question']} Answer:" for row in expected]
        found = lines(prepared.folder / f"{split}.jsonl")
        assert [line["input"] for line in found] == prompts
        assert {tuple(line) for line in found} == {("input", "output")}
    test = lines(prepared.folder / "test.jsonl")
    assert [line["original_answers"] for line in test] == [row["answers"]["text"] for row in rows(7)]
    assert "test is the source's validation" in prepared.samples.split_rule


def test_packs_hold_every_sample_with_its_answer_counted(prepared: PreparedDataset) -> None:
    training = next(packed for packed in prepared.packed if packed.record.split == "training")
    record, arrays = training.record, map_arrays(training.path)
    assert arrays.tokens.dtype == np.uint32
    assert arrays.answers.dtype == np.bool_
    found = []
    for first, end in zip(arrays.documents, arrays.documents[1:], strict=False):
        tokens, answers = arrays.tokens[first:end].tolist(), arrays.answers[first:end].tolist()
        assert tokens[-1] == record.tokenizer.eos_id == 2
        assert answers == sorted(answers)  # the prompt, then the answer
        assert sum(answers) == 2  # the word of the answer, and EOS
        found.append(tokens)
    assert record.documents == len(found) == 180
    places = [len(tokens) - 1 for tokens in found]
    assert record.places == sum(places)
    assert record.sum_of_squares == sum(n * n for n in places)
    assert record.longest_document == max(places)
    assert record.counted_labels == 360
    for first, end in zip(arrays.packs, arrays.packs[1:], strict=False):
        assert 0 < sum(places[first:end]) <= 128
    assert (arrays.packs[0], arrays.packs[-1], len(arrays.packs)) == (0, 180, record.packs + 1)


def test_a_document_is_prompt_answer_and_end_without_a_beginning(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    sample = {"input": " Context: Anna has a hat. Question: what color? Answer: ", "output": " red "}
    packed = prepare(tmp_path, write_lines(tmp_path / "a.jsonl", [sample] * 20)).packed[0]
    arrays = map_arrays(packed.path)
    prompt = ["Context", ":", "Anna", "has", "a", "hat", ".", "Question", ":", "what", "color", "?", "Answer", ":"]
    vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert arrays.tokens[: arrays.documents[1]].tolist() == [*(vocabulary[word] for word in [*prompt, "red"]), 2]


def test_the_first_token_is_no_label_without_a_prompt_either(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    samples = [{"input": "", "output": "red hat"}] * 20
    packed = prepare(tmp_path, write_lines(tmp_path / "a.jsonl", samples), splits=("training",)).packed[0]
    labels = np.delete(map_arrays(packed.path).answers, map_arrays(packed.path).documents[:-1])
    assert packed.record.counted_labels == np.count_nonzero(labels) == 18 * 2


def test_samples_that_are_too_long_are_left_out_and_counted(tmp_path: Path, source: Path) -> None:
    prepared = prepare(tmp_path, source, seq_lens=(26,), splits=("training",))
    (packed,) = prepared.packed
    assert packed.record.left_out > 0
    assert packed.record.documents + packed.record.left_out == 180
    assert packed.record.longest_document <= 26
    with pytest.raises(UsageError, match="no sample of training fits into 4 places; the shortest takes"):
        prepare(tmp_path, source, seq_lens=(4,))


def test_questions_without_an_answer_are_left_out_and_counted(tmp_path: Path, source: Path) -> None:
    unanswered = [row | {"answers": {"text": [], "answer_start": []}} for row in rows(9)]
    write_lines(source, [*rows(100), *unanswered])
    prepared = prepare(tmp_path, source)
    assert prepared.samples.without_answer == 9
    assert sum(prepared.samples.samples.values()) == 100


def test_a_second_call_writes_nothing_and_needs_neither_source_nor_tokenizer(tmp_path: Path, source: Path) -> None:
    """So that who may only read the folders of another user finds them prepared."""
    first = prepare(tmp_path, source)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.is_file()}
    assert all(packed.made for packed in first.packed)
    temporary = first.folder.parents[1] / "nemo_nlp_tmp"
    temporary.rmdir()
    temporary.touch()
    again = prepare(tmp_path, source, verify=True)
    source.unlink()
    for found in (again, prepare(tmp_path, tokenizer=None)):
        assert not found.samples_made
        assert not any(packed.made for packed in found.packed)
    assert [packed.record for packed in again.packed] == [packed.record for packed in first.packed]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_lock_needs_no_permission_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is mounted to be read: nothing on it can be opened to write."""
    (tmp_path / LOCK).touch()
    opened = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with file_lock(tmp_path / LOCK, 0, "testing"):
        monkeypatch.undo()
        with pytest.raises(EnvironmentProblem), file_lock(tmp_path / LOCK, 0, "testing"):
            pass


def test_packs_behind_a_link_are_replaced_where_they_are(tmp_path: Path, source: Path) -> None:
    link, disk = prepare(tmp_path, source).packed[0].path, tmp_path / "disk"
    link.rename(disk)
    link.symlink_to(disk)
    (disk / "tokens.npy").write_bytes(b"")
    prepare(tmp_path, source, force=True)
    assert link.is_symlink()
    assert (disk / "tokens.npy").stat().st_size > 0


def test_the_same_source_gives_the_same_files_and_further_lengths_from_anywhere(
    tmp_path: Path, source: Path, prepared: PreparedDataset
) -> None:
    first = prepare(tmp_path, source)
    assert first.samples.crc32 == prepared.samples.crc32
    assert [packed.record.crc32 for packed in first.packed] == [packed.record.crc32 for packed in prepared.packed]
    more = prepare(tmp_path, source.rename(tmp_path / "moved.jsonl"), seq_lens=(128, 256))
    assert not more.samples_made
    assert [(packed.record.seq_len, packed.made) for packed in more.packed] == [(128, False), (256, True)] * 3


def test_another_source_is_refused_until_forced(tmp_path: Path, source: Path) -> None:
    prepare(tmp_path, source)
    write_lines(source, rows(100))
    with pytest.raises(UsageError, match=r"squad-tiny was prepared from .*squad\.jsonl") as error:
        prepare(tmp_path, source)
    assert "--force" in str(error.value.do)
    assert prepare(tmp_path, source, force=True).samples.samples["training"] == 90
    assert not prepare(tmp_path, source).samples_made


def test_another_tokenizer_is_refused_until_forced(tmp_path: Path, source: Path) -> None:
    prepare(tmp_path, source)
    other = save_tokenizer(tmp_path / "other", words=["hat"])
    with pytest.raises(UsageError, match="these packs were made with another tokenizer"):
        prepare(tmp_path, source, tokenizer=other)
    assert prepare(tmp_path, source, tokenizer=other, force=True).packed[0].record.tokenizer.vocab_size == 4


def test_another_template_is_refused(tmp_path: Path, source: Path) -> None:
    record = prepare(tmp_path, source).folder / "samples.json"
    record.write_text(record.read_text().replace("squad-1", "squad-0"))
    with pytest.raises(UsageError, match="with the template squad-0, not squad-1"):
        prepare(tmp_path, source)


@pytest.mark.parametrize("name", ["training.jsonl", f"packed/llmb--llama3-tiny/test_128/{ARRAYS[0]}"])
def test_damage_is_named(tmp_path: Path, source: Path, name: str) -> None:
    path = prepare(tmp_path, source).folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    prepare(tmp_path, source)  # sizes are as they were
    with pytest.raises(UsageError, match=rf"damaged(.|\n)*{path.name} has the checksum"):
        prepare(tmp_path, source, verify=True)
    path.write_bytes(content[:-1])
    with pytest.raises(UsageError, match=rf"{path.name} has {len(content) - 1} of {len(content)} bytes"):
        prepare(tmp_path, source)
    path.unlink()
    with pytest.raises(UsageError, match=f"{path.name} is missing"):
        prepare(tmp_path, source)
    prepare(tmp_path, source, force=True)
    prepare(tmp_path, source, verify=True)


def test_what_a_killed_process_left_is_completed(tmp_path: Path, source: Path) -> None:
    """As it is on disk after a kill at each of the places where something is renamed or removed."""
    first = prepare(tmp_path, source)
    checksums = [packed.record.crc32 for packed in first.packed]
    packed = first.packed[1].path
    temporary = first.folder.parents[1] / "nemo_nlp_tmp" / "dataset-squad-tiny"
    temporary.mkdir()
    (temporary / "tokens").write_bytes(b"left over")
    for name in ("training.jsonl", "samples.json"):
        (first.folder / f".{name}.partial").write_bytes(b"left over")
    (packed / RECORD).unlink()
    leftover = packed.with_name(f".{packed.name}.partial")
    leftover.mkdir()
    (first.folder / "samples.json").unlink()
    (first.folder / "test.jsonl").unlink()
    again = prepare(tmp_path, source, verify=True)
    assert [packed.record.crc32 for packed in again.packed] == checksums
    assert [packed.made for packed in again.packed] == [False, True, False]
    assert not leftover.exists()
    assert not temporary.exists()
    assert list(first.folder.glob(".*.partial")) == []
    assert not prepare(tmp_path, source).samples_made


def test_two_at_once_are_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(tmp_path, source).folder
    monkeypatch.setattr(dataset, "PATIENCE_S", 0)
    with (
        file_lock(folder / LOCK, 0, "testing"),
        pytest.raises(EnvironmentProblem, match="another process is preparing this dataset"),
    ):
        prepare(tmp_path, source)


def test_a_full_disk_and_too_few_samples_are_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device") as error:
        prepare(tmp_path, source)
    assert "free some space" in str(error.value.do)
    monkeypatch.undo()
    too_few = write_lines(tmp_path / "too_few", rows(2))
    with pytest.raises(UsageError, match="no sample is left for training"):
        prepare(tmp_path, too_few)
    assert prepare(tmp_path, source).samples_made


@pytest.mark.parametrize(
    ("settings", "config", "problem"),
    [
        ({}, None, "the end-of-sequence token is not specified"),
        ({}, {"eos_token_id": [1, 2]}, "the end-of-sequence token is not specified"),
        (None, {"text_config": "none"}, "the end-of-sequence token is not specified"),
        ({"eos_token": "<end>"}, None, "'eos_token' is <end>, which the tokenizer does not have"),
        ({}, {"eos_token_id": 400}, "'eos_token_id' is 400, but the tokenizer has only"),
    ],
)
def test_an_end_of_sequence_is_never_guessed(
    tmp_path: Path, source: Path, settings: dict[str, Any] | None, config: dict[str, Any] | None, problem: str
) -> None:
    model = save_tokenizer(tmp_path / "model", settings)
    if settings is None:
        (model / "tokenizer_config.json").unlink()
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=problem):
        prepare(tmp_path, source)


@pytest.mark.parametrize("number", [2, [2]])
def test_special_tokens_may_be_in_the_models_configuration(tmp_path: Path, source: Path, number: object) -> None:
    model = save_tokenizer(tmp_path / "model", {})
    (model / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": number}}))
    tokenizer = prepare(tmp_path, source).packed[0].record.tokenizer
    assert (tokenizer.eos_id, tokenizer.bos_id) == (2, None)


def test_the_tokenizer_of_the_prepared_checkpoint_is_the_default(tmp_path: Path, source: Path) -> None:
    folders = prepared_folders(tmp_path / "install", WORKLOAD)
    save_tokenizer(folders.model("llmb/llama3-tiny") / "context")
    assert prepare(tmp_path, source, tokenizer=None).packed[0].record.tokenizer.eos_id == 2


def test_a_tokenizer_that_does_not_fit_or_cannot_be_read_is_named(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "model" / "tokenizer.json"
    assert load_tokenizer(path, "a/b", 20).record.vocab_size == 20
    with pytest.raises(UsageError, match="the tokenizer has 20 tokens, but the model has only 19 embeddings"):
        load_tokenizer(path, "a/b", 19)
    path.write_text("{}")
    with pytest.raises(UsageError, match="this tokenizer cannot be read"):
        prepare(tmp_path, source)
    with pytest.raises(UsageError, match=r"there is no tokenizer\.json"):
        prepare(tmp_path, tokenizer=tmp_path)  # before it asks the hub for samples


def test_sequence_lengths_are_those_of_all_recipes_of_the_size() -> None:
    assert seq_lens_of(Catalogue(), WORKLOAD, "70b") == (2048, 4096)
    assert seq_lens_of(Catalogue(), "finetune_llama4-maverick", "tiny") == (128,)


def test_a_workload_that_is_no_fine_tuning_is_refused(tmp_path: Path) -> None:
    request = DatasetRequest(workload="pretrain_llama3.1", size="tiny")
    with pytest.raises(UsageError, match="does not fine-tune") as error:
        prepare_dataset(Catalogue(), request, prepared_folders(tmp_path, "a"), lambda *_: None, lambda _: None)
    assert WORKLOAD in error.value.choices
