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
from llmb.traces.kernel_name import KernelName, split_name

RULES = Path(__file__).parent / "data" / "activities.yaml"


class Activity(StrEnum):
    """What a device does. If several activities run at once, an instant counts for the first of them in this order."""

    ATTENTION = "attention"
    MATRIX_PRODUCT = "matrix_product"
    OTHER = "other"
    UNCLASSIFIED = "unclassified"
    """A kernel that no rule knows."""
    CUDA_GRAPH = "cuda_graph"
    """A CUDA graph that was recorded as a whole: what ran in it is unknown."""
    MEMORY_COPY = "memory_copy"
    COMMUNICATION = "communication"


class Label(NamedTuple):
    """The class of an activity; for communication also the collective and the process group, if the trace has them."""

    activity: Activity
    kind: str | None = None
    group: str | None = None


OTHER = Label(Activity.OTHER)
UNCLASSIFIED = Label(Activity.UNCLASSIFIED)
CUDA_GRAPH = Label(Activity.CUDA_GRAPH)
MEMORY_COPY = Label(Activity.MEMORY_COPY)


def _compiled(text: object) -> object:
    try:
        return re.compile(text, re.IGNORECASE) if isinstance(text, str) else text
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error


Pattern = Annotated[re.Pattern[str], BeforeValidator(_compiled)]


class KernelRule(Record):
    """Matches if each of its patterns is found in that part of a kernel's name."""

    function: Pattern | None = None
    namespace: Pattern | None = None
    argument: Pattern | None = None
    activity: Activity
    kind: str | None = None
    source: str
    """Where kernels have such names."""

    def matches(self, name: KernelName) -> bool:
        parts = ((self.function, name.function), (self.namespace, name.namespace), (self.argument, name.argument))
        return all(pattern is None or pattern.search(text) for pattern, text in parts)


class OperatorRule(Record):
    pattern: Pattern
    activity: Activity | None
    kind: str | None = None


class CollectiveRule(Record):
    pattern: Pattern
    kind: str


class DeviceRule(Record):
    """A device that is neither a CPU nor a GPU whose kernels are known."""

    category: Pattern | None = None
    """Of its events."""
    process: Pattern | None = None
    """Name or label of one of the trace's processes."""
    name: str
    source: str


class RulesFile(Record):
    """The content of ``activities.yaml``."""

    devices: tuple[DeviceRule, ...]
    kernels: tuple[KernelRule, ...]
    operators: tuple[OperatorRule, ...]
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
            parts = split_name(name)
            rule = next((rule for rule in self.file.kernels if rule.matches(parts)), None)
            self._kernels[name] = Label(rule.activity, rule.kind) if rule else UNCLASSIFIED
        return self._kernels[name]

    def operator(self, name: str) -> Label | None:
        """The label of an operator on a CPU; None if its time belongs to the operators that it calls."""
        if name not in self._operators:
            self._operators[name] = _operator(self.file.operators, name)
        return self._operators[name]

    def device_of_category(self, category: str) -> str | None:
        """The device of events of this category, if it is an unknown one."""
        return next((rule.name for rule in self.file.devices if rule.category and rule.category.search(category)), None)

    def device_of_process(self, name: str) -> str | None:
        return next((rule.name for rule in self.file.devices if rule.process and rule.process.search(name)), None)

    def collective(self, name: str) -> str | None:
        """The kind of a collective, by the name that a profiler gives it."""
        return next((rule.kind for rule in self.file.collectives if rule.pattern.search(name)), None)


def _operator(rules: tuple[OperatorRule, ...], name: str) -> Label | None:
    rule = next((rule for rule in rules if rule.pattern.search(name)), None)
    if rule is None:
        return OTHER
    return Label(rule.activity, rule.kind) if rule.activity else None
