# SPDX-License-Identifier: Apache-2.0
"""Reads campaign files, in YAML or as text."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, create_model

from llmb.base.errors import UsageError, see
from llmb.base.input_files import read_text_file
from llmb.base.shown_text import counted
from llmb.base.trust import check_owner
from llmb.catalogue.data_files import CatalogueError, Key, compose_file, duplicate_keys, line_in, read_file
from llmb.catalogue.records import Record
from llmb.jobs.campaigns.expansion import ENVIRONMENT, Draft, Entry, Keys, Values, entry_options, problem_text

SplitModel = Callable[[str], tuple[str, str | None]]
"""Splits a name into workload and size (None without a size); raises UsageError if either does not exist."""

_MATRIX = ("sizes", "dtypes", "scales")
_FIELD = re.compile(r"""(?:[^\s"'#]|(?<=\S)\#|"[^"]*"|'[^']*')+""")
_HEADER = re.compile(r"([^\s(:]+)\s*:")
_TUPLE_LINE = re.compile(r"\((.*)\)\s*(?:#.*)?")
_MOST_LISTS = 20
"""The maximum number of lists in a tuple, because YAML's parser takes time quadratic in their depth."""
_LONGEST_LINE = 1 << 16
_TUPLE = ("dtypes", "scales", "repeats", "profile")


class _Cell(NamedTuple):
    text: str
    column: int
    """The column of the first character, counted from 1."""


class _Wrong(Exception):
    def __init__(self, column: int, what: str) -> None:
        super().__init__(what)
        self.column = column


class TextReader:
    """Reads the entries of a text file; collects its problems as ``file:line:column: what``."""

    def __init__(self, name: str, keys: Keys, split_model: SplitModel) -> None:
        self.name = name
        self.keys = keys
        self.split_model = split_model
        self.header: tuple[str, str | None] | None = None
        self.header_failed = False
        """True below an invalid header, where tuples are skipped, so that the problem is reported once."""
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
        """Read a job: ``workload [size] dtype scale [key=value ...]``."""
        cells = list(_cells(line))
        keyed = [cell for cell in cells if "=" in cell.text]
        plain = [cell for cell in cells if "=" not in cell.text]
        if misplaced := [cell for cell in plain if keyed and cell.column > keyed[0].column]:
            raise _Wrong(misplaced[0].column, f"'{misplaced[0].text}' has no '='; after the scale come KEY=VALUE pairs")
        workload, size = self._model(plain[0]) if plain else (None, None)
        fields = _MATRIX if size is None else _MATRIX[1:]
        if workload is None or len(plain) != 1 + len(fields):
            raise _Wrong(
                1, f"a job is 'WORKLOAD SIZE DTYPE SCALE [KEY=VALUE ...]', but this has {counted(len(plain), 'word')}"
            )
        draft = self._draft(where, workload, size)
        for name, cell in zip(fields, plain[1:], strict=True):
            self._set(draft, name, _Cell(unquoted(cell.text), cell.column))
        for cell in keyed:
            key, _, value = cell.text.partition("=")
            self._set(draft, key, _Cell(unquoted(value), cell.column))
        self.entries.append(draft.entry())

    def _read_tuple(self, line: str, column: int, where: str) -> None:
        """Read a tuple below a header: ``(dtypes, scales[, repeats[, profile]])``, each a value or a list."""
        if self.header is None:
            raise _Wrong(column, "there is no header 'WORKLOAD_SIZE:' above this tuple")
        items = _read_items(line, column)
        if not 2 <= len(items) <= len(_TUPLE):
            raise _Wrong(
                column, f"a tuple is (dtypes, scales, repeats, profile); this one has {counted(len(items), 'item')}"
            )
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
    """Yield the words of a line up to a comment; quoted values may contain spaces."""
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
    """Parse a tuple, which is a YAML list in parentheses, into items, each a list of values."""
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
        raise _Wrong(column, "the tuple contains an invalid character") from error
    return [_values(item, column) for item in node.value] if isinstance(node, yaml.SequenceNode) else []


def _values(node: yaml.Node, column: int) -> list[_Cell]:
    place = column + node.start_mark.column
    if isinstance(node, yaml.ScalarNode):
        return [_Cell(node.value, place)]
    if isinstance(node, yaml.SequenceNode):
        cells = [cell for item in node.value if isinstance(item, yaml.ScalarNode) for cell in _values(item, column)]
        if len(cells) == len(node.value):
            return cells
    raise _Wrong(place, "an item must be a value or a list of values")


def unquoted(text: str) -> str:
    return re.sub(r"""\"([^\"]*)\"|'([^']*)'""", lambda match: match[1] if match[1] is not None else match[2], text)


Place = tuple[Key, ...]
Setting = tuple[Place, str, Values]
"""Position of a key, the key, and its values."""


def _text(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _texts(value: object) -> object:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else [_text(value)]


Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class CampaignSettings(Record):
    """Options and environment variables of jobs; options are keys of ``params`` or of the mapping itself."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Texts] = Field(init=False)

    env: dict[str, Text] = Field(default_factory=dict)
    params: dict[str, Texts] = Field(default_factory=dict)

    def settings(self) -> Iterator[Setting]:
        yield from ((("env", name), f"{ENVIRONMENT}{name}", (value,)) for name, value in self.env.items())
        yield from ((("params", key), key, values) for key, values in self.params.items())
        yield from (((key,), key, values) for key, values in (self.__pydantic_extra__ or {}).items())


_ENTRY = tuple(option.field for option in entry_options().values() if option.field != "sizes")
_FIELDS: dict[str, Any] = dict.fromkeys(_ENTRY, (Texts | None, None))
_Entry: Any = create_model("_Entry", __base__=Record, **_FIELDS)


class Task(_Entry):  # an entry's options are its fields
    """A selection of a workload's jobs, and their settings."""

    sweep: dict[str, Texts] = Field(default_factory=dict)
    overrides: CampaignSettings = CampaignSettings()

    def selection(self) -> Iterator[Setting]:
        """Yield the specified settings for the selection, the repeats and the profile."""
        for name in ("sizes", *_ENTRY):
            if (values := getattr(self, name, None)) is not None:
                yield (name,), name, values

    def settings(self) -> Iterator[Setting]:
        yield from ((("sweep", key), key, values) for key, values in self.sweep.items())
        yield from _below("overrides", self.overrides)


class RecipeTasks(Task):
    """All jobs of a workload in one or more sizes."""

    sizes: Texts | None = None
    defaults: CampaignSettings = CampaignSettings()
    tasks: tuple[Task, ...] = ()


class FileDefaults(Task):
    """Defaults for every recipe in the file."""

    env: dict[str, Text] = Field(default_factory=dict)
    params: dict[str, Texts] = Field(default_factory=dict)

    def settings(self) -> Iterator[Setting]:
        yield from CampaignSettings(env=self.env, params=self.params).settings()
        yield from super().settings()


class CampaignFile(Record):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RecipeTasks] = Field(init=False)

    defaults: FileDefaults = FileDefaults()
    sweep: dict[str, Texts] = Field(default_factory=dict)
    overrides: CampaignSettings = CampaignSettings()


def _below(key: str, settings: CampaignSettings) -> Iterator[Setting]:
    yield from (((key, *keys), name, values) for keys, name, values in settings.settings())


class YamlReader:
    """Reads the entries of a YAML file; collects its problems as ``file:line: what``."""

    def __init__(self, path: Path, keys: Keys, split_model: SplitModel) -> None:
        self.path = path
        self.keys = keys
        self.split_model = split_model
        self.entries: list[Entry] = []
        self.problems: list[str] = []

    def read(self) -> None:
        """Read the file; store entries in ``entries``, and anything invalid in ``problems``."""
        try:
            file = read_file(self.path, CampaignFile, foreign=True)
            root = compose_file(self.path)
        except CatalogueError as error:
            self.problems.extend(error.problems)
            return
        self.problems.extend(f"{self.path}:{line}: duplicate key '{key}'" for line, key in duplicate_keys(root))
        for name, recipe in (file.__pydantic_extra__ or {}).items():
            try:
                workload, size = self.split_model(name)
            except UsageError as error:
                self.problems.append(f"{self._where(root, (name,))}: {problem_text(error)}")
                continue
            for keys, task in _tasks(name, recipe):
                draft = Draft(keys=self.keys, where=self._where(root, keys), workloads=(workload,))
                draft.fields.update({"sizes": (size,)} if size else {})
                self._fill(draft, root, _layers(file, name, recipe, keys, task))
                self.entries.append(draft.entry())
        self.problems = list(dict.fromkeys(self.problems))

    def _fill(self, draft: Draft, root: yaml.Node, settings: Iterator[Setting]) -> None:
        for keys, key, values in settings:
            try:
                draft.set(key, values)
            except UsageError as error:
                self.problems.append(f"{self._where(root, keys)}: {'.'.join(map(str, keys))}: {problem_text(error)}")

    def _where(self, root: yaml.Node, keys: Place) -> str:
        return f"{self.path}:{line_in(root, keys)}"


def _tasks(name: str, recipe: RecipeTasks) -> Iterator[tuple[Place, Task | None]]:
    if not recipe.tasks:
        yield (name,), None
    yield from (((name, "tasks", number), task) for number, task in enumerate(recipe.tasks))


def _layers(file: CampaignFile, name: str, recipe: RecipeTasks, keys: Place, task: Task | None) -> Iterator[Setting]:
    """Yield the settings of a task in order of increasing precedence."""
    for layer in (file.defaults.selection(), file.defaults.settings()):
        yield from ((("defaults", *place), key, values) for place, key, values in layer)
    yield from ((("sweep", key), key, values) for key, values in file.sweep.items())
    below_recipe = [_below("defaults", recipe.defaults), recipe.selection(), recipe.settings()]
    for layer in below_recipe:
        yield from (((name, *place), key, values) for place, key, values in layer)
    for layer in (task.selection(), task.settings()) if task else ():
        yield from (((*keys, *place), key, values) for place, key, values in layer)
    yield from _below("overrides", file.overrides)


YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The entries of a file, and its problems with file and line."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_campaign_file(path: Path, keys: Keys, split_model: SplitModel) -> FileEntries:
    """Read a campaign file; raise UsageError if it cannot be read, lists no jobs, or belongs to another user."""
    check_owner(path)
    text = read_text_file(path)
    reader: YamlReader | TextReader
    if path.suffix.lower() in YAML_SUFFIXES:
        reader = YamlReader(path, keys, split_model)
        reader.read()
    else:
        reader = TextReader(str(path), keys, split_model)
        try:
            reader.read(text.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError("the campaign file is not UTF-8 text", where=str(path), do="save it as UTF-8") from error
    if not reader.entries and not reader.problems:
        do = see("run-many-recipes", "for the format of files")
        raise UsageError("the file lists no jobs", where=str(path), do=do)
    return FileEntries(tuple(reader.entries), tuple(reader.problems))
