# SPDX-License-Identifier: Apache-2.0
"""Short names of logs that stay unambiguous. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path

_ACCOUNT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?")


def display_names(paths: Iterable[Path], root: Path, *, full: bool) -> dict[Path, str]:
    """Short names (with ``full`` file names); equal names are distinguished by the parts of their paths that differ."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        groups[path.name if full else _short_name(path.name)].append(path)
    names: dict[Path, str] = {}
    for name, group in groups.items():
        names |= _distinguished(name, group, root) if len(group) > 1 else {group[0]: name}
    taken = Counter(names.values())
    return {path: text_of(name if taken[name] == 1 else path.relative_to(root)) for path, name in names.items()}


def _short_name(file_name: str) -> str:
    """The experiment and its job: without ``log-``, the account, ``.out`` and the number of a first attempt."""
    return _ACCOUNT.sub("", file_name).removesuffix(".gz").removesuffix(".out").removesuffix("_0") or file_name


def _distinguished(name: str, group: Sequence[Path], root: Path) -> dict[Path, str]:
    """Names of files that share ``name``: the parts of their paths that differ, and the name unless they contain it."""
    parts = [path.relative_to(root).parts for path in group]
    if len({len(own) for own in parts}) > 1:
        return {path: "/".join(own) for path, own in zip(group, parts, strict=True)}
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = {}
    for path, own in zip(group, parts, strict=True):
        different = "/".join(compress(own, differs))
        names[path] = different if name in different else f"{different}/{name}"
    return names


def text_of(name: object) -> str:
    """Bytes of a file name that are not UTF-8 are escaped, so that any output can hold them."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")
