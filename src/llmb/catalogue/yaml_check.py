# SPDX-License-Identifier: Apache-2.0
"""Loads the YAML of others: as it is written, and checked to need bounded time and memory."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

# The two loaders do not accept exactly the same files, so one is used for all.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_AS_WRITTEN = {
    "tag:yaml.org,2002:int": re.compile(r"-?(?:0|[1-9][0-9]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:-?(?:0|[1-9][0-9]*)\.(?:0|[0-9]*[1-9])(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
"""Numbers that are still what was written when they are text again."""
MOST_LEVELS = 50
"""The loaders recurse: 30,000 levels end the process, and time grows with the square of the levels."""
MOST_VALUES = 200_000
"""Values of a file, with those that aliases repeat: a few lines of aliases can stand for billions."""
_STRING_TAG = "tag:yaml.org,2002:str"


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
"""For files of users: 10:00:00, 010, 1_000 and 3.10 are text, for YAML 1.1 would make other values of them."""


@dataclass(slots=True)
class _Open:
    """A list or mapping that has not ended."""

    anchor: str | None
    values: int = 1


def check_yaml(text: bytes | str) -> None:
    """Raises yaml.MarkedYAMLError for what could not be loaded safely, and any error of the parser."""
    sizes: dict[str, int] = {}
    stack = [_Open(None)]
    for event in yaml.parse(text, Loader=LOADER):
        match event:
            case yaml.CollectionStartEvent():
                _refuse(event, len(stack) > MOST_LEVELS, f"more than {MOST_LEVELS} nested levels")
                stack.append(_Open(event.anchor))
                sizes.pop(event.anchor or "", None)  # an alias within its own anchor has no size
            case yaml.CollectionEndEvent():
                _close(stack, sizes)
            case yaml.ScalarEvent():
                stack[-1].values += 1
                if event.anchor:
                    sizes[event.anchor] = 1
            case yaml.AliasEvent():
                size = sizes.get(event.anchor or "", 0)
                _refuse(event, size == 0, f"alias '{event.anchor}' of no value before it")
                stack[-1].values += size
        _refuse(event, getattr(event, "tag", None) not in (None, _STRING_TAG), "a tag, which is unsupported")
        _refuse(event, stack[-1].values > MOST_VALUES, f"more than {MOST_VALUES:,} values")


def _close(stack: list[_Open], sizes: dict[str, int]) -> None:
    closed = stack.pop()
    stack[-1].values += closed.values
    if closed.anchor:
        sizes[closed.anchor] = closed.values


def _refuse(event: yaml.Event, wrong: bool, what: str) -> None:
    if wrong:
        mark: Any = event.start_mark  # of either loader
        raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)
