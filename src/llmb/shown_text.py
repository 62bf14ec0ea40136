# SPDX-License-Identifier: Apache-2.0
"""Values and text of others in words for people; text is safe to show. Pure.

A terminal obeys control characters, in a name, a record or a log as anywhere.
"""

import re
from collections.abc import Iterable

# C0 and C1 controls; marks that change the direction of what follows; surrogates, which stand for bytes that are no
# characters and cannot be written.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile(_CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))


def printable(text: object) -> str:
    r"""A name or a value in one line: each control character as its escape, such as ``\x1b``."""
    return _CONTROL.sub(_escape, str(text))


def printable_lines(text: str) -> str:
    """Several lines of text, whose line ends and tabs are kept."""
    return _CONTROL_IN_LINES.sub(_escape, text)


def value_text(value: str | float | bool | None) -> str:
    """A setting, for people."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
    return str(value)


def counted(number: int, noun: str) -> str:
    """Such as ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[str], most: int = 4) -> str:
    """The first ``most`` items in one line, and how many there are beside them."""
    found = list(items)
    more = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
