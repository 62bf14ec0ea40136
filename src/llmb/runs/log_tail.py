# SPDX-License-Identifier: Apache-2.0
"""The end of a run's log."""

from pathlib import Path

from llmb.runs.failure import latest_attempt

TAIL_BYTES = 64 * 1024


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The last ``size`` bytes of a log, of the latest attempt alone; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - size))
        return latest_attempt(stream.read().decode(errors="replace"))
