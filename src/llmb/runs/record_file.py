# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a run folder, which anything may have damaged since."""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmb.errors import EnvironmentProblem
from llmb.input_files import read_regular

MOST_BYTES = 1 << 26
Shape = TypeVar("Shape")


class BrokenRecord(EnvironmentProblem, ValueError):
    """A file of a run folder does not hold what was written to it."""


def read_record_file(path: Path, shape: type[Shape]) -> Shape:
    """The content of a JSON file. Raises BrokenRecord with the place of what is wrong, OSError if it cannot be read."""
    text = read_regular(path, MOST_BYTES)
    try:
        content: Shape = _adapter(shape).validate_json(text)  # type: ignore[arg-type]  # mypy: no hash of a type[T]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["loc"] == ("schema_version",):
            what = "its form is not that of this llmb: a development version before 0.1 wrote it, or a later one"
            raise BrokenRecord(what, where=str(path)) from error
        place = "".join(f"{key}: " for key in (".".join(map(str, first["loc"])),) if key)
        raise BrokenRecord(f"it is damaged: {place}{first['msg']}", where=str(path)) from error
    return content


@cache
def _adapter(shape: type[Any]) -> TypeAdapter[Any]:
    """Made once: to make one takes ten times as long as to read a record with it."""
    return TypeAdapter(shape)
