# SPDX-License-Identifier: Apache-2.0
"""The project gets smaller: no part of it has more lines of Python than ``lines.txt`` says.

Whoever needs more raises the number there, and says why behind it; whoever deletes lines lowers it.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {
    part: int(limit)
    for part, limit, *_ in (line.split(maxsplit=2) for line in (ROOT / "tests" / "lines.txt").read_text().splitlines())
}
SLACK = 40
"""Lines that a part may have less than it says."""


def parts() -> list[str]:
    packages = [path.parent.relative_to(ROOT) for path in sorted((ROOT / "src" / "llmb").glob("*/__init__.py"))]
    return [*map(str, packages), "src/llmb", "tests", "benchmarks", "scripts"]


def lines_of(part: str) -> int:
    """Of the modules beside the packages alone for ``src/llmb``."""
    paths = (ROOT / part).glob("*.py") if part == "src/llmb" else (ROOT / part).rglob("*.py")
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def test_every_part_has_a_limit() -> None:
    assert sorted(LIMITS) == sorted(parts())


@pytest.mark.parametrize("part", parts())
def test_a_part_has_no_more_lines_than_it_says(part: str) -> None:
    lines = lines_of(part)
    assert lines <= LIMITS[part], "raise the limit in tests/lines.txt, and say why there"
    assert lines >= LIMITS[part] - SLACK, f"lower the limit in tests/lines.txt to {lines}"
