# SPDX-License-Identifier: Apache-2.0
"""Changes files of settings on disk: one value at a time, or a file of the reference suite as a whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from llmb.catalogue.data_files import CatalogueError, read_data
from llmb.catalogue.yaml_check import FOREIGN_LOADER
from llmb.errors import UsageError
from llmb.runs.folder import cannot_write, write_atomically
from llmb.secrets import holds_secret
from llmb.site.cluster_config import SettingsFile, unusable
from llmb.site.edited_text import CannotEdit, with_value, without_value
from llmb.site.reference_config import form_of
from llmb.site.settings_keys import split_key

KEPT = ".reference"
"""Ends the name of a migrated file's old form."""
NEW_FILE = "# See 'llmb config show' for what holds, and docs/reference/files.md for all keys.\n"


def set_value(path: Path, schema: type[BaseModel], key: str, text: str) -> str:
    """Writes the value that ``text`` is in YAML, or the text itself, and returns it as it is written.

    Raises UsageError for an unknown key, for a value that the schema does not allow, and for a file that has to be
    edited by hand; EnvironmentProblem where it cannot be written.
    """
    keys = split_key(schema, key)
    if holds_secret(keys[-1], text):
        raise UsageError(f"{key} looks like a secret, and settings are no place for one", do="keep it in your shell")
    before = _text(path)
    problems: list[str] = []
    for value in _values(text):
        edited = _edited(path, lambda value=value: with_value(before, keys, value))  # type: ignore[misc]
        if found := _problems(schema, edited):
            problems = problems or found
            continue
        _write(path, edited if before else NEW_FILE + edited)
        return str(value)
    if _problems(schema, before) == problems:
        raise unusable(path, [f"{path}: {problem}" for problem in problems])
    raise UsageError(f"{key} cannot be '{text}':\n" + "\n".join(f"  - {problem}" for problem in problems))


def unset_value(path: Path, schema: type[BaseModel], key: str) -> None:
    """Raises UsageError for a key that the file does not have, and as above."""
    keys = split_key(schema, key)
    before = _text(path)
    try:
        edited = _edited(path, lambda: without_value(before, keys))
    except KeyError as error:
        raise UsageError(f"{key} is not set there", where=str(path), do="see 'llmb config show'") from error
    _write(path, edited)


def migrate(file: SettingsFile) -> Path:
    """Writes a file of the reference suite in llmb's form, and returns where the old one is kept.

    At any time there is a whole file. Raises UsageError where another old one is kept already, EnvironmentProblem.
    """
    kept = file.path.with_name(file.path.name + KEPT)
    try:
        if kept.exists() and kept.read_bytes() != file.path.read_bytes():
            raise UsageError("another file of the reference suite is kept there", where=str(kept), do="rename it")
        if not kept.exists():
            shutil.copy2(file.path, kept)
        kept.chmod(0o600)
        write_atomically(file.path, migrated_text(file))
    except OSError as error:
        raise cannot_write(file.path, error) from error
    return kept


def migrated_text(file: SettingsFile) -> str:
    """The file in llmb's form, with what was not taken as comments."""
    form = file.form.title if file.form else ""
    head = [f"# Made by 'llmb config migrate' from the reference suite's cluster_config.yaml ({form})."]
    head += [f"# {note}" for note in (*file.notes[1:], *file.left_out)]
    body = yaml.safe_dump(dict(file.data), sort_keys=False, allow_unicode=True, width=110)
    return "\n".join(head) + "\n" + body


def _text(path: Path) -> str:
    """Raises UsageError for a file of the reference suite, or one that is no YAML."""
    if not path.exists():
        return ""
    try:
        data = read_data(path)
        if form_of(data):
            do = "'llmb config migrate' writes it in llmb's form"
            raise UsageError("it is the reference suite's, and llmb changes only its own", where=str(path), do=do)
    except CatalogueError as error:
        raise unusable(path, error.problems) from error
    except ValueError as error:
        raise unusable(path, [f"{path}: {error}"]) from error
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:  # YAML may be UTF-16, too
        raise unusable(path, [f"{path}: it is not UTF-8"]) from error


def _problems(schema: type[BaseModel], text: str) -> list[str]:
    try:
        schema.model_validate(yaml.load(text, Loader=FOREIGN_LOADER) or {})  # noqa: S506 (a safe loader)
    except ValidationError as error:
        named = ((".".join(map(str, item["loc"])), item["msg"]) for item in error.errors())
        return [f"{name}: {what}" if name else what for name, what in named]
    return []


def _values(text: str) -> list[Any]:
    """What the text may mean: a value of YAML, else itself."""
    try:
        value = yaml.load(text, Loader=FOREIGN_LOADER)  # noqa: S506 (a safe loader)
    except yaml.YAMLError:
        return [text]
    return [value] if value == text else [value, text]


def _edited(path: Path, edit: Callable[[], str]) -> str:
    try:
        return edit()
    except CannotEdit as error:
        where, what = f"{path}:{error.line}", "a value is written there in a way that llmb does not edit"
        raise UsageError(what, where=where, do="change it there") from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise cannot_write(path, error) from error
