# SPDX-License-Identifier: Apache-2.0
"""Text that people read uses the terms of the glossary."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {GLOSSARY})
MODULES = sorted(path for folder in ("src", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def avoided() -> list[str]:
    """The left column of the glossary's last table."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.read_text().partition("## Words to avoid")[2], re.MULTILINE)
    return [phrase.strip() for row in rows[1:] for phrase in row.split(",") if phrase.strip(" -")]


AVOIDED = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in avoided()), re.IGNORECASE)


def texts_of(module: str) -> Iterator[tuple[int, str]]:
    """Docstrings and other strings of a module, and its comments."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(module).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found_in(text: str, line: int = 1) -> list[str]:
    folded = text.replace("\n", " ")  # a phrase may be broken across lines
    return [f"{line + text.count(chr(10), 0, hit.start())}: {hit[0]}" for hit in AVOIDED.finditer(folded)]


def test_the_table_is_read() -> None:
    phrases = avoided()
    assert "share out" in phrases
    assert "do not use" not in phrases
    assert found_in("what ranks\nshare\nout") == ["2: share out"]


def test_strings_and_comments_of_a_module_are_read() -> None:
    module = '"""Ranks\nshare out."""\n\nraise ValueError(f"given twice: {1}")  # tried again\n'
    hits = [hit for line, text in texts_of(module) for hit in found_in(text, line)]
    assert hits == ["2: share out", "4: given twice", "4: tried again"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_terms_of_the_glossary(page: Path) -> None:
    assert found_in(CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_modules_use_the_terms_of_the_glossary(module: Path) -> None:
    hits = [hit for line, text in texts_of(module.read_text()) for hit in found_in(text, line)]
    assert hits == []
