# SPDX-License-Identifier: Apache-2.0
"""Parses points in time that users specify. Pure."""

import re
from datetime import datetime

from llmb.errors import UsageError

_AGO = re.compile(r"(\d+)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_since(text: str, now_s: float) -> float:
    """Seconds since 1970 of a date, a time or an age; in local time without a zone. Raises UsageError."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now_s - int(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        choices = ("30m", "12h", "7d", "2w", "2026-11-21", "2026-11-21T14:00")
        raise UsageError(f"'{text}' is no point in time", choices=choices) from error
