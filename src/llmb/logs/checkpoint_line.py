# SPDX-License-Identifier: Apache-2.0
"""Writes and finds the lines that a run logs after it saved or loaded a checkpoint."""

import re
from collections.abc import Iterator
from typing import NamedTuple

SAVE_HEAD = b"Global Checkpoint Save :"
LOAD_HEAD = b"Global Checkpoint Load :"

_NUMBER = rb"(\d{1,12}(?:\.\d{1,9})?)"
_SAVE = re.compile(
    rb"%s Rank: (\d{1,9}) : Iteration: (\d{1,9}) : Start time: %ss : Save duration: %ss\b"
    % (SAVE_HEAD, _NUMBER, _NUMBER)
)
_LOAD = re.compile(
    rb"%s Rank : (\d{1,9}) : Start time : %ss : Time spent in load_checkpoint: %ss\b" % (LOAD_HEAD, _NUMBER, _NUMBER)
)


class SaveLine(NamedTuple):
    """``iteration`` is the number of steps done before the save; ``start_s`` is in seconds since 1970."""

    rank: int
    iteration: int
    start_s: float
    duration_s: float


class LoadLine(NamedTuple):
    """``start_s`` is in seconds since 1970."""

    rank: int
    start_s: float
    duration_s: float


def format_save_line(line: SaveLine) -> str:
    """Without line end; times to the millisecond."""
    return (
        f"{SAVE_HEAD.decode()} Rank: {line.rank} : Iteration: {line.iteration}"
        f" : Start time: {line.start_s:.3f}s : Save duration: {line.duration_s:.3f}s"
    )


def format_load_line(line: LoadLine) -> str:
    """Without line end; times to the millisecond."""
    return (
        f"{LOAD_HEAD.decode()} Rank : {line.rank} : Start time : {line.start_s:.3f}s"
        f" : Time spent in load_checkpoint: {line.duration_s:.3f}s"
    )


def find_saves(text: bytes) -> Iterator[SaveLine]:
    """All saves that ``text`` logs, with any prefix on their lines."""
    for rank, iteration, start, duration in (match.groups() for match in _SAVE.finditer(text)):
        yield SaveLine(int(rank), int(iteration), float(start), float(duration))


def find_loads(text: bytes) -> Iterator[LoadLine]:
    """All loads that ``text`` logs, with any prefix on their lines."""
    for rank, start, duration in (match.groups() for match in _LOAD.finditer(text)):
        yield LoadLine(int(rank), float(start), float(duration))
