# SPDX-License-Identifier: Apache-2.0
"""Reads a campaign file, YAML or text."""

from dataclasses import dataclass
from pathlib import Path

from llmb.campaigns.entry import Entry
from llmb.campaigns.keys import Keys
from llmb.campaigns.text_file import SplitModel, TextReader
from llmb.campaigns.yaml_file import YamlReader
from llmb.doc_pages import see
from llmb.errors import UsageError
from llmb.input_files import read_text_file
from llmb.trust import check_owner

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The entries of a file, and its problems with file and line."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_campaign_file(path: Path, keys: Keys, split_model: SplitModel) -> FileEntries:
    """Raises UsageError if the file cannot be read, has no entries, or is another user's."""
    check_owner(path)
    text = read_text_file(path)
    reader: YamlReader | TextReader
    if path.suffix.lower() in YAML_SUFFIXES:
        reader = YamlReader(path, keys, split_model)
        reader.read()
    else:
        reader = TextReader(str(path), keys, split_model)
        try:
            reader.read(text.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError("this is not a text file", where=str(path)) from error
    if not reader.entries and not reader.problems:
        do = see("run-many-recipes", "for the format of files")
        raise UsageError("the file names no job", where=str(path), do=do)
    return FileEntries(tuple(reader.entries), tuple(reader.problems))
