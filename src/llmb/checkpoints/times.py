# SPDX-License-Identifier: Apache-2.0
"""``checkpoints.jsonl``: what each save and load of a run took, one JSON object per line."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from llmb.catalogue.records import Record
from llmb.checkpoints.checksums import Verification


class Verified(Record):
    """Whether the files of a loaded checkpoint were verified, and the seconds that it took; None for a save."""

    verification: Verification | None = None
    verify_s: float | None = None


class CheckpointTime(Verified):
    """Times are in seconds; ``start_s`` since 1970. ``step`` counts the steps done before a save; None for a load.

    ``verify_s`` is not part of ``duration_s``.
    """

    kind: Literal["save", "load"]
    step: int | None = None
    start_s: float
    duration_s: float


def checkpoint_time(
    kind: Literal["save", "load"], start_s: float, duration_s: float, step: int | None
) -> CheckpointTime:
    """To the millisecond, as the log has it."""
    return CheckpointTime(kind=kind, step=step, start_s=round(start_s, 3), duration_s=round(duration_s, 3))


def add_checkpoint_time(path: Path, time: CheckpointTime) -> None:
    """Raises OSError where the line cannot be written."""
    with path.open("a") as stream:
        stream.write(time.model_dump_json() + "\n")


def read_checkpoint_times(path: Path) -> list[CheckpointTime]:
    """All complete lines, without one that was truncated by a crash. Raises OSError if there is no such file."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(CheckpointTime.model_validate_json(line))
        except ValidationError:
            break
    return found
