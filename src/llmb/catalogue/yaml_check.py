# SPDX-License-Identifier: Apache-2.0
"""Checks that the YAML of others can be loaded in bounded time and memory."""

from dataclasses import dataclass
from typing import Any

import yaml

# The two loaders do not accept exactly the same files, so one is used for all.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_LEVELS = 50
"""The loaders recurse: 30,000 levels end the process, and time grows with the square of the levels."""
MOST_VALUES = 200_000
"""Values of a file, with those that aliases repeat: a few lines of aliases can stand for billions."""
_STRING_TAG = "tag:yaml.org,2002:str"


@dataclass(slots=True)
class _Open:
    """A list or mapping that has not ended."""

    anchor: str | None
    values: int = 1


def check_yaml(text: bytes | str, most_levels: int = MOST_LEVELS) -> None:
    """Raises yaml.MarkedYAMLError for what could not be loaded safely, and any error of the parser."""
    sizes: dict[str, int] = {}
    stack = [_Open(None)]
    for event in yaml.parse(text, Loader=LOADER):
        match event:
            case yaml.CollectionStartEvent():
                _refuse(event, len(stack) > most_levels, f"more than {most_levels} nested levels")
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
