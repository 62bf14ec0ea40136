# SPDX-License-Identifier: Apache-2.0
"""Campaign files in text: one job per line, or the reference suite's headers and tuples. Pure."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import yaml

from llmb.campaigns.entry import Draft, Entry, Keys
from llmb.campaigns.expansion import problem_text
from llmb.errors import UsageError

SplitModel = Callable[[str], tuple[str, str | None]]
"""Splits the name of a workload, or of a workload and a size. Raises UsageError."""

_FIELDS = ("sizes", "dtypes", "scales")
_FIELD = re.compile(r"""(?:[^\s"'#]|(?<=\S)\#|"[^"]*"|'[^']*')+""")
_HEADER = re.compile(r"([^\s(:]+)\s*:")
_TUPLE_LINE = re.compile(r"\((.*)\)\s*(?:#.*)?")
_MOST_LISTS = 20
"""YAML's parser takes a time that grows with the square of nested lists."""
_LONGEST_LINE = 1 << 16
_TUPLE = ("dtypes", "scales", "repeats", "profile")


class _Cell(NamedTuple):
    text: str
    column: int
    """From 1."""


class _Wrong(Exception):
    def __init__(self, column: int, what: str) -> None:
        super().__init__(what)
        self.column = column


class TextReader:
    """Entries of a file, and its problems as ``file:line:column: what``."""

    def __init__(self, name: str, keys: Keys, split_model: SplitModel) -> None:
        self.name = name
        self.keys = keys
        self.split_model = split_model
        self.header: tuple[str, str | None] | None = None
        self.header_failed = False
        """Tuples below an invalid header are skipped, so that the problem is reported once."""
        self.entries: list[Entry] = []
        self.problems: list[str] = []

    def read(self, text: str) -> None:
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                self._read_line(line, f"{self.name}:{number}")
            except _Wrong as wrong:
                self.problems.append(f"{self.name}:{number}:{wrong.column}: {wrong}")

    def _read_line(self, line: str, where: str) -> None:
        if not (content := line.strip()) or content.startswith("#"):
            return
        if len(line) > _LONGEST_LINE:
            raise _Wrong(1, f"the line has more than {_LONGEST_LINE:,} characters")
        column = line.index(content) + 1
        header = _HEADER.match(content)
        if header and content[header.end() :].partition("#")[0].strip() == "":
            self.header, self.header_failed = None, True
            self.header = self._model(_Cell(header[1], column))
            self.header_failed = False
        elif content.startswith("(") and not self.header_failed:
            self._read_tuple(line, column, where)
        elif not content.startswith("("):
            self._read_job(line, where)

    def _model(self, cell: _Cell) -> tuple[str, str | None]:
        try:
            return self.split_model(cell.text)
        except UsageError as error:
            raise _Wrong(cell.column, problem_text(error)) from error

    def _read_job(self, line: str, where: str) -> None:
        """``workload size dtype scale [key=value ...]``."""
        cells = list(_cells(line))
        keyed = [cell for cell in cells if "=" in cell.text]
        plain = [cell for cell in cells if "=" not in cell.text]
        if misplaced := [cell for cell in plain if keyed and cell.column > keyed[0].column]:
            raise _Wrong(misplaced[0].column, f"'{misplaced[0].text}' has no '='; after the scale come KEY=VALUE pairs")
        workload, size = self._model(plain[0]) if plain else (None, None)
        fields = _FIELDS if size is None else _FIELDS[1:]
        if workload is None or len(plain) != 1 + len(fields):
            raise _Wrong(
                1, f"a job is 'WORKLOAD SIZE DTYPE SCALE [KEY=VALUE ...]', not {len(plain)} words and the pairs"
            )
        draft = self._draft(where, workload, size)
        for name, cell in zip(fields, plain[1:], strict=True):
            self._set(draft, name, _Cell(unquoted(cell.text), cell.column))
        for cell in keyed:
            key, _, value = cell.text.partition("=")
            self._set(draft, key, _Cell(unquoted(value), cell.column))
        self.entries.append(draft.entry())

    def _read_tuple(self, line: str, column: int, where: str) -> None:
        """``(dtype or [dtypes], [scales], repeats[, profile])`` below a header."""
        if self.header is None:
            raise _Wrong(column, "this tuple has no header 'WORKLOAD_SIZE:' above it")
        items = _read_items(line, column)
        if not 2 <= len(items) <= len(_TUPLE):
            raise _Wrong(column, f"a tuple is (dtypes, scales, repeats, profile); this one has {len(items)} items")
        draft = self._draft(where, *self.header)
        for name, cells in zip(_TUPLE, items, strict=False):
            if not cells:
                raise _Wrong(column, f"{name} is empty")
            self._set(draft, name, _Cell(",".join(cell.text for cell in cells), cells[0].column))
        self.entries.append(draft.entry())

    def _draft(self, where: str, workload: str, size: str | None) -> Draft:
        fields = {"sizes": (size,)} if size else {}
        return Draft(keys=self.keys, where=where, workloads=(workload,), fields=fields)

    def _set(self, draft: Draft, name: str, cell: _Cell) -> None:
        try:
            draft.set_text(name, cell.text)
        except UsageError as error:
            self.problems.append(f"{draft.where}:{cell.column}: {problem_text(error)}")


def _cells(line: str) -> Iterator[_Cell]:
    """The words of a line up to a comment; a quoted value may contain spaces."""
    place = 0
    while place < len(line):
        if line[place].isspace():
            place += 1
        elif line[place] == "#":
            return
        elif match := _FIELD.match(line, place):
            yield _Cell(match[0], place + 1)
            place = match.end()
        else:
            raise _Wrong(place + 1, "unclosed quote")


def _read_items(line: str, column: int) -> list[list[_Cell]]:
    """The items of a tuple, each a list of values: with brackets instead, a tuple is a YAML list."""
    match = _TUPLE_LINE.fullmatch(line, column - 1)
    if not match:
        raise _Wrong(column, "the tuple is not closed, or is followed by other text")
    if sum(map(match[1].count, "[{&*")) > _MOST_LISTS:
        raise _Wrong(column, f"this tuple has more than {_MOST_LISTS} lists")
    try:
        node = yaml.compose(f"[{match[1]}]", Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        place = column + (error.problem_mark.column if error.problem_mark else 0)
        raise _Wrong(place, "this is not a tuple; a quote, a bracket or a comma may be missing") from error
    except yaml.YAMLError as error:
        raise _Wrong(column, "the tuple holds a character that cannot be read") from error
    return [_values(item, column) for item in node.value] if isinstance(node, yaml.SequenceNode) else []


def _values(node: yaml.Node, column: int) -> list[_Cell]:
    """The values of a list, or the single value of ``node``."""
    place = column + node.start_mark.column
    if isinstance(node, yaml.ScalarNode):
        return [_Cell(node.value, place)]
    if isinstance(node, yaml.SequenceNode):
        cells = [cell for item in node.value if isinstance(item, yaml.ScalarNode) for cell in _values(item, column)]
        if len(cells) == len(node.value):
            return cells
    raise _Wrong(place, "an item is a value or a list of values")


def unquoted(text: str) -> str:
    """Removes quotes."""
    return re.sub(r"""\"([^\"]*)\"|'([^']*)'""", lambda match: match[1] if match[1] is not None else match[2], text)
