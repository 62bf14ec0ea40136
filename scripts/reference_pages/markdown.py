# SPDX-License-Identifier: Apache-2.0
"""Markdown from plain values."""

import types
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from llmb.missing import Missing

WORDS: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    Path: "path",
    types.NoneType: "null",
}


def page(*parts: str) -> str:
    """Joins parts with blank lines; empty parts are left out."""
    return "\n\n".join(part for part in parts if part)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(value) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:.6g}" if abs(value) >= 1e12 or 0 < abs(value) < 1e-3 else f"{value:.10g}"
        case Enum():
            return cell(value.value)
        case dict():
            return ", ".join(f"{name} {cell(item)}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(cell(item) for item in value)
    return " ".join(str(value).split()).replace("|", "\\|")


def bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def type_text(annotation: Any) -> str:  # noqa: ANN401 (any type there is)
    """A type in words that are valid for JSON and for the command line."""
    if annotation is Missing:
        return "null"
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(item) for item in get_args(annotation)))
    if origin is Literal:
        return ", ".join(f"`{item}`" for item in get_args(annotation))
    if origin in (tuple, list):
        return "list"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{item.value}`" for item in annotation)
    if (
        origin is dict
        or is_dataclass(annotation)
        or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    ):
        return "object"
    return WORDS[annotation]
