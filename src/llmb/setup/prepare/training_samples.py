# SPDX-License-Identifier: Apache-2.0
"""Samples of a dataset (prompts with answers, as in NeMo's SQuAD), and the local files that contain them."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmb.base.errors import UsageError, check_installed
from llmb.base.input_files import list_folder, open_file
from llmb.runs.checkpoints.prepared_data import Split

if TYPE_CHECKING:
    import pyarrow


TEMPLATE = "squad-1"
"""Name and version of the prompt template; a new one if ``from_question`` or ``LoadedTokenizer.encode`` changes."""
QUESTION_KEYS = ("context", "question", "answers")
TEMPLATED_KEYS = ("input", "output")


class DatasetSample(NamedTuple):
    """A sample with keys and text as in NeMo's JSONL files."""

    input: str
    output: str
    original_answers: tuple[str, ...] = ()
    """All correct answers, if the source has them."""


class Malformed(ValueError):
    """A row that is not a sample; the message describes the problem."""


def from_question(context: str, question: str, answers: tuple[str, ...]) -> DatasetSample | None:
    """Format a question about a text with the template; return None if the question has no answer."""
    if not answers or not answers[0].strip():
        return None
    return DatasetSample(f"Context: {context} Question: {question} Answer:", answers[0], answers)


def from_row(row: Mapping[str, Any]) -> DatasetSample | None:
    """Convert a row to a sample; return None if it has no answer. Raise Malformed for other rows."""
    if "input" in row:
        _require(row, TEMPLATED_KEYS)
        answers = row.get("original_answers", ())
        if not isinstance(answers, list | tuple) or not all(map(_is_text, answers)):
            raise Malformed("'original_answers' is not a list of texts")
        return DatasetSample(row["input"], row["output"], tuple(answers)) if row["output"].strip() else None
    _require(row, QUESTION_KEYS[:2])
    value = row.get("answers")
    # From the hub's ``{"text": [...]}`` or the original's ``[{"text": ...}]``.
    if isinstance(value, Mapping):
        texts = value.get("text")
    elif isinstance(value, list) and all(isinstance(answer, Mapping) for answer in value):
        texts = [answer.get("text") for answer in value]
    else:
        texts = None
    if not isinstance(texts, list) or not all(map(_is_text, texts)):
        raise Malformed('\'answers\' is neither {"text": [...]} nor a list of {"text": ...}')
    return from_question(row["context"], row["question"], tuple(texts))


def _require(row: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in row:
            expected = " or ".join(", ".join(keys) for keys in (QUESTION_KEYS, TEMPLATED_KEYS))
            raise Malformed(f"'{name}' is missing; the required keys are {expected}")
        if not _is_text(row[name]):
            raise Malformed(f"'{name}' is not a text")


def _is_text(value: object) -> bool:
    """Return True if ``value`` is encodable text: half of a surrogate pair is not, although JSON can express it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_squad_document(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows of a file in SQuAD's own format, each with its position; raise Malformed for other files."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for a, article in enumerate(_list(document, "data", "")):
        for p, paragraph in enumerate(_list(article, "paragraphs", f"data[{a}]")):
            place = f"data[{a}].paragraphs[{p}]"
            for q, question in enumerate(_list(paragraph, "qas", place)):
                if not isinstance(question, Mapping):
                    raise Malformed(f"{place}.qas[{q}] is not an object")
                rows.append((f"{place}.qas[{q}]", {"context": paragraph.get("context"), **question}))
    return rows


def _list(parent: Any, key: str, place: str) -> list[Any]:  # noqa: ANN401 (any JSON value)
    name = f"{place}.{key}" if place else key
    if not isinstance(parent, Mapping) or not isinstance(parent.get(key), list):
        raise Malformed(f"'{name}' is not a list")
    values: list[Any] = parent[key]
    return values


PARQUET = b"PAR1"
ARROW = b"\xff\xff\xff\xff"
"""First bytes of Arrow's stream format, which the library ``datasets`` uses in its cache and in save_to_disk."""
SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
NOTES = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files of the library ``datasets`` that contain no samples."""
NAMES: dict[Split, str] = {"training": r"train(ing)?", "validation": r"(validation|valid|val|dev)", "test": r"test"}
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
FORMATS = (
    "SQuAD's own JSON (data, paragraphs, qas)",
    "JSON lines, parquet or arrow with context, question and answers",
    "JSON lines with input and output",
)
Files = dict[Split, list[Path]]
Row = tuple[str, Mapping[str, Any]]


def split_files(source: Path) -> Files:
    """Return each split's files in a folder, or one file for training.

    Raise UsageError if unreadable, ambiguous or without training.
    """
    if not source.is_dir():
        with open_file(source, do="pass a file or a folder with --source"):
            return {"training": [source]}
    files = sorted(path for path in _below(source) if path.suffix in SUFFIXES and path.name not in NOTES)
    parts: Files = {split: group for split in NAMES if (group := [path for path in files if _holds(path, split)])}
    if "training" not in parts:
        do = "pass the file itself with --source, or name the files like train.jsonl, validation.jsonl and test.jsonl"
        raise UsageError("there is no file with training samples", where=str(source), choices=FORMATS, do=do)
    for split, paths in parts.items():
        if len({SHARD.sub("", path.stem) + path.suffix + str(path.parent) for path in paths}) > 1:
            names = [str(path.relative_to(source)) for path in paths]
            raise UsageError(
                f"there are several files of {split} samples",
                where=str(source),
                choices=names,
                do="move all but one of these files elsewhere"
                + (", or pass one file with --source" if split == "training" else ""),
            )
    return parts


def _below(folder: Path) -> Iterator[Path]:
    for path in list_folder(folder):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.is_file():
            yield path


def _holds(path: Path, split: Split) -> bool:
    match = re.search(rf"(^|[-_.]){NAMES[split]}([-_.]|$)", path.stem.lower())
    return match is not None or re.fullmatch(NAMES[split], path.parent.name.lower()) is not None


def read_samples(path: Path) -> Iterator[DatasetSample | None]:
    """Yield every sample of a file; None for one without an answer.

    Raise UsageError for invalid samples, EnvironmentProblem without pyarrow.
    """
    for place, row in _rows(path):
        try:
            yield from_row(row)
        except Malformed as error:
            raise _not_a_sample(path, f"{place}: {error}") from None


def _rows(path: Path) -> Iterator[Row]:
    match _format_of(path):
        case "parquet" | "arrow" as columns:
            check_installed(f"reading {columns} files", "pyarrow")
            return _numbered(path, _parquet_batches(path) if columns == "parquet" else _arrow_batches(path))
        case "squad":
            try:
                return iter(from_squad_document(_whole(path)))
            except Malformed as error:
                raise _not_a_sample(path, str(error)) from None
        case "lines":
            return _lines(path)


def _format_of(path: Path) -> Literal["parquet", "arrow", "squad", "lines"]:
    """Recognize the format by content alone. SQuAD's own files have a single line, or begin with a lone brace."""
    with open_file(path) as stream:
        match stream.read(len(PARQUET)):
            case magic if magic == PARQUET:
                return "parquet"
            case magic if magic == ARROW:
                return "arrow"
    first = next(_texts(path), None)
    if first is None:
        raise UsageError("the file is empty", where=str(path), choices=FORMATS)
    try:
        start = json.loads(first[1])
    except (ValueError, RecursionError):
        return "squad" if first[1].strip() == "{" else "lines"
    return "squad" if isinstance(start, dict) and "data" in start else "lines"


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        open_file(path).close()  # rejects anything but a regular file
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise UsageError(f"line {number} is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _lines(path: Path) -> Iterator[Row]:
    for number, text in _texts(path):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _not_a_sample(path, f"line {number}: invalid JSON: {error}") from error
        if not isinstance(row, dict):
            raise _not_a_sample(path, f"line {number} is not a JSON object")
        yield f"line {number}", row


def _whole(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads("".join(text for _, text in _texts(path)))
    except (ValueError, RecursionError) as error:
        raise _not_a_sample(path, f"invalid JSON: {error}") from error
    if not isinstance(document, dict):
        raise _not_a_sample(path, "the file is not a JSON object")
    return document


def _numbered(path: Path, batches: "Iterator[pyarrow.RecordBatch]") -> Iterator[Row]:
    import pyarrow

    try:
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"the file cannot be read: {error}", where=str(path)) from error


def _parquet_batches(path: Path) -> "Iterator[pyarrow.RecordBatch]":
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=1000)


def _arrow_batches(path: Path) -> "Iterator[pyarrow.RecordBatch]":
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as batches:
        yield from batches


def _not_a_sample(path: Path, what: str) -> UsageError:
    return UsageError(f"the file is not a dataset like SQuAD: {what}", where=str(path), choices=FORMATS)
