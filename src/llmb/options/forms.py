# SPDX-License-Identifier: Apache-2.0
"""Ways to write an option's value as text. Pure."""

import re
from collections.abc import Callable
from typing import NamedTuple

from llmb.options.ranges import parse_ranges


class Form(NamedTuple):
    """``is_written`` is false of text that is written otherwise, or raises ValueError."""

    is_written: Callable[[str], object]
    valid: str
    """What the text has to be, in words that follow "it must be"."""
    any_case: bool = False
    """The reference suite's scripts take capitals for small letters."""


def pattern(expression: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(expression, text, re.ASCII | re.IGNORECASE)


TEXT = Form(str.isprintable, "text on one line")
WORD = Form(pattern(r"[\w.+-]+"), "a name", any_case=True)
RANKS = Form(parse_ranges, "ranks such as 0 or 0,4-7")
