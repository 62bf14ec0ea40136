# SPDX-License-Identifier: Apache-2.0
"""Dotted keys of settings, as their schema allows them. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from llmb.errors import unknown

NAME = "<name>"


def split_key(schema: type[BaseModel], text: str) -> tuple[str, ...]:
    """The keys that ``text`` stands for; names of workloads may have dots. Raises UsageError with what is like it."""
    found = _split(schema, text.split("."))
    if found is None:
        known = list(known_keys(schema))
        *above, name = text.split(".")
        free = [".".join((*keys[:-1], name)) for keys in known if keys[-1] == NAME and list(keys[:-2]) == above]
        do = f"any name is possible in {' and '.join(free)}" if free and above else None
        raise unknown("key", text, [".".join(keys) for keys in known], do=do)
    return found


def is_key(schema: type[BaseModel], text: str) -> bool:
    return _split(schema, text.split(".")) is not None


def _split(kind: Any, parts: Sequence[str]) -> tuple[str, ...] | None:  # noqa: ANN401 (any type there is)
    kind = plain(kind)
    if not all(parts):
        return None
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(parts[0])
        if field is None or len(parts) == 1:
            return (parts[0],) if field else None
        rest = _split(field.annotation, parts[1:])
        return None if rest is None else (parts[0], *rest)
    if get_origin(kind) is not dict:
        return None
    below = get_args(kind)[1]
    for place in range(1, len(parts)):
        rest = _split(below, parts[place:])
        if rest is not None:
            return (".".join(parts[:place]), *rest)
    return (".".join(parts),)


def known_keys(kind: Any) -> Iterator[tuple[str, ...]]:  # noqa: ANN401 (any type there is)
    """Keys of single values, with a placeholder for names that are free."""
    kind = plain(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from ((name, *rest) for rest in known_keys(field.annotation))
    elif get_origin(kind) is dict:
        yield from ((NAME, *rest) for rest in known_keys(get_args(kind)[1]))
    else:
        yield ()


def plain(kind: Any) -> Any:  # noqa: ANN401 (any type there is)
    """A type without None."""
    if get_origin(kind) is Annotated:
        return plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        kinds = [item for item in get_args(kind) if item is not NoneType]
        return plain(kinds[0]) if len(kinds) == 1 else kind
    return kind


def leaves(value: object, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every single value of settings, with its keys; what is empty is left out."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, (*above, str(name)))
    elif value is not None and value != ():
        yield above, list(value) if isinstance(value, tuple) else value


def has_keys(data: object, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True
