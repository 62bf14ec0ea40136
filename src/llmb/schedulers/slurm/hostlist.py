# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists of hosts, such as ``node[1-2,07],login``. Pure."""

import re
from collections.abc import Iterator

from llmb.options.ranges import parse_ranges

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")


def expand(hosts: str | None) -> list[str]:
    """Every name of the list; empty for none."""
    return [name for part in _PART.findall(hosts or "") for name in _names(part)]


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
