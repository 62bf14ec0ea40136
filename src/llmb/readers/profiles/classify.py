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

LONGEST = 4096
"""Maximum number of characters of a name to parse."""
_LENGTH = re.compile(r"\d{1,4}")
_LITERAL = re.compile(r"L[a-z]n?\d+E")
_TYPE = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
_PLAIN_TYPES = frozenset(
    ("bool", "char", "short", "int", "long", "float", "double", "unsigned", "signed", "const", "true", "false")
)


class KernelName(NamedTuple):
    """Parts of a kernel's name, perhaps empty; ``argument`` is its first template argument that is not built-in."""

    function: str
    namespace: str = ""
    argument: str = ""


def split_name(name: str) -> KernelName:
    """Parse a kernel's name, either demangled or mangled (Itanium C++ ABI)."""
    name = name[:LONGEST]
    return _split_mangled(name) if name.startswith("_Z") else _split_demangled(name)


def _split_demangled(name: str) -> KernelName:
    name = name.replace("(anonymous namespace)", "anonymous").replace("<unnamed>", "anonymous")
    head, arguments = _head(name)
    words = head.split()
    namespace, _, function = (words[-1] if words else name).rpartition("::")
    types = (match[0] for match in _TYPE.finditer(arguments))
    return KernelName(function, namespace, next((text for text in types if text not in _PLAIN_TYPES), ""))


def _head(name: str) -> tuple[str, str]:
    """Return a name without parameters and template arguments, and its last template arguments."""
    parts: list[str] = []
    depth, begin, arguments = 0, 0, ""
    for place, character in enumerate(name):
        if character == "<":
            begin = place + 1 if depth == 0 else begin
            depth += 1
        elif character == ">" and depth:
            depth -= 1
            arguments = name[begin:place]
        elif depth == 0:
            if character == "(":
                break
            parts.append(character)
    return "".join(parts), arguments if depth == 0 else name[begin:]


def _split_mangled(name: str) -> KernelName:
    if name[2:3] != "N":
        length = _LENGTH.match(name, 2)
        return KernelName(name[length.end() : length.end() + int(length[0])] if length else name)
    words, place = _identifiers(name, 3)
    argument, _ = _identifiers(name, place + 1) if name[place : place + 1] == "I" else ([], 0)
    if name.startswith("INS_", place):  # stands for the first namespace
        argument = [*words[:1], *argument]
    return KernelName(words[-1] if words else name, "::".join(words[:-1]), "::".join(argument))


def _identifiers(name: str, place: int) -> tuple[list[str], int]:
    words: list[str] = []
    while place < len(name) and not (words and name[place] in "IELv"):
        literal, length = _LITERAL.match(name, place), _LENGTH.match(name, place)
        if literal:
            place = literal.end()
        elif length:
            end = length.end() + int(length[0])
            text = name[length.end() : end]
            words.append("anonymous" if text.startswith("_GLOBAL__N_") else text)
            place = end
        else:
            place += 1
    return words, place


RULES = Path(__file__).parent / "data" / "activities.yaml"


class Activity(StrEnum):
    """Activities of a device. An instant with several of them counts for the first in this order."""

    ATTENTION = "attention"
    MATRIX_PRODUCT = "matrix_product"
    OTHER = "other"
    UNCLASSIFIED = "unclassified"
    """A kernel that no rule matches."""
    CUDA_GRAPH = "cuda_graph"
    """A CUDA graph recorded as a whole: its content is unknown."""
    MEMORY_COPY = "memory_copy"
    COMMUNICATION = "communication"


class Label(NamedTuple):
    """The class of an activity; for communication also the kind of collective and the process group, if known."""

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
    """A rule that matches if each of its patterns occurs in the corresponding part of a kernel's name."""

    function: Pattern | None = None
    namespace: Pattern | None = None
    argument: Pattern | None = None
    activity: Activity
    kind: str | None = None
    source: str
    """The origin of kernels with such names."""

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
    """A rule for a device that is neither a CPU nor a GPU with known kernels."""

    category: Pattern | None = None
    """Category of its events."""
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
    """The rules of a file; labels are cached by name."""

    def __init__(self, path: Path = RULES) -> None:
        self.path = path
        self._kernels: dict[str, Label] = {}
        self._operators: dict[str, Label | None] = {}

    @cached_property
    def file(self) -> RulesFile:
        return read_file(self.path, RulesFile)

    def kernel(self, name: str) -> Label:
        if name not in self._kernels:
            parts = split_name(name)
            rule = next((rule for rule in self.file.kernels if rule.matches(parts)), None)
            self._kernels[name] = Label(rule.activity, rule.kind) if rule else UNCLASSIFIED
        return self._kernels[name]

    def operator(self, name: str) -> Label | None:
        """Return the label of an operator on a CPU; None if its time counts for the operators that it calls."""
        if name not in self._operators:
            self._operators[name] = _operator(self.file.operators, name)
        return self._operators[name]

    def device_of_category(self, category: str) -> str | None:
        """Return the name of the unknown device that events of this category belong to; None if there is none."""
        return next((rule.name for rule in self.file.devices if rule.category and rule.category.search(category)), None)

    def device_of_process(self, name: str) -> str | None:
        return next((rule.name for rule in self.file.devices if rule.process and rule.process.search(name)), None)

    def collective(self, name: str) -> str | None:
        """Return the kind of a collective from a profiler's name for it; None if no rule matches."""
        return next((rule.kind for rule in self.file.collectives if rule.pattern.search(name)), None)


def _operator(rules: tuple[OperatorRule, ...], name: str) -> Label | None:
    rule = next((rule for rule in rules if rule.pattern.search(name)), None)
    if rule is None:
        return OTHER
    return Label(rule.activity, rule.kind) if rule.activity else None
