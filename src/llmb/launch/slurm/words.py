# SPDX-License-Identifier: Apache-2.0
"""Words of shell commands: text is quoted, whatever it holds; only what llmb itself wrote is not. Pure."""

import shlex
from collections.abc import Iterable


class Shell(str):
    """An expression for the shell to expand. Made from constants alone, never from what a user gave."""

    __slots__ = ()


Word = str | Shell


def command_line(words: Iterable[Word]) -> str:
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def command_lines(words: Iterable[Word], width: int = 110) -> str:
    """The same, broken into lines for reading."""
    lines: list[str] = []
    for part in (word if isinstance(word, Shell) else shlex.quote(word) for word in words):
        if lines and len(lines[-1]) + len(part) < width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n    ".join(lines)
