# SPDX-License-Identifier: Apache-2.0
"""Reads a campaign file, YAML or text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, create_model

from llmb.campaigns.entry import ENVIRONMENT, Draft, Entry, Keys, Values, entry_options
from llmb.campaigns.expansion import problem_text
from llmb.campaigns.text_file import SplitModel, TextReader
from llmb.catalogue.data_files import CatalogueError, Key, compose_file, duplicate_keys, line_in, read_file
from llmb.catalogue.records import Record
from llmb.doc_pages import see
from llmb.errors import UsageError
from llmb.input_files import read_text_file
from llmb.trust import check_owner

Place = tuple[Key, ...]
Setting = tuple[Place, str, Values]
"""Position of a key, the key, and its values."""


def _text(value: object) -> object:
    """A YAML scalar as text of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _texts(value: object) -> object:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else [_text(value)]


Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class CampaignSettings(Record):
    """Options and variables of jobs; options are keys of ``params`` or of the mapping itself."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Texts] = Field(init=False)

    env: dict[str, Text] = Field(default_factory=dict)
    params: dict[str, Texts] = Field(default_factory=dict)

    def settings(self) -> Iterator[Setting]:
        yield from ((("env", name), f"{ENVIRONMENT}{name}", (value,)) for name, value in self.env.items())
        yield from ((("params", key), key, values) for key, values in self.params.items())
        yield from (((key,), key, values) for key, values in (self.__pydantic_extra__ or {}).items())


_OWN = tuple(option.field for option in entry_options().values() if option.field != "sizes")
_FIELDS: dict[str, Any] = dict.fromkeys(_OWN, (Texts | None, None))
_Own: Any = create_model("_Own", __base__=Record, **_FIELDS)


class Task(_Own):  # an entry's options are its fields
    """Jobs of one recipe. Missing keys are those of the recipe, then of the file's defaults."""

    sweep: dict[str, Texts] = Field(default_factory=dict)
    overrides: CampaignSettings = CampaignSettings()

    def own(self) -> Iterator[Setting]:
        """Selection, repeats and profile, as far as specified here."""
        for name in ("sizes", *_OWN):
            if (values := getattr(self, name, None)) is not None:
                yield (name,), name, values

    def settings(self) -> Iterator[Setting]:
        yield from ((("sweep", key), key, values) for key, values in self.sweep.items())
        yield from _below("overrides", self.overrides)


class RecipeTasks(Task):
    """All jobs of a workload and a size, or several sizes."""

    sizes: Texts | None = None
    defaults: CampaignSettings = CampaignSettings()
    tasks: tuple[Task, ...] = ()


class FileDefaults(Task):
    """Defaults of every recipe of the file."""

    env: dict[str, Text] = Field(default_factory=dict)
    params: dict[str, Texts] = Field(default_factory=dict)

    def settings(self) -> Iterator[Setting]:
        yield from CampaignSettings(env=self.env, params=self.params).settings()
        yield from super().settings()


class CampaignFile(Record):
    """A complete file; every key except these three is a recipe."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RecipeTasks] = Field(init=False)

    defaults: FileDefaults = FileDefaults()
    sweep: dict[str, Texts] = Field(default_factory=dict)
    overrides: CampaignSettings = CampaignSettings()


def _below(key: str, settings: CampaignSettings) -> Iterator[Setting]:
    yield from (((key, *keys), name, values) for keys, name, values in settings.settings())


class YamlReader:
    """Entries of a file, and its problems as ``file:line: what``."""

    def __init__(self, path: Path, keys: Keys, split_model: SplitModel) -> None:
        self.path = path
        self.keys = keys
        self.split_model = split_model
        self.entries: list[Entry] = []
        self.problems: list[str] = []

    def read(self) -> None:
        """Raises UsageError if the file cannot be parsed."""
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
    """Each task with its position; a recipe without tasks is one task."""
    if not recipe.tasks:
        yield (name,), None
    yield from (((name, "tasks", number), task) for number, task in enumerate(recipe.tasks))


def _layers(file: CampaignFile, name: str, recipe: RecipeTasks, keys: Place, task: Task | None) -> Iterator[Setting]:
    """Settings of a task, those with the highest precedence last."""
    for layer in (file.defaults.own(), file.defaults.settings()):
        yield from ((("defaults", *place), key, values) for place, key, values in layer)
    yield from ((("sweep", key), key, values) for key, values in file.sweep.items())
    below_recipe = [_below("defaults", recipe.defaults), recipe.own(), recipe.settings()]
    for layer in below_recipe:
        yield from (((name, *place), key, values) for place, key, values in layer)
    for layer in (task.own(), task.settings()) if task else ():
        yield from (((*keys, *place), key, values) for place, key, values in layer)
    yield from _below("overrides", file.overrides)


YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The entries of a file, and its problems with file and line."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_campaign_file(path: Path, keys: Keys, split_model: SplitModel) -> FileEntries:
    """Raises UsageError if the file cannot be read, has no entries, or is another user's."""
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
            raise UsageError("this is not a text file", where=str(path)) from error
    if not reader.entries and not reader.problems:
        do = see("run-many-recipes", "for the format of files")
        raise UsageError("the file names no job", where=str(path), do=do)
    return FileEntries(tuple(reader.entries), tuple(reader.problems))
