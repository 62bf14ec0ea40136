# SPDX-License-Identifier: Apache-2.0
"""Numbers and lists in words. Pure."""

from collections.abc import Iterable

MOST = 4
"""Items of a list that are shown; the rest is counted."""
GIB = 2**30


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(items: Iterable[str]) -> str:
    found = list(items)
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(found[:MOST]) + more


def indexes(found: Iterable[int]) -> str:
    """GPUs by their numbers."""
    numbers = sorted(found)
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))}"


def gib(size: float) -> str:
    """Bytes in GiB, or MiB if they are few."""
    if size >= GIB:
        return f"{size / GIB:,.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB"


def gb(size: float) -> str:
    """Bytes in GB or TB, as disks are sold."""
    number, unit = (size / 1e12, "TB") if size >= 1e12 else (size / 1e9, "GB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
