# SPDX-License-Identifier: Apache-2.0
"""Edits settings files: sets or removes single values, or converts a file of the reference suite."""

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.tokens import CommentToken
from ruamel.yaml.util import load_yaml_guess_indent

from llmb.base.errors import UsageError, itemized
from llmb.base.secrets import holds_secret
from llmb.catalogue.data_files import FOREIGN_LOADER, MESSAGES, CatalogueError, read_data
from llmb.launch.documents.suite_cluster_config import form_of
from llmb.launch.site.cluster_config import SettingsFile, split_key, unusable
from llmb.runs.folder import write_atomically, writing

BACKUP_ENDING = ".reference"
"""Suffix of the copy of a migrated file."""
REMOVED = object()
"""Stands for the value of a key to remove."""
WIDTH = 10**6
NEW_FILE = "# For effective settings see 'llmb config show', for all keys 'llmb docs schema cluster_config.yaml'.\n"


def set_value(path: Path, schema: type[BaseModel], key: str, text: str) -> str:
    """Set a key to ``text``, parsed as YAML or, if that is invalid, as a string; return the value as text. Raises
    UsageError for an unknown key, a secret, or an invalid value or file, EnvironmentProblem if writing fails."""
    keys = split_key(schema, key)
    if holds_secret(keys[-1], text):
        raise UsageError(f"{key} looks like a secret", do="omit it: programs take HF_TOKEN from the submitting shell")
    before = _text(path)
    problems: list[str] = []
    for value in _values(text):
        edited = edited_text(path, before, keys, value)
        if reasons := _problems(schema, edited):
            problems = problems or reasons
            continue
        _write(path, edited if before else NEW_FILE + edited)
        return str(value)
    if (others := _problems(schema, before)) == problems:
        raise unusable(path, [f"{path}: {problem}" for problem in problems])
    do = f"{'first correct the file, or ' * bool(others)}pass a value as described above"
    if any(problem.startswith("container: ") for problem in problems):  # the runtime and the image require each other
        do = "set both in one command: llmb config set container '{runtime: pyxis, image: IMAGE}'"
    raise UsageError(f"{key} cannot be '{text}':{itemized(problems)}", do=do)


def unset_value(path: Path, schema: type[BaseModel], key: str) -> None:
    """Remove a key from a settings file; raise UsageError if llmb cannot, EnvironmentProblem if writing fails."""
    keys = split_key(schema, key)
    before = _text(path)
    try:
        edited = edited_text(path, before, keys)
    except KeyError as error:
        do = "run 'llmb config show' to see what is set, and where"
        raise UsageError(f"{key} is not set in this file", where=str(path), do=do) from error
    _write(path, edited)


def migrate(file: SettingsFile) -> Path:
    """Convert a file of the reference suite to llmb's format, and return the path of a copy of the original.

    The file is complete at any time. Raises UsageError if there is a copy with other content, EnvironmentProblem if
    writing fails."""
    backup = file.path.with_name(file.path.name + BACKUP_ENDING)
    with writing(file.path):
        if backup.exists() and backup.read_bytes() != file.path.read_bytes():
            raise UsageError("a backup with other content already exists", where=str(backup), do="rename it first")
        if not backup.exists():
            shutil.copy2(file.path, backup)
        backup.chmod(0o600)
        write_atomically(file.path, migrated_text(file))
    return backup


def migrated_text(file: SettingsFile) -> str:
    """Return the file's content in llmb's format, with notes on dropped and changed settings as comments."""
    form = file.form.title if file.form else ""
    head = [f"# Made by 'llmb config migrate' from the reference suite's cluster_config.yaml ({form})."]
    head += [f"# {note}" for note in (*file.notes[1:], *file.left_out)]
    body = yaml.safe_dump(dict(file.data), sort_keys=False, allow_unicode=True, width=110)
    return "\n".join(head) + "\n" + body


def _text(path: Path) -> str:
    """Read a settings file, which may be missing; raise UsageError if it is not UTF-8 YAML, or is the suite's."""
    if not path.exists():
        return ""
    try:
        data = read_data(path)
        if form_of(data):
            do = "run 'llmb config migrate' to convert it to llmb's format"
            raise UsageError("this file has the reference suite's format, not llmb's", where=str(path), do=do)
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
        texts = ((one, MESSAGES.get(one["type"], one["msg"].removeprefix("Value error, "))) for one in error.errors())
        return [": ".join(filter(None, (".".join(map(str, one["loc"])), what))) for one, what in texts]
    return []


def _values(text: str) -> list[Any]:
    try:
        value = yaml.load(text, Loader=FOREIGN_LOADER)  # noqa: S506 (a safe loader)
    except yaml.YAMLError:
        return [text]
    return [value] if value == text else [value, text]


def edited_text(path: Path, text: str, keys: Sequence[str], value: object = REMOVED) -> str:
    """Set or remove a key in ``text``; raise UsageError if llmb cannot edit it, KeyError if a key to remove is
    missing."""
    try:
        edited = with_value(text, keys, value)
        data = _data(text)
        _change(data, keys, value)
        if _data(edited) == data:
            return edited
    except (YAMLError, yaml.YAMLError):
        pass
    what = f"{'.'.join(keys)} is written in this file in a form that llmb cannot edit"
    raise UsageError(what, where=str(path), do="edit the file manually")


def with_value(text: str, keys: Sequence[str], value: object) -> str:
    """Return a YAML text with ``keys`` set to ``value`` or removed; comments and the order of keys are kept. Pure.

    Raises KeyError if a key to remove is missing, YAMLError if the text cannot be parsed.
    """
    plain = text.replace("\r\n", "\n")
    _, indent, offset = load_yaml_guess_indent(plain)
    file = YAML()
    file.preserve_quotes, file.width, file.explicit_start = True, WIDTH, plain.startswith("---")
    file.indent(mapping=offset or indent or 2, sequence=(offset or 0) + 2, offset=offset or 0)
    data, head = file.load(plain), ""
    if data is None:  # without keys, there is no node that could carry comments
        data, head = CommentedMap(), plain if plain.endswith("\n") or not plain else f"{plain}\n"
    _change(data, keys, value)
    written = io.StringIO()
    file.dump(data, written)
    edited = head + (written.getvalue() if data else "")
    return edited.replace("\n", "\r\n") if "\r\n" in text else edited


def _change(data: Any, keys: Sequence[str], value: object) -> None:  # noqa: ANN401 (ruamel.yaml's nodes)
    """Set or remove a value in parsed YAML; also remove parents that become empty."""
    while len(keys) > 1 and isinstance(data.get(keys[0]), dict):
        if value is REMOVED and _is_alone(data[keys[0]], keys[1:]):
            keys = keys[:1]
        else:
            data, keys = data[keys[0]], keys[1:]
    key, names = keys[0], list(data)
    if value is REMOVED:
        if len(keys) > 1 or key not in data:
            raise KeyError(key)
        behind, above = _take_comment(data, key), names[: names.index(key)]
        del data[key]
        _give_comment(data, above[-1] if above else None, behind)
        return
    behind = _take_comment(data, key if key in data else names[-1]) if names else ""
    data[key] = _node(_nested(keys[1:], value))
    _give_comment(data, key, behind)


def _is_alone(data: Any, keys: Sequence[str]) -> bool:  # noqa: ANN401 (whatever is there)
    for key in keys:
        if not isinstance(data, dict) or list(data) != [key]:
            return False
        data = data[key]
    return True


def _nested(keys: Sequence[str], value: object) -> object:
    for key in reversed(keys):
        value = {key: value}
    return value


def _node(value: object) -> Any:  # noqa: ANN401 (ruamel.yaml's nodes)
    """Convert a value to a node of ruamel.yaml, with the quotes that YAML 1.1 requires."""
    if isinstance(value, dict):
        return CommentedMap({key: _node(item) for key, item in value.items()})
    file = YAML()
    file.preserve_quotes = True
    return file.load(yaml.safe_dump(value, default_flow_style=True, width=WIDTH, allow_unicode=True))


def _last_comment(data: Any, key: Any) -> tuple[list[Any], int]:  # noqa: ANN401 (ruamel.yaml's nodes)
    """Return the list, and the index in it, of the comment that follows a value or the last value inside it."""
    while isinstance(data[key], CommentedMap | CommentedSeq) and data[key] and not data[key].fa.flow_style():
        data = data[key]
        key = next(reversed(data)) if isinstance(data, CommentedMap) else len(data) - 1
    return data.ca.items.setdefault(key, [None] * 4), 2 if isinstance(data, CommentedMap) else 0


def _take_comment(data: Any, key: object) -> str:  # noqa: ANN401 (ruamel.yaml's nodes)
    """Remove and return the comment lines after the line of a value, which belong to the next value."""
    if not isinstance(data, CommentedMap):
        return ""
    slots, place = _last_comment(data, key)
    if slots[place] is None:
        return ""
    comment, _, following = str(slots[place].value).partition("\n")
    if comment:
        slots[place].value = f"{comment}\n"
    else:
        slots[place] = None
    return following


def _give_comment(data: Any, key: object, text: str) -> None:  # noqa: ANN401 (ruamel.yaml's nodes)
    """Insert comment lines after the value of ``key``, or before the first key if ``key`` is None."""
    if not text or not data:
        return
    if key is not None:
        slots, place = _last_comment(data, key)
    elif data.ca.comment and data.ca.comment[0]:
        slots, place = data.ca.comment, 0
    else:
        before = data.ca.comment[1] if data.ca.comment and data.ca.comment[1] else []
        data.ca.comment = [None, [*before, _comment(text)]]
        return
    if slots[place]:
        slots[place].value += text
    else:
        slots[place] = _comment(f"\n{text}")


def _comment(text: str) -> CommentToken:
    return CommentToken(text, CommentMark(0), None)


def _data(text: str) -> dict[str, Any]:
    data = yaml.load(text, Loader=FOREIGN_LOADER)  # noqa: S506 (a safe loader)
    return _unshared(data) if isinstance(data, dict) else {}


def _unshared(data: Any) -> Any:  # noqa: ANN401 (whatever is there)
    """Replace aliases with copies, so that changing a copy does not change others."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(item) for item in data] if isinstance(data, list) else data


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(os.path.realpath(path)), text)
