# SPDX-License-Identifier: Apache-2.0
"""Sets and removes single values in the text of a YAML file, and keeps everything else of it, comments too. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from llmb.catalogue.yaml_check import FOREIGN_LOADER

Keys = Sequence[str]
INDENT = 2


class CannotEdit(Exception):
    """The file is written in a way that single values cannot be replaced in; has the line, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def with_value(text: str, keys: Keys, value: object) -> str:
    """``text`` with ``value`` at ``keys``. Raises CannotEdit."""
    text, ends = _lines_of(text)
    wanted = _data(text)
    _place(wanted, keys[:-1])[keys[-1]] = value
    return _checked(_set(text, keys, value), wanted, text, keys).replace("\n", ends)


def without_value(text: str, keys: Keys) -> str:
    """``text`` without ``keys``, and without what is then empty above them.

    Raises KeyError if they are not there, CannotEdit.
    """
    text, ends = _lines_of(text)
    wanted = _data(text)
    keys = list(keys)
    while len(keys) > 1 and list(_found(wanted, keys[:-1])) == [keys[-1]]:
        keys.pop()
    _found(wanted, keys)
    del _found(wanted, keys[:-1])[keys[-1]]
    return _checked(_removed(text, keys), wanted, text, keys).replace("\n", ends)


def _lines_of(text: str) -> tuple[str, str]:
    """With plain ends of lines, and what they end in: that of Windows, where there is one."""
    return text.replace("\r\n", "\n"), "\r\n" if "\r\n" in text else "\n"


def _data(text: str) -> dict[str, Any]:
    data = yaml.load(text, Loader=FOREIGN_LOADER)  # noqa: S506 (a safe loader)
    return _unshared(data) if isinstance(data, dict) else {}


def _unshared(data: Any) -> Any:  # noqa: ANN401 (whatever is there)
    """Aliases as copies: a change of one of them shows."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(item) for item in data] if isinstance(data, list) else data


def _found(data: Mapping[str, Any], keys: Keys) -> Any:  # noqa: ANN401 (whatever is there)
    for key in keys:
        data = data[key]
    return data


def _place(data: dict[str, Any], keys: Keys) -> dict[str, Any]:
    for key in keys:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    return data


def _checked(edited: str, wanted: Mapping[str, Any], before: str, keys: Keys) -> str:
    """``edited`` if it says what is wanted, and nothing else."""
    try:
        if _data(edited) == wanted:
            return edited
    except yaml.YAMLError:
        pass
    node, _ = _nearest(before, keys)
    raise CannotEdit(node.start_mark.line + 1 if node else 1)


def _nearest(text: str, keys: Keys) -> tuple[Any, list[str]]:
    """The node that the longest part of ``keys`` leads to, and the rest of them."""
    node, rest = yaml.compose(text, Loader=FOREIGN_LOADER), list(keys)
    while rest and isinstance(node, yaml.MappingNode):
        child = next((value for name, value in node.value if name.value == rest[0]), None)
        if child is None:
            break
        node, rest = child, rest[1:]
    return node, rest


def _set(text: str, keys: Keys, value: object) -> str:
    node, rest = _nearest(text, keys)
    if node is None:
        body = text if not text or text.endswith("\n") else f"{text}\n"
        return body + _lines(keys, value, 0)
    if not rest:
        return _replaced(text, node, _flow(value))
    if not isinstance(node, yaml.MappingNode):  # such as 'slurm:' without a value
        return _replaced(text, node, _flow(_nested(rest, value)))
    if node.flow_style:
        pair = _flow(_nested(rest, value))[1:-1]
        end = node.end_mark.index - 1
        if node.value:
            last = node.value[-1][1].end_mark.index
            return f"{text[:last]}, {pair}{text[last:]}"
        return f"{text[:end]}{pair}{text[end:]}"
    last = _end_of(text, node.value[-1][1])
    before = text[:last] if text[:last].endswith("\n") else f"{text[:last]}\n"
    return before + _lines(rest, value, node.value[0][0].start_mark.column) + text[last:]


def _replaced(text: str, node: Any, new: str) -> str:  # noqa: ANN401 (yaml's nodes are untyped)
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and start == end:
        return f"{text[:start]} {new}{text[end:]}"
    if not isinstance(node, yaml.ScalarNode) and not node.flow_style:
        end = _end_of(text, node)
        start = text.rfind(":", 0, start) + 1
        return f"{text[:start]} {new}\n{text[end:]}"
    return text[:start] + new + text[end:]


def _end_of(text: str, node: Any) -> int:  # noqa: ANN401 (yaml's nodes are untyped)
    """Where the last line of a block's last value ends. A block's own end mark lies behind comments that follow."""
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark.index
    if end and text[end - 1] == "\n":
        return int(end)
    line = text.find("\n", end)
    return len(text) if line < 0 else line + 1


def _removed(text: str, keys: Keys) -> str:
    above, _ = _nearest(text, keys[:-1])
    pairs = above.value
    number = next(number for number, (name, _) in enumerate(pairs) if name.value == keys[-1])
    name, value = pairs[number]
    if not above.flow_style:
        start = text.rfind("\n", 0, name.start_mark.index) + 1
        return text[:start] + text[_end_of(text, value) :]
    if number + 1 < len(pairs):
        return text[: name.start_mark.index] + text[pairs[number + 1][0].start_mark.index :]
    start = pairs[number - 1][1].end_mark.index if number else name.start_mark.index
    return text[:start] + text[value.end_mark.index :]


def _lines(keys: Keys, value: object, column: int) -> str:
    heads = (f"{' ' * (column + INDENT * depth)}{_flow(key)}:" for depth, key in enumerate(keys))
    return "\n".join(heads) + f" {_flow(value)}\n"


def _nested(keys: Keys, value: object) -> object:
    for key in reversed(keys):
        value = {key: value}
    return value


def _flow(value: object) -> str:
    """On one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return str(text).removesuffix("\n...\n").rstrip("\n")
