"""Local sources: formats are told by content, splits by names, and what is wrong has a place."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from small_tokenizer import rows, write_lines

from llmb.base.errors import UsageError
from llmb.setup.prepare.training_samples import read_samples, split_files

ROW = {"context": "Anna has a hat.", "question": "Who?", "answers": {"text": ["Anna", "she"], "answer_start": [0, 0]}}
PROMPT = "Context: Anna has a hat. Question: Who? Answer:"
QUESTIONS = [
    {"id": "1", "question": "Who?", "answers": [{"text": "Anna", "answer_start": 0}]},
    {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
]
PARAGRAPHS = [{"context": "Anna has a hat.", "qas": QUESTIONS}]
SQUAD = {"version": "1.1", "data": [{"title": "hats", "paragraphs": PARAGRAPHS}]}


def test_rows_of_the_hub_as_json_lines_and_as_parquet(tmp_path: Path) -> None:
    """Blank lines and a byte order mark are skipped."""
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(ROW).encode() + b"\n\n")
    parquet.write_table(pyarrow.Table.from_pylist([ROW, *rows(3)]), tmp_path / "train")
    sources = {write_lines(tmp_path / "a", [ROW]): 1, marked: 1, tmp_path / "train": 4}
    for path, count in sources.items():
        samples = list(read_samples(path))
        assert samples[0] == (PROMPT, "Anna", ("Anna", "she"))
        assert len(samples) == count


def test_a_dataset_that_the_library_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(rows(30)), "validation": datasets.Dataset.from_list(rows(4))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "squad")
    found = split_files(tmp_path / "squad")
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {
        "training": ["data-00000-of-00001.arrow"],
        "validation": ["data-00000-of-00001.arrow"],
    }
    assert len(list(read_samples(found["training"][0]))) == 30


@pytest.mark.parametrize("indent", [None, 2])
def test_squad_as_it_is_published(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "train-v2.0.json"
    path.write_text(json.dumps(SQUAD, indent=indent))
    assert list(read_samples(path)) == [(PROMPT, "Anna", ("Anna",)), None]


def test_lines_that_are_in_the_template_already(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"input": "1 + 1 =", "output": "2"}, {"input": "?", "output": " "}])
    assert list(read_samples(path)) == [("1 + 1 =", "2", ()), None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (json.dumps(ROW).encode() + b"\n{oops\n", "line 2: invalid JSON"),
        (b"oops\n", "line 1: invalid JSON"),
        (b"[1, 2]\n", "line 1 is not a JSON object"),
        (b"\n" + json.dumps(ROW).encode() + b"\n\xff\xfe\n", "line 3 is not UTF-8"),
        (b'{"context": "a", "answers": {"text": ["b"]}}\n', "line 1: 'question' is missing"),
        (b'{"context": "a", "question": 3, "answers": {"text": ["b"]}}\n', "line 1: 'question' is not a text"),
        (b'{"context": "a", "question": "\\ud800", "answers": {"text": ["b"]}}\n', "line 1: 'question' is not a text"),
        (b'{"context": "a", "question": "b", "answers": {"text": ["\\udfff"]}}\n', "line 1: 'answers' is neither"),
        (b'{"input": "a", "output": "b\\ud800"}\n', "line 1: 'output' is not a text"),
        (b"[" * 100_000 + b"\n", "line 1: invalid JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", "line 1: invalid JSON"),
        (json.dumps(ROW).encode() + b'\n{"id": ' + b"9" * 5000 + b"}\n", "line 2: invalid JSON"),
        (b'{"context": "a", "question": "b"}\n', "line 1: 'answers' is neither"),
        (b'{"context": "a", "question": "b", "answers": ["c"]}\n', "line 1: 'answers' is neither"),
        (b'{"input": "a"}\n', "line 1: 'output' is missing"),
        (b'{"input": "a", "output": "b", "original_answers": "b"}\n', "line 1: 'original_answers' is not a list"),
        (b'{"prompt": "a", "completion": "b"}\n', "line 1: 'context' is missing"),
        (b'{"data": 3}\n', "'data' is not a list"),
        (b'{"data": [{"paragraphs": [{"context": "a", "qas": [3]}]}]}', "data[0].paragraphs[0].qas[0] is not an"),
        (b'{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}', "data[0].paragraphs[0].qas[0]: 'context' is"),
        (b'{\n"data": [\n', "invalid JSON"),
        (b"PAR1 is no more than a name", "cannot be read"),
        (b"\xff\xff\xff\xff is no more than a sign", "cannot be read"),
    ],
)
def test_what_is_no_dataset_is_refused_with_its_place(tmp_path: Path, text: bytes, problem: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(text)
    with pytest.raises(UsageError) as error:
        list(read_samples(path))
    assert problem in error.value.what
    assert error.value.where == str(path)


ON_THE_HUB = ["plain_text/train-00000-of-00002.parquet", "plain_text/train-00001-of-00002.parquet"]


@pytest.mark.parametrize(
    ("training", "validation", "others"),
    [
        (ON_THE_HUB, "plain_text/validation-00000-of-00001.parquet", ["README.md", ".cache/train.json"]),
        (["train-v1.1.json"], "dev-v1.1.json", ["restraint.json"]),  # as SQuAD is published
    ],
)
def test_splits_are_told_by_names(tmp_path: Path, training: list[str], validation: str, others: list[str]) -> None:
    for name in [*training, validation, *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {name: [str(path.relative_to(tmp_path)) for path in paths] for name, paths in split_files(tmp_path).items()}
    assert found == {"training": training, "validation": [validation]}


def test_of_two_versions_none_is_guessed(tmp_path: Path) -> None:
    for name in ("train-v1.1.json", "train-v2.0.json"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="several files of training samples") as error:
        split_files(tmp_path)
    assert error.value.choices == ("train-v1.1.json", "train-v2.0.json")


def test_a_folder_without_training_samples_and_a_source_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").touch()
    with pytest.raises(UsageError, match="no file with training samples"):
        split_files(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        split_files(tmp_path / "absent")
