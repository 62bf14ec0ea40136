# SPDX-License-Identifier: Apache-2.0
"""Finds the lines that a run logs after it saved or loaded a checkpoint."""

import re
from collections.abc import Iterator

from llmb.readers.logs.step_line import LOAD_HEAD, SAVE_HEAD, LoadLine, SaveLine

_NUMBER = rb"(\d{1,12}(?:\.\d{1,9})?)"
_SAVE = re.compile(
    rb"%s Rank: (\d{1,9}) : Iteration: (\d{1,9}) : Start time: %ss : Save duration: %ss\b"
    % (SAVE_HEAD, _NUMBER, _NUMBER)
)
_LOAD = re.compile(
    rb"%s Rank : (\d{1,9}) : Start time : %ss : Time spent in load_checkpoint: %ss\b" % (LOAD_HEAD, _NUMBER, _NUMBER)
)


def find_saves(text: bytes) -> Iterator[SaveLine]:
    """All saves that ``text`` logs, with any prefix on their lines."""
    for rank, iteration, start, duration in (match.groups() for match in _SAVE.finditer(text)):
        yield SaveLine(int(rank), int(iteration), float(start), float(duration))


def find_loads(text: bytes) -> Iterator[LoadLine]:
    """All loads that ``text`` logs, with any prefix on their lines."""
    for rank, start, duration in (match.groups() for match in _LOAD.finditer(text)):
        yield LoadLine(int(rank), float(start), float(duration))
