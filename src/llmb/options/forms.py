# SPDX-License-Identifier: Apache-2.0
"""Text formats of options' values. Pure."""

import re
from collections.abc import Callable
from typing import NamedTuple

from llmb.options.ranges import parse_ranges


class Form(NamedTuple):
    """``is_written`` returns False, or raises ValueError, for text in another format."""

    is_written: Callable[[str], object]
    valid: str
    """The valid texts, as words after "it must be"."""
    any_case: bool = False
    """Case is ignored, as in the reference suite's scripts."""


def pattern(expression: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(expression, text, re.ASCII | re.IGNORECASE)


TEXT = Form(str.isprintable, "text on one line")
WORD = Form(pattern(r"[\w.+-]+"), "a name", any_case=True)
LABEL = Form(
    pattern(r"(?!(\d+|latest|\d{4}-\d\d-\d\d.*)$)(?!.*\.\.)[a-z0-9][\w.+-]{0,63}"),
    "up to 64 letters, digits, '.', '_', '+' and '-', beginning with a letter or a digit, without '..', and not a"
    " number, a date or 'latest'",
)
"""What could be an id or a time would be taken for it where runs are selected."""
RANKS = Form(parse_ranges, "ranks such as 0 or 0,4-7")
