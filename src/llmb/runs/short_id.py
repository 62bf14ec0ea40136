# SPDX-License-Identifier: Apache-2.0
"""Short ids of runs and logs. Pure."""

import hashlib

LETTERS = "klmnopqrstuvwxyz"
"""One for each hexadecimal digit: an id is never taken for the number of a job, a date or a commit."""
LENGTH = 8


def short_id(text: str) -> str:
    """The id of the run with this ``run_id``, or of what else has a name."""
    digits = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:LENGTH]
    return "".join(LETTERS[int(digit, 16)] for digit in digits)


def may_be_short_id(text: str) -> bool:
    """True for an id, and for the beginning of one."""
    return 0 < len(text) <= LENGTH and set(text) <= set(LETTERS)
