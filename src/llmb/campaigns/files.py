# SPDX-License-Identifier: Apache-2.0
"""Reads a campaign file, YAML or text."""

from dataclasses import dataclass
from pathlib import Path

from llmb.campaigns.entry import Entry
from llmb.campaigns.keys import Keys
from llmb.campaigns.text_file import SplitModel, TextReader
from llmb.campaigns.yaml_file import YamlReader
from llmb.errors import UsageError

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The entries of a file, and its problems with file and line."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_campaign_file(path: Path, keys: Keys, split_model: SplitModel) -> FileEntries:
    """Raises UsageError if the file cannot be read or has no entries."""
    reader: YamlReader | TextReader
    try:
        if path.suffix.lower() in YAML_SUFFIXES:
            reader = YamlReader(path, keys, split_model)
            reader.read()
        else:
            reader = TextReader(str(path), keys, split_model)
            reader.read(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise UsageError("this is not a text file", where=str(path)) from error
    if not reader.entries and not reader.problems:
        do = "see docs/how-to/run-many-recipes.md for the format of files"
        raise UsageError("the file names no job", where=str(path), do=do)
    return FileEntries(tuple(reader.entries), tuple(reader.problems))
