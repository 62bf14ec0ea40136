# SPDX-License-Identifier: Apache-2.0
"""``checkpoints.jsonl``: what each save and load of a run took, one JSON object per line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from llmb.catalogue.records import Record
from llmb.checkpoints.checksums import Verification
from llmb.input_files import MOST_JSON_BYTES, read_regular


class Verified(Record):
    """Whether the files of a loaded checkpoint were verified, and the seconds that it took; None for a save."""

    verification: Verification | None = None
    verify_s: float | None = None


class RankTransfer(Record):
    """What one rank wrote or read itself, and the seconds that it took: of a write until it is on the disk."""

    rank: int
    size_bytes: int
    duration_s: float
    blocked_s: float | None = None
    """How long its training waited for a save that then went on beside it; None if it waited for all of it."""


class CheckpointTime(Verified):
    """Times are in seconds; ``start_s`` since 1970. ``step`` counts the steps done before a save; None for a load.

    ``duration_s`` is that of all ranks together, with what they settle between them and, of a save, the record that
    makes it complete; ``verify_s`` is not part of it.
    """

    kind: Literal["save", "load"]
    step: int | None = None
    start_s: float
    duration_s: float
    ranks: tuple[RankTransfer, ...] = ()
    """In their order; empty in files of earlier versions."""

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.ranks)

    @property
    def gb_per_s(self) -> float | None:
        """The bytes of all ranks by the time of the whole; None if they are not known."""
        return self.size_bytes / 1e9 / self.duration_s if self.ranks and self.duration_s else None

    @property
    def slowest(self) -> RankTransfer | None:
        return max(self.ranks, key=lambda each: each.duration_s, default=None)


def checkpoint_time(
    kind: Literal["save", "load"],
    start_s: float,
    duration_s: float,
    step: int | None,
    ranks: Sequence[RankTransfer],
) -> CheckpointTime:
    """Times of the whole are to the millisecond, as the log has it."""
    return CheckpointTime(
        kind=kind, step=step, start_s=round(start_s, 3), duration_s=round(duration_s, 3), ranks=tuple(ranks)
    )


def add_checkpoint_time(path: Path, time: CheckpointTime) -> None:
    """Raises OSError where the line cannot be written."""
    with path.open("a") as stream:
        stream.write(time.model_dump_json() + "\n")


def read_checkpoint_times(path: Path) -> list[CheckpointTime]:
    """All complete lines, without a last one that was truncated by a crash.

    Raises OSError if the file cannot be read, ValueError if any other line is not complete.
    """
    found = []
    lines = read_regular(path, MOST_JSON_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(CheckpointTime.model_validate_json(line))
        except ValidationError as error:
            if number < len(lines):
                raise ValueError(f"line {number} is not a complete save or load") from error
    return found
