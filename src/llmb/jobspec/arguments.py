# SPDX-License-Identifier: Apache-2.0
"""Words of a command as values: text, or a placeholder that the scheduler fills in."""

from typing import Literal

from llmb.catalogue.records import Record


class Placeholder(Record):
    """What only whoever starts the job knows."""

    slot: Literal["run_folder", "python"]
    """The run folder, or the interpreter that has llmb and torch where the process runs."""
    before: str = ""
    """Text before it without a space, with no character that a shell interprets."""
    after: str = ""
    """Text that follows, likewise."""


Word = str | Placeholder
RUN_FOLDER = Placeholder(slot="run_folder")
PYTHON = Placeholder(slot="python")


def filled(word: Word, run_folder: str, python: str) -> str:
    """The word as text."""
    if isinstance(word, str):
        return word
    return word.before + {"run_folder": run_folder, "python": python}[word.slot] + word.after
