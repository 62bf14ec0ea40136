# SPDX-License-Identifier: Apache-2.0
"""A sample of a dataset: a prompt and its answer, as NeMo's SQuAD has them. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

TEMPLATE = "squad-1"
"""Name and version of the prompt template; a change of ``from_question`` or of ``tokens`` needs another version."""
QUESTION_KEYS = ("context", "question", "answers")
TEMPLATED_KEYS = ("input", "output")


class DatasetSample(NamedTuple):
    """Keys and text as in the JSONL files of NeMo."""

    input: str
    output: str
    original_answers: tuple[str, ...] = ()
    """All answers that count as right; the first one is ``output``."""


class Malformed(ValueError):
    """A row that is not a sample; the message says what is wrong with it."""


def from_question(context: str, question: str, answers: tuple[str, ...]) -> DatasetSample | None:
    """A question about a text, in the template. None if it has no answer."""
    if not answers or not answers[0].strip():
        return None
    return DatasetSample(f"Context: {context} Question: {question} Answer:", answers[0], answers)


def from_row(row: Mapping[str, Any]) -> DatasetSample | None:
    """A row of the hub's dataset, or a line that is in the template already. None if it has no answer.

    Raises Malformed for anything else.
    """
    if "input" in row:
        _require(row, TEMPLATED_KEYS)
        answers = row.get("original_answers", ())
        if not isinstance(answers, list | tuple) or not all(map(_is_text, answers)):
            raise Malformed("'original_answers' is not a list of texts")
        return DatasetSample(row["input"], row["output"], tuple(answers)) if row["output"].strip() else None
    _require(row, QUESTION_KEYS[:2])
    return from_question(row["context"], row["question"], _answers(row.get("answers")))


def _require(row: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in row:
            expected = " or ".join(", ".join(keys) for keys in (QUESTION_KEYS, TEMPLATED_KEYS))
            raise Malformed(f"'{name}' is missing; expected are the keys {expected}")
        if not _is_text(row[name]):
            raise Malformed(f"'{name}' is not a text")


def _is_text(value: object) -> bool:
    """Half of a surrogate pair is not text: JSON can express it, and no tokenizer can encode it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _answers(value: Any) -> tuple[str, ...]:  # noqa: ANN401 (any JSON value)
    """From the hub's ``{"text": [...]}`` or the original's ``[{"text": ...}]``."""
    if isinstance(value, Mapping):
        texts = value.get("text")
    elif isinstance(value, list) and all(isinstance(answer, Mapping) for answer in value):
        texts = [answer.get("text") for answer in value]
    else:
        texts = None
    if not isinstance(texts, list) or not all(map(_is_text, texts)):
        raise Malformed('\'answers\' is neither {"text": [...]} nor a list of {"text": ...}')
    return tuple(texts)


def from_squad_document(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows of a file in SQuAD's own format, each with its place in the file. Raises Malformed."""
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
    found: list[Any] = parent[key]
    return found
