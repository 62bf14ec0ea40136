# SPDX-License-Identifier: Apache-2.0
"""Classifies the activities of a trace by name; the rules are data."""

import re
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record

RULES = Path(__file__).parent / "data" / "activities.yaml"


class Activity(StrEnum):
    """What a device does. If several activities run at once, an instant counts for the first of them in this order."""

    ATTENTION = "attention"
    MATRIX_PRODUCT = "matrix_product"
    OTHER = "other"
    MEMORY_COPY = "memory_copy"
    COMMUNICATION = "communication"


class Label(NamedTuple):
    """The class of an activity; for communication also the collective and the process group, if the trace has them."""

    activity: Activity
    kind: str | None = None
    group: str | None = None


OTHER = Label(Activity.OTHER)
MEMORY_COPY = Label(Activity.MEMORY_COPY)


def _compiled(text: object) -> object:
    try:
        return re.compile(text, re.IGNORECASE) if isinstance(text, str) else text
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error


Pattern = Annotated[re.Pattern[str], BeforeValidator(_compiled)]


class ActivityRule(Record):
    pattern: Pattern
    activity: Activity | None
    kind: str | None = None


class CollectiveRule(Record):
    pattern: Pattern
    kind: str


class RulesFile(Record):
    """The content of ``activities.yaml``."""

    kernels: tuple[ActivityRule, ...]
    operators: tuple[ActivityRule, ...]
    collectives: tuple[CollectiveRule, ...]


class Rules:
    """Results are cached: a trace has millions of activities and few names."""

    def __init__(self, path: Path = RULES) -> None:
        self.path = path
        self._kernels: dict[str, Label] = {}
        self._operators: dict[str, Label | None] = {}

    @cached_property
    def file(self) -> RulesFile:
        return read_file(self.path, RulesFile)

    def kernel(self, name: str) -> Label:
        """The label of a GPU kernel."""
        if name not in self._kernels:
            self._kernels[name] = _first(self.file.kernels, name) or OTHER
        return self._kernels[name]

    def operator(self, name: str) -> Label | None:
        """The label of an operator on a CPU; None if its time belongs to the operators that it calls."""
        if name not in self._operators:
            self._operators[name] = _first(self.file.operators, name)
        return self._operators[name]

    def collective(self, name: str) -> str | None:
        """The kind of a collective, by the name that a profiler gives it."""
        return next((rule.kind for rule in self.file.collectives if rule.pattern.search(name)), None)


def _first(rules: tuple[ActivityRule, ...], name: str) -> Label | None:
    rule = next((rule for rule in rules if rule.pattern.search(name)), None)
    if rule is None:
        return OTHER
    return Label(rule.activity, rule.kind) if rule.activity else None
