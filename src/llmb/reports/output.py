# SPDX-License-Identifier: Apache-2.0
"""Writes results to standard output."""

import json
import os
import re
import shutil
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from textwrap import fill
from typing import Any

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from llmb.base.errors import EnvironmentProblem
from llmb.base.shown_text import printable_lines
from llmb.reports.formats import PLAIN_BLOCKS
from llmb.reports.table import Table, plain_lines, terminal_lines

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def print_output(result: dict[str, Any] | str | Table | Iterable[Table]) -> None:
    """Print a document as JSON, a text, or tables separated by empty lines. Tables are fitted to the terminal's width,
    if the output is a terminal.
    """
    match result:
        case dict():
            print_json(result)
        case str():
            _write(result)
        case _:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            tables = [result] if isinstance(result, Table) else result
            texts = ("".join(f"{line}\n" for line in table_lines(table, width)) for table in tables)
            _write("\n".join(texts), is_safe=True)


def print_json(document: Any) -> None:  # noqa: ANN401 (any JSON value)
    """Print a value as indented JSON."""
    _write(json_text(document) + "\n")


def json_text(value: Any) -> str:  # noqa: ANN401 (any JSON value, or a record)
    """Format a value as indented JSON. Raise ValueError for a value that JSON cannot represent, such as NaN."""
    try:
        text = to_json(value, indent=2, ensure_ascii=True, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # also for text with half a surrogate pair, which JSON can express
        return json.dumps(to_jsonable_python(value), indent=2, allow_nan=False)
    if "NaN" in text or "Infinity" in text:  # which may also be part of a string
        json.dumps(to_jsonable_python(value), allow_nan=False)
    return text


def table_lines(table: Table, width: int | None) -> Iterable[str]:
    """Return the table's lines for a terminal of ``width`` columns; without a width, as wide as needed."""
    return plain_lines(table) if width is None else terminal_lines(table, width)


def bold(text: str) -> str:
    """Return the text in bold, or unchanged if NO_COLOR is set or the terminal is dumb."""
    return text if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else f"{BOLD}{text}{PLAIN}"


def print_line(text: str) -> None:
    """Print a line, wrapped between words on a terminal."""
    if sys.stdout.isatty():
        text = fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    _write(f"{text}\n")


def print_markdown(text: str) -> None:
    """Print a Markdown page. A link to a page also shows ``llmb docs NAME``; code is not wrapped, for copying."""
    from rich.console import Console  # few outputs are pages
    from rich.markdown import Markdown

    console = Console()
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\((?:[\w./-]*/)?([\w-]+)\.md(?:#[\w-]*)?\)", r"\1 (`llmb docs \2`)", text)
    parts = re.split(r"^```\w*\n(.*?)^```$\n?", text, flags=re.DOTALL | re.MULTILINE)
    with console.capture() as capture:
        for number, part in enumerate(parts):
            is_code = number % 2 == 1
            console.print(f"\n{part}" if is_code else Markdown(part), markup=False, highlight=False, soft_wrap=is_code)
    _write(capture.get(), is_safe=True)


def _write(text: str, *, is_safe: bool = False) -> None:
    """Write text; on a terminal, escape control characters unless ``is_safe``.

    Raise BrokenPipeError if its reader has ended, EnvironmentProblem if it cannot be written for another reason.
    """
    try:
        text = text if is_safe or not sys.stdout.isatty() else printable_lines(text)
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # in a locale such as Latin-1
            sys.stdout.write(text.translate(PLAIN_BLOCKS))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        what, do = f"cannot write the result: {error.strerror}", "free some space, or redirect the output elsewhere"
        raise EnvironmentProblem(what, where="standard output", do=do) from error


def log_writer() -> Callable[[bytes], None]:
    """Return a function that writes bytes of a log, on a terminal as text with escaped control characters."""
    if not sys.stdout.isatty():

        def write(block: bytes) -> None:
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()

        return write
    decoder = getincrementaldecoder("utf-8")("backslashreplace")
    return lambda block: _write(decoder.decode(block).replace("\r\n", "\n"))
