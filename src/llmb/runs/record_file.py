# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a run folder, which anything may have damaged since."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmb.base.errors import EnvironmentProblem
from llmb.base.input_files import MOST_JSON_BYTES, check_values, read_regular
from llmb.base.missing import Missing
from llmb.base.record import first_problem
from llmb.base.shown_text import printable

MOST_SHOWN = 200
UNREADABLE = (OSError, ValueError, LookupError, ArithmeticError)
"""The errors of reading a file that another program wrote, and of counting with its content."""
Shape = TypeVar("Shape")
Content = TypeVar("Content")


class BrokenRecord(EnvironmentProblem, ValueError):
    """A file of a run folder does not hold what was written to it."""


def read_record_file(path: Path, shape: type[Shape]) -> Shape:
    """The content of a JSON file. Raises BrokenRecord with the place of what is wrong, OSError if it cannot be read."""
    text = read_regular(path, MOST_JSON_BYTES)
    try:
        check_values(text)
        content: Shape = _adapter(shape).validate_json(text)  # type: ignore[arg-type]  # mypy: no hash of a type[T]
    except ValidationError as error:
        place, wrong = first_problem(error)
        if place == "schema_version":
            what = "its form is not that of this llmb: a development version before 0.1 wrote it, or a later one"
            raise BrokenRecord(what, where=str(path)) from error
        raise BrokenRecord(f"it is damaged: {place}{': ' if place else ''}{wrong}", where=str(path)) from error
    except ValueError as error:
        raise BrokenRecord(f"it is damaged: {error}", where=str(path)) from error
    return content


def read_or_missing(what: str, read: Callable[[], Content]) -> Content | Missing:
    """Return the result of ``read``, or why it failed: a file beside the steps must not cost a run its result."""
    try:
        return read()
    except UNREADABLE as error:
        return Missing(f"{what} cannot be read: {why_unreadable(error)}")


def why_unreadable(error: Exception) -> str:
    """One of ``UNREADABLE``, in one line."""
    if isinstance(error, BrokenRecord):
        return f"{error.what} ({Path(error.where or '').name})"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{type(error).__name__}: {printable(error)[:MOST_SHOWN]}"


@cache
def _adapter(shape: type[Any]) -> TypeAdapter[Any]:
    """Made once: to make one takes ten times as long as to read a record with it."""
    return TypeAdapter(shape)
