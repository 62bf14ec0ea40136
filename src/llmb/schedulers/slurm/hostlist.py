# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists of hosts, such as ``node[1-2,07],login``. Pure."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from llmb.options.forms import parse_ranges

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def expand(hosts: str | None) -> list[str]:
    """Every name of the list; empty for none. Raises ValueError."""
    if re.search(r"[\[\]]", _BRACKET.sub("", hosts or "")):
        raise ValueError("a bracket lacks its other one")
    return [name for part in _PART.findall(hosts or "") for name in _names(part)]


def compress(names: Iterable[str]) -> str:
    """The names as one list, sorted, each of them once; ``node1``, ``node2`` as ``node[1-2]``."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        head, digits, tail = found.groups() if found else (name, "", "")
        numbers.setdefault((head, tail), set()).add(digits)
    return ",".join(part for (head, tail), found in sorted(numbers.items()) for part in _families(head, tail, found))


def _families(head: str, tail: str, numbers: set[str]) -> Iterator[str]:
    """Numbers of as many digits as one with leading zeros have leading zeros, too."""
    padded = {len(digits) for digits in numbers if len(digits) > 1 and digits.startswith("0")}
    for width in (0, *sorted(padded)):
        own = {int(digits) for digits in numbers if digits and (len(digits) if len(digits) in padded else 0) == width}
        if own:
            yield _family(head, width, tail, sorted(own))
    if "" in numbers:
        yield head + tail


def _family(head: str, width: int, tail: str, numbers: list[int]) -> str:
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    spans = [f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs]
    return f"{head}{spans[0]}{tail}" if len(numbers) == 1 else f"{head}[{','.join(spans)}]{tail}"


def _names(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if not bracket:
        yield part
        return
    for span in parse_ranges(bracket[1]):
        for number in span.numbers:
            head = f"{part[: bracket.start()]}{number:0{span.width}d}"
            for tail in _names(part[bracket.end() :] or ""):
                yield head + tail
