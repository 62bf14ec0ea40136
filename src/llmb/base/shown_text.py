# SPDX-License-Identifier: Apache-2.0
"""Formats values and untrusted text for display. Control characters are escaped, because terminals obey them. Pure."""

import re
from collections.abc import Iterable

# C0 and C1 controls; marks that change the direction of the following text; surrogates, which replace bytes that are
# not characters, and cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20](?s:.)")
"""Matches text that spreadsheets may treat as a formula. A sign, also full-width, without further text is harmless."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)")
_CONTROL_IN_LINES = re.compile(_CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))


def printable(text: object) -> str:
    r"""Return text on one line, with each control character as its escape, such as ``\x1b``."""
    return _CONTROL.sub(_escape, str(text))


def printable_lines(text: str) -> str:
    """Return text with control characters escaped, except line feeds and tabs."""
    return _CONTROL_IN_LINES.sub(_escape, text)


def csv_value(value: object) -> object:
    """Return a value for CSV: control characters are escaped, and an apostrophe precedes text that spreadsheets treat
    as formulas."""
    if not isinstance(value, str):
        return value
    text = printable_lines(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def value_text(value: str | float | bool | None) -> str:
    """Format a setting for display: ``none`` for None, ``yes`` or ``no`` for a boolean, else its text."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
    return str(value)


def counted(number: int, noun: str) -> str:
    """Return a string such as ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[str], most: int = 4) -> str:
    """Return the first ``most`` items on one line, and the number of the others."""
    texts = list(items)
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
