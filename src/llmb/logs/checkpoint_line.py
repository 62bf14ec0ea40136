# SPDX-License-Identifier: Apache-2.0
"""Writes the lines that a run logs after it saved or loaded a checkpoint."""

from typing import NamedTuple

SAVE_HEAD = b"Global Checkpoint Save :"
LOAD_HEAD = b"Global Checkpoint Load :"


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
