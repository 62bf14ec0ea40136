# SPDX-License-Identifier: Apache-2.0
"""The choices that a request left open. Pure."""

from collections.abc import Sequence
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


def unspecified_text(choices: Sequence[Unspecified]) -> str:
    """One line."""
    return f"not specified: {'; '.join(choice.text() for choice in choices)}"
