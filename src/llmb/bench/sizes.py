# SPDX-License-Identifier: Apache-2.0
"""Sizes of data in words. Pure."""

import re

from llmb.errors import UsageError

UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Bytes of a size such as 5GB, in powers of ten, or 5GiB, in powers of two. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match and (match[2] or not match[3]):
        size = round(float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].upper()])
    if size < 1:
        raise UsageError(f"'{text}' is not a size", do="give a number and a unit, such as 512B, 64MiB or 1GB")
    return size
