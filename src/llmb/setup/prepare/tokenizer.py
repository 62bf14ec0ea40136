# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer: its files, its special tokens, and the encoding of samples."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.base.errors import UsageError
from llmb.runs.checkpoints.prepared_data import TokenizerRecord
from llmb.setup.prepare.training_samples import DatasetSample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name special tokens by their text."""
CONFIG = "config.json"
"""The model's configuration file, which has special tokens by number."""
FILES = (TOKENIZER, *NAMING, CONFIG, "generation_config.json")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with its record; ``space`` precedes answers, and is empty if the tokenizer marks starts of words."""

    tokenizer: "Tokenizer"
    record: TokenizerRecord
    space: str

    def encode(self, samples: Sequence[DatasetSample]) -> Iterator[tuple[list[int], int]]:
        """Yield each sample's tokens, without BOS but with EOS, as NeMo encodes them, and the index of its answer."""
        prompts = [sample.input.strip(" ") for sample in samples]
        answers = [self.space + sample.output.strip(" ") for sample in samples]
        encoded = self.tokenizer.encode_batch_fast([*prompts, *answers], add_special_tokens=False)
        for prompt, answer in zip(encoded[: len(samples)], encoded[len(samples) :], strict=True):
            yield [*prompt.ids, *answer.ids, self.record.eos_id], len(prompt.ids)


def tokenizer_file(path: Path) -> Path:
    """Return the path of ``tokenizer.json`` at ``path``, a file or a folder. Raise UsageError if there is none."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        do = f"pass a file {TOKENIZER}, or a folder that contains it"
        raise UsageError(f"there is no {TOKENIZER}", where=str(path), do=do)
    return file


def checksum(file: Path) -> str:
    """Return the SHA-256 of a ``tokenizer.json``. Raise UsageError if it cannot be read."""
    return hashlib.sha256(_content(file)).hexdigest()


def load_tokenizer(file: Path, name: str, vocab_size: int) -> LoadedTokenizer:
    """Load the tokenizer of model ``name``.

    Raise UsageError for an invalid file, too many tokens, or no end-of-sequence token.
    """
    import numpy  # noqa: F401 (tokenizers needs it, and says so in a panic)
    from tokenizers import Tokenizer

    content = _content(file)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise UsageError(f"this tokenizer cannot be read: {error}", where=str(file)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > vocab_size:
        what = f"the tokenizer has {size} tokens, but the model has only {vocab_size} embeddings"
        raise UsageError(what, where=str(file), do="pass the tokenizer of the model with --tokenizer")
    eos = _special_token(tokenizer, file, "eos", size)
    if eos is None:
        what = f"the end-of-sequence token is not specified: no 'eos_token' in {' or '.join(NAMING)}"
        do = f"copy the model's tokenizer_config.json to the folder of {TOKENIZER}"
        raise UsageError(f"{what}, and no single 'eos_token_id' in {CONFIG}", where=str(file.parent), do=do)
    record = TokenizerRecord(
        name=name,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=size,
        bos_id=_special_token(tokenizer, file, "bos", size),
        eos_id=eos,
    )
    return LoadedTokenizer(tokenizer, record, " " if _marks_spaces(tokenizer) else "")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror}", where=str(file)) from error


def _marks_spaces(tokenizer: "Tokenizer") -> bool:
    """Return True if a space before a word changes its tokens; the test is NeMo's own."""
    both, x, y = (tokenizer.encode(text, add_special_tokens=False).tokens for text in ("x y", "x", "y"))
    return bool(both != x + y)


def _special_token(tokenizer: "Tokenizer", file: Path, which: str, size: int) -> int | None:
    for name in NAMING:
        token = _settings(file.with_name(name)).get(f"{which}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            number: int | None = tokenizer.token_to_id(text)
            if number is None:
                what = f"'{which}_token' is {text}, which the tokenizer does not have"
                raise UsageError(what, where=str(file.with_name(name)))
            return number
    config = _settings(file.with_name(CONFIG))
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    number = config.get(f"{which}_token_id", inner.get(f"{which}_token_id"))
    number = number[0] if isinstance(number, list) and len(number) == 1 else number
    if isinstance(number, int) and not 0 <= number < size:
        what = f"'{which}_token_id' is {number}, but the tokenizer has only {size} tokens"
        raise UsageError(what, where=str(file.with_name(CONFIG)))
    return number if isinstance(number, int) else None


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(_content(path))
    except ValueError as error:
        raise UsageError(f"the file is not valid JSON: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise UsageError("the file is not a JSON object", where=str(path))
    return values
