# SPDX-License-Identifier: Apache-2.0
"""The choices that a request left open. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

DEFAULT = "default"
OPEN_CHOICES = {"gpu_type": "GPU type", "scale": "scale", "dtype": "dtype", "release": "release"}
"""The fields of a request that may be left open, and their names in messages."""


@dataclass(frozen=True, slots=True)
class Unspecified:
    """What was taken, where it comes from, and what else was possible."""

    name: str
    value: str
    origin: str = DEFAULT
    others: tuple[str, ...] = ()

    def text(self) -> str:
        origin = [] if self.origin == DEFAULT else [self.origin]
        others = [f"or {', '.join(self.others)}"] if self.others else []
        more = "; ".join([*origin, *others])
        return f"{self.name} {self.value}" + (f" ({more})" if more else "")


def left_open(
    taken: Mapping[str, str], given: Collection[str], possible: Mapping[str, Sequence[str]], found: Mapping[str, str]
) -> Iterator[Unspecified]:
    """Every choice that was not given, unless only one value is possible; all by field.

    ``found`` has the origins of values that are no defaults, such as ``detected``. A possible value may be followed by
    words in brackets.
    """
    for field, name in OPEN_CHOICES.items():
        if field not in taken or field in given:
            continue
        others = tuple(item for item in possible[field] if item.partition(" (")[0] != taken[field])
        if others:
            yield Unspecified(name, taken[field], found.get(field, DEFAULT), others)


def unspecified_text(choices: Sequence[Unspecified]) -> str:
    """One line."""
    return f"not specified: {'; '.join(choice.text() for choice in choices)}"
