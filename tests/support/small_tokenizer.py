"""A folder with a tokenizer of whole words, and SQuAD-shaped rows that it knows."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [
    "Context",
    ":",
    "Question",
    "Answer",
    "?",
    ".",
    "a",
    "hat",
    "is",
    "has",
    "red",
    "blue",
    "of",
    "what",
    "color",
    "Anna",
    "Boris",
]


def save_tokenizer(folder: Path, settings: dict[str, Any] | None = None, words: list[str] = WORDS) -> Path:
    """Tokens are words and punctuation; 0 is unknown, 1 begins and 2 ends a sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is None:
        settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    """Of different lengths, with the answers in turn."""
    return [
        {
            "id": str(number),
            "title": "hats",
            "context": "Anna has a hat . " * (1 + number % 5) + f"number {number}",
            "question": "what color is a hat ?",
            "answers": {"text": [("red", "blue")[number % 2], "a hat"], "answer_start": [0, 0]},
        }
        for number in range(count)
    ]


def write_lines(path: Path, values: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
