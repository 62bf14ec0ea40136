# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists of hosts, such as ``node[1-2,07],login``. Pure."""

import re
from collections.abc import Iterator

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
    for span in bracket[1].split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            head = f"{part[: bracket.start()]}{number:0{len(first)}d}"
            for tail in _names(part[bracket.end() :] or ""):
                yield head + tail
