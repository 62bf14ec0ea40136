# SPDX-License-Identifier: Apache-2.0
"""The identity of a run, equal for repeats, its short id, and differences between runs, as values under dotted keys.

Pure.
"""

import hashlib
import json
from collections.abc import Mapping
from sys import intern
from typing import Any

from llmb.catalogue.records import Record

LETTERS = "klmnopqrstuvwxyz"
"""One for each hexadecimal digit: an id is never taken for the number of a job, a date or a commit."""
_AS_LETTERS = str.maketrans("0123456789abcdef", LETTERS)
LENGTH = 8
KEY_DIGITS = 10
Value = str | int | float | bool | None


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def key_of(configuration: Mapping[str, Value]) -> str:
    """Equal for equal configurations, and only for them."""
    return hashlib.sha256(_ENCODER.encode(configuration).encode()).hexdigest()[:KEY_DIGITS]


class RunIdentity(Record):
    """The whole configuration of a run: everything that decides what is computed, and how. Keys are dotted."""

    configuration: dict[str, Value]

    @property
    def key(self) -> str:
        """Equal for repeats, and only for them."""
        return key_of(self.configuration)


class Difference(Record):
    """A key whose values differ; a value is None if that side does not have it."""

    key: str
    before: Value
    after: Value


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Value]:
    """Nested values under dotted keys; a sequence becomes text."""
    flat_values: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat_values |= flat(value, f"{above}{name}.")
        else:
            flat_values[intern(above + name)] = value if isinstance(value, Value) else ",".join(map(str, value))
    return flat_values


def differences(before: Mapping[str, Value], after: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Return the differences by key, in alphabetical order."""
    keys = sorted(before.keys() | after.keys())
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(Difference(key=key, before=one, after=other) for key, one, other in pairs if one != other)


def short_id(text: str) -> str:
    """The id of the run with this ``run_id``, or of what else has a name."""
    digits = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:LENGTH]
    return digits.translate(_AS_LETTERS)


def may_be_short_id(text: str) -> bool:
    """True for an id, and for the beginning of one."""
    return 0 < len(text) <= LENGTH and set(text) <= set(LETTERS)
