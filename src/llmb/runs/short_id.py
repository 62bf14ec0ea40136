# SPDX-License-Identifier: Apache-2.0
"""Short ids of runs. Pure."""

import hashlib
from pathlib import Path

LETTERS = "klmnopqrstuvwxyz"
"""One for each hexadecimal digit: an id is never taken for the number of a job, a date or a commit."""
LENGTH = 8


def short_id(folder: Path) -> str:
    """The id of the run in ``folder``: by the name that its install root has it under, so it stays if that is moved."""
    return id_of_name(folder.absolute().parent.name)


def id_of_name(name: str) -> str:
    digits = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:LENGTH]
    return "".join(LETTERS[int(digit, 16)] for digit in digits)


def may_be_short_id(text: str) -> bool:
    """True for an id, and for the beginning of one."""
    return 0 < len(text) <= LENGTH and set(text) <= set(LETTERS)
