# SPDX-License-Identifier: Apache-2.0
"""Words of shell commands: text is quoted, whatever it holds; only what llmb itself wrote is not. Pure."""

import shlex
from collections.abc import Iterable

from llmb.jobspec.spec import Word

WIDTH = 110


class Shell(str):
    """An expression for the shell to expand. Made from constants alone, never from what a user gave."""

    __slots__ = ()


ShellWord = str | Shell


def command_line(words: Iterable[ShellWord]) -> str:
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def command_lines(words: Iterable[ShellWord]) -> str:
    """A command of words, broken into lines for reading."""
    lines: list[str] = []
    for part in (word if isinstance(word, Shell) else shlex.quote(word) for word in words):
        if lines and len(lines[-1]) + len(part) < WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n    ".join(lines)


def shell_word(word: Word, interpreter: ShellWord) -> ShellWord:
    """Placeholders as expressions of the batch script."""
    if isinstance(word, str):
        return word
    if word.slot == "python":
        return interpreter if not word.after else Shell(command_line([interpreter]) + shlex.quote(word.after))
    return Shell(word.before + '"$llmb_folder"' + word.after)
