# SPDX-License-Identifier: Apache-2.0
"""Messages beside the result, and its first line."""

import sys
from collections.abc import Sequence

from llmb.catalogue.unspecified import Unspecified, unspecified_text
from llmb.report.output import print_line
from llmb.shown_text import printable_lines


def print_unspecified(choices: Sequence[Unspecified]) -> None:
    """The first line of a result: what the request left open."""
    if choices:
        print_line(unspecified_text(choices))


def can_ask() -> bool:
    """Whether a question is seen and can be answered; with --quiet it is not seen."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def say(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(printable_lines(f"llmb: {text}\n"))
