# SPDX-License-Identifier: Apache-2.0
"""Questions on a terminal: the choices by number or name, asked until the answer is valid."""

import os
import shutil
import sys
from collections.abc import Callable
from itertools import chain
from textwrap import fill

from llmb.errors import UserInterrupt
from llmb.install.questions import Choice, Question
from llmb.report.output import BOLD, PLAIN
from llmb.report.table import Column, Table, table_lines


def ask(
    question: Question, choices: tuple[Choice, ...], assumed: str | None, problem: Callable[[str], str | None]
) -> str:
    """Raises UserInterrupt if there are no more answers."""
    width = shutil.get_terminal_size().columns
    *before, text = question.text.splitlines()
    for line in before:
        _write(f"  {line}\n")
    _write(f"\n{_bold(text)}\n")
    for row in _rows(choices, width):
        _write(f"{row}\n")
    while True:
        value = _chosen(ask_line(_prompt(question, choices, assumed)) or assumed or "", choices, question)
        wrong = problem(value) if value else "an answer is needed"
        if wrong is None:
            return value
        indent = "  "
        _write(fill(wrong, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) + "\n")


def ask_line(prompt: str) -> str:
    """A line that is typed. Raises UserInterrupt at the end of the input."""
    _write(prompt)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt as signal:
        _write("\n")
        raise UserInterrupt("interrupted; nothing was installed") from signal
    if not line:
        raise UserInterrupt("the input ended; nothing was installed")
    return line.strip()


def _rows(choices: tuple[Choice, ...], width: int) -> list[str]:
    if not choices:
        return []
    table = Table("", [Column("", right=True), Column("", wrap=False), Column("")])
    for number, choice in enumerate(choices, start=1):
        table.add_row(f" {number}", choice.value, choice.meaning)
    return [line.text for line in table_lines(table, width) if line.text.strip()]


def _prompt(question: Question, choices: tuple[Choice, ...], assumed: str | None) -> str:
    kinds = "numbers or names" if question.several else "number or name"
    what = kinds if choices and question.closed else f"{kinds}, or another" if choices else "answer"
    return f"{what} [{assumed}]: " if assumed else f"{what}: "


def _chosen(text: str, choices: tuple[Choice, ...], question: Question) -> str:
    """Names in place of numbers, but where a number is a name."""
    names = [choice.value for choice in choices]
    items = [text] if not question.several else [item.strip() for item in text.split(",")]
    return ",".join(chain.from_iterable(_named(item, names) for item in items))


def _named(item: str, names: list[str]) -> list[str]:
    if item not in names and item.isdecimal() and 1 <= int(item) <= len(names):
        return [names[int(item) - 1]]
    return [item]


def _bold(text: str) -> str:
    plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"{BOLD}{text}{PLAIN}"


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
