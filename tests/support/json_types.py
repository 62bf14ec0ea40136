# SPDX-License-Identifier: Apache-2.0
"""Types of a JSON document by path, from the annotations of records and from samples.

A path is ``key.key`` with ``[]`` for the items of a list and ``*`` for any key of a mapping.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel

from llmb.base.missing import Missing
from llmb.base.record import ReasonedRecord

Schema = dict[str, tuple[str, ...]]
"""Types by path, in alphabetical order. A type in quotes is one of the only values of a string."""
ABSENT = "absent"
"""Marks a key that an object need not have."""

NAMES: dict[object, str] = {
    str: "string",
    Missing: "null",
    Path: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    types.NoneType: "null",
    Any: "any",
}


def schema_of(samples: Sequence[Any], annotations: Mapping[str, Any]) -> Schema:
    """What is seen in ``samples``, and declared at the paths of ``annotations``, which say more than a sample can.

    A path of ``annotations`` replaces what one above it says.
    """
    stated: dict[str, set[str]] = {}
    for path, annotation in annotations.items():
        for below, kind in declared(annotation, path):
            if below != path and below in annotations:
                continue
            stated.setdefault(below, set()).add(kind)
    found: dict[str, set[str]] = {}
    for path, kind in (pair for sample in samples for pair in observed(sample)):
        if path not in stated and covering(path, stated) is None:
            found.setdefault(path, set()).add(kind)
    return {path: tuple(sorted(kinds)) for path, kinds in sorted({**found, **stated}.items()) if path}


def observed(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Paths and types of all values."""
    yield path, kind_of(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from observed(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from observed(item, f"{path}[]")


def kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "object"
    return "list" if isinstance(value, list | tuple) else NAMES[type(value)]


def declared(annotation: Any, path: str) -> Iterator[tuple[str, str]]:
    """Types of every value that ``annotation`` allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for item in arguments:
            yield from declared(item, path)
    elif origin in (Annotated, NotRequired):
        yield from [(path, ABSENT)] if origin is NotRequired else []
        yield from declared(arguments[0], path)
    elif origin is Literal:
        yield from ((path, f"'{item}'" if isinstance(item, str) else kind_of(item)) for item in arguments)
    elif isinstance(origin, type):
        yield from _collection(origin, arguments, path)
    else:
        yield from _plain(annotation, path)


def _collection(origin: type, arguments: Sequence[Any], path: str) -> Iterator[tuple[str, str]]:
    if issubclass(origin, Mapping):
        yield path, "object"
        yield from declared(arguments[1], f"{path}.*" if path else "*")
    else:
        yield path, "list"
        for item in arguments:
            yield from () if item is Ellipsis else declared(item, f"{path}[]")


def _plain(annotation: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from ((path, f"'{item.value}'") for item in annotation)
    elif annotation not in NAMES and (members := members_of(annotation)):
        yield path, "object"
        for name, item in members.items():
            yield from declared(item, f"{path}.{name}" if path else name)
    else:
        yield path, NAMES[annotation]


def members_of(annotation: Any) -> dict[str, Any]:
    """Fields of a record with their types; empty for anything else."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        reasons = dict(annotation.reason_keys()) if issubclass(annotation, ReasonedRecord) else {}
        members: dict[str, Any] = {}
        for name, field in annotation.model_fields.items():
            members |= {name: field.annotation} | ({reasons[name]: str | None} if name in reasons else {})
        return members
    if is_dataclass(annotation) and isinstance(annotation, type):
        kinds = get_type_hints(annotation)
        return {item.name: kinds[item.name] for item in fields(annotation)}
    return get_type_hints(annotation, include_extras=True) if is_typeddict(annotation) else {}


def covering(path: str, schema: Mapping[str, object]) -> str | None:
    """The path of ``schema`` that stands for ``path``: itself, or one with ``*`` in the place of keys."""
    if path in schema:
        return path
    parts = path.split(".")
    for pattern in (key for key in schema if "*" in key):
        named = pattern.split(".")
        if len(named) == len(parts) and all(_matches(*pair) for pair in zip(named, parts, strict=True)):
            return pattern
    return None


def _matches(named: str, part: str) -> bool:
    return named == part or (named.startswith("*") and named.count("[]") == part.count("[]"))


def violations(document: Any, schema: Mapping[str, Sequence[str]]) -> list[str]:
    """How ``document`` breaks ``schema``: unknown keys, values of another type, missing keys of objects that exist."""
    found: list[str] = []
    for path, value in _values(document, schema):
        known = covering(path, schema)
        if path and known is None:
            found.append(f"{path} is not in the schema")
        elif known and not _allowed(value, schema[known]):
            found.append(f"{path} is {value!r:.40}, not {' or '.join(schema[known])}")
    return [*found, *_missing(document, schema)]


def _values(value: Any, schema: Mapping[str, Sequence[str]], path: str = "") -> Iterator[tuple[str, Any]]:
    """All values but those below one of any type."""
    yield path, value
    if (known := covering(path, schema)) and "any" in schema[known]:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values(item, schema, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _values(item, schema, f"{path}[]")


def _allowed(value: Any, kinds: Sequence[str]) -> bool:
    kind = kind_of(value)
    return "any" in kinds or kind in kinds or (kind == "integer" and "number" in kinds) or f"'{value}'" in kinds


def _missing(document: Any, schema: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for path, value in _values(document, schema):
        if isinstance(value, Mapping):
            above = covering(path, schema) or ""
            for key in _keys(above, schema):
                if key not in value and ABSENT not in schema[f"{above}.{key}" if above else key]:
                    yield f"{path}.{key} is missing" if path else f"{key} is missing"


def _keys(above: str, schema: Mapping[str, object]) -> list[str]:
    """Keys of the object at the path ``above``."""
    prefix = f"{above}." if above else ""
    below = (path.removeprefix(prefix) for path in schema if path.startswith(prefix))
    return [key for key in below if not set(key) & set(".[*")]
