# SPDX-License-Identifier: Apache-2.0
"""Reads YAML data files into typed records; numbers such as 010 and 3.10 in users' files stay text."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from llmb.base.errors import UsageError
from llmb.base.input_files import read_text_file

# The two loaders do not accept exactly the same files, so one is used for all.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_AS_WRITTEN = {
    "tag:yaml.org,2002:int": re.compile(r"-?(?:0|[1-9][0-9]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:-?(?:0|[1-9][0-9]*)\.(?:0|[0-9]*[1-9])(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
"""Patterns of numbers in users' files; text such as 3.10, whose zeros a number would lose, stays text."""
MOST_LEVELS = 50
"""Limit of nesting: the loaders recurse, and 30,000 levels end the process."""
MOST_VALUES = 200_000
"""Limit of values in a file, counting repetitions by aliases: a few lines could stand for billions."""
_STRING_TAG = "tag:yaml.org,2002:str"
Shape = TypeVar("Shape", bound=BaseModel)
Key = str | int
MOST_PROBLEMS = 50
"""Maximum number of problems to list for a file."""
# pydantic's messages for these mention its classes.
MESSAGES = {
    "extra_forbidden": "unknown key",
    "missing": "it is missing",
    "model_type": "it must be a mapping, that is, lines of 'key: value'",
    "dict_type": "it must be a mapping, that is, lines of 'key: value'",
    **dict.fromkeys(("tuple_type", "list_type"), "it must be a list: lines that begin with '- ', or [A, B]"),
    **dict.fromkeys(("float_type", "float_parsing"), "it must be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "it must be a whole number"),
    "string_type": "it must be text",
}


def _foreign_loader() -> Any:  # noqa: ANN401 (of either loader)
    loader: Any = type("ForeignLoader", (LOADER,), {})
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _AS_WRITTEN]
        for first, resolvers in LOADER.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _AS_WRITTEN.items():
        loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    return loader


FOREIGN_LOADER: Any = _foreign_loader()
"""Loads files of users: 10:00:00, 010, 1_000 and 3.10 are text, although they are numbers in YAML 1.1."""


@dataclass(slots=True)
class _Open:
    anchor: str | None
    values: int = 1


def check_yaml(text: bytes | str) -> None:
    """Raise yaml.YAMLError if the text is invalid, has an unsupported tag, or is too deep or large."""
    sizes: dict[str, int] = {}
    stack = [_Open(None)]
    for event in yaml.parse(text, Loader=LOADER):
        match event:
            case yaml.CollectionStartEvent():
                _refuse(event, len(stack) > MOST_LEVELS, f"more than {MOST_LEVELS} nested levels")
                stack.append(_Open(event.anchor))
                sizes.pop(event.anchor or "", None)  # an alias within its own anchor has no size
            case yaml.CollectionEndEvent():
                closed = stack.pop()
                stack[-1].values += closed.values
                if closed.anchor:
                    sizes[closed.anchor] = closed.values
            case yaml.ScalarEvent():
                stack[-1].values += 1
                if event.anchor:
                    sizes[event.anchor] = 1
            case yaml.AliasEvent():
                size = sizes.get(event.anchor or "", 0)
                _refuse(event, size == 0, f"alias '{event.anchor}' without an anchor before it")
                stack[-1].values += size
        _refuse(event, getattr(event, "tag", None) not in (None, _STRING_TAG), "a tag, which is unsupported")
        _refuse(event, stack[-1].values > MOST_VALUES, f"more than {MOST_VALUES:,} values")


def _refuse(event: yaml.Event, wrong: bool, what: str) -> None:
    if wrong:
        mark: Any = event.start_mark  # of either loader
        raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)


class CatalogueError(UsageError):
    """An error about data files, with problems as ``file:line: what``, or without a line if it is unknown."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{count} in files that llmb reads:\n{lines}", do="correct the file, or its path")


def read_file(path: Path, shape: type[Shape], wrap: str | None = None, *, foreign: bool = False) -> Shape:
    """Read ``path`` as ``shape``; raise CatalogueError if it is invalid. ``wrap`` is the field for a bare list."""
    data = _parse(path, foreign=foreign)
    try:
        return shape.model_validate({wrap: data} if wrap else {} if data is None else data)
    except ValidationError as error:
        raise CatalogueError(schema_problems(path, error, skip=1 if wrap else 0, shape=shape)) from error


def read_data(path: Path) -> object:
    """Read a user's YAML file; raise CatalogueError if it cannot be read, is invalid, or has duplicate keys."""
    data = _parse(path, foreign=True)
    if doubled := [f"{path}:{line}: duplicate key '{key}'" for line, key in duplicate_keys(compose_file(path))]:
        raise CatalogueError(doubled)
    return data


def _parse(path: Path, *, foreign: bool = False) -> object:
    try:
        text = read_text_file(path)
        if foreign:
            check_yaml(text)
        return yaml.load(text, Loader=FOREIGN_LOADER if foreign else LOADER)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CatalogueError([f"{path}:{line}: not valid YAML: {error.problem}"]) from error
    except UsageError as error:
        raise CatalogueError([f"{path}: {error.what}"]) from error
    except (yaml.YAMLError, ValueError) as error:  # an invalid character or date
        raise CatalogueError([f"{path}: not valid YAML: {str(error).splitlines()[0]}"]) from error


def schema_problems(
    path: Path, error: ValidationError, skip: int = 0, below: tuple[Key, ...] = (), shape: type[BaseModel] | None = None
) -> list[str]:
    """Return lines that describe up to ``MOST_PROBLEMS`` violations, and the number of others."""
    problems = []
    root = compose_file(path)
    for item in error.errors(include_url=False)[:MOST_PROBLEMS]:
        keys = (*below, *item["loc"][skip:])
        name = ".".join(map(str, keys))
        what = MESSAGES.get(item["type"], item["msg"])
        if shape and item["type"] == "extra_forbidden" and (valid := _valid_keys(shape, item["loc"][:-1])):
            what += f"; valid: {', '.join(valid)}"
        problems.append(f"{path}:{line_in(root, keys)}: {f'{name}: {what}' if name else what}")
    if error.error_count() > MOST_PROBLEMS:
        problems.append(f"{path}: {error.error_count() - MOST_PROBLEMS:,} more problems")
    return problems


def _valid_keys(shape: Any, keys: tuple[Key, ...]) -> list[str]:  # noqa: ANN401 (an annotation)
    """Return the keys of the record in ``shape`` that ``keys`` lead to; empty for a value of another kind."""
    while get_origin(shape) in (Union, UnionType, Annotated, tuple):
        shape = get_args(shape)[0]
    fields = getattr(shape, "model_fields", None)
    if fields is None:
        return _valid_keys(get_args(shape)[1], keys[1:]) if get_origin(shape) is dict and keys else []
    if not keys:
        return list(fields)
    key, *rest = [each for each in keys if isinstance(each, str)]
    return _valid_keys(fields[key].annotation, tuple(rest)) if key in fields else []


def located(path: Path, keys: tuple[Key, ...], what: str) -> str:
    """Return ``file:line: what`` for the value at ``keys``, or for the nearest value above it if there is none."""
    return f"{path}:{line_in(compose_file(path), keys)}: {what}"


def compose_file(path: Path) -> Any:  # noqa: ANN401 (yaml's nodes are untyped)
    """Return the nodes of a YAML file, with line numbers; None if it is empty."""
    with path.open("rb") as stream:
        return yaml.compose(stream, Loader=LOADER)


def line_in(node: Any, keys: tuple[Key, ...]) -> int:  # noqa: ANN401 (yaml's nodes are untyped)
    """Return the line, from 1, of the value at ``keys``, or of the nearest value above it."""
    for key in keys:
        child = _child(node, key)
        if child is None:
            break
        node = child
    return int(node.start_mark.line) + 1 if node is not None else 1


def duplicate_keys(node: Any) -> Iterator[tuple[int, str]]:  # noqa: ANN401 (yaml's nodes are untyped)
    """Yield the line, from 1, and the name of each duplicate key of a composed file."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from duplicate_keys(item)
    elif isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if key.value in keys:
                yield key.start_mark.line + 1, key.value
            keys.add(key.value)
            yield from duplicate_keys(value)


def _child(node: Any, key: Key) -> Any:  # noqa: ANN401 (yaml's nodes are untyped)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key]
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in reversed(node.value) if name.value == str(key)), None)
    return None
