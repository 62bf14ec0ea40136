# SPDX-License-Identifier: Apache-2.0
"""Text that people read uses the terms of the glossary."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = Path(__file__).with_name("words_to_avoid.txt")
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
MODULES = sorted(path for folder in ("src", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CLAUSE = re.compile(r"(?:What|Whether|Those|Of|As|By|Raises|The same)\b")
"""Docstrings that are no sentence without the name that they stand at."""
NAME = re.compile(r"^(?: {4})?(?:def |class )([A-Za-z]\w*)|^([A-Z][A-Z_]+) =", re.MULTILINE)
PARTICIPLE = re.compile(
    r"(?:^|_)(?:asked|convicted|cut|found|given|heard?|kept|known|own|said|seen|taken|told|wanted)(?:_|$)"
)


def avoided() -> list[str]:
    """Regular expressions of the phrases left of each arrow."""
    rows = [row.partition(" => ")[0] for row in WORDS.read_text().splitlines() if not row.startswith("#")]
    phrases = [phrase.strip() for row in rows for phrase in (row.split(",") if row[:1] != "~" else [row]) if phrase]
    return [phrase[1:] if phrase[0] == "~" else re.escape(phrase.lower()) for phrase in phrases]


AVOIDED = re.compile(rf"\b(?:{'|'.join(avoided())})\b")
"""In lower case: a search that ignores the case takes much longer."""


@cache
def strings_of(module: str) -> list[tuple[int, str, bool]]:
    """Each with its line, and whether it is a statement, as docstrings are."""
    nodes = list(ast.walk(ast.parse(module)))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [(node.lineno, str(node.value), id(node) in statements) for node in texts]


def comments_of(module: str) -> Iterator[tuple[int, str]]:
    """None are looked for, which takes long, where no line has both a phrase and what may begin a comment."""
    if any("#" in line and AVOIDED.search(line) for line in module.lower().splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(module).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def texts_of(module: str) -> Iterator[tuple[int, str]]:
    """Docstrings and other strings of a module, and its comments."""
    yield from ((line, text) for line, text, _ in strings_of(module))
    yield from comments_of(module)


def found_in(text: str, line: int = 1) -> list[str]:
    folded = text.lower().replace("\n", " ")  # a phrase may be broken across lines
    return [f"{line + text.count(chr(10), 0, hit.start())}: {hit[0]}" for hit in AVOIDED.finditer(folded)]


def test_the_list_is_read() -> None:
    assert found_in("what ranks\nshare\nout") == ["2: share out"]
    assert found_in("there is no text, it is no longer here") == []
    assert found_in("it is no text") == ["1: is no text"]


def test_strings_and_comments_of_a_module_are_read() -> None:
    module = '"""Ranks\nshare out."""\n\nraise ValueError(f"given twice: {1}")  # tried again\n'
    hits = [hit for line, text in texts_of(module) for hit in found_in(text, line)]
    assert hits == ["2: share out", "4: given twice", "4: tried again"]


def test_pages_use_the_terms_of_the_glossary() -> None:
    texts = {page: CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.read_text()) for page in PAGES}
    assert [f"{page}:{hit}" for page, text in texts.items() for hit in found_in(text)] == []


def test_modules_use_the_terms_of_the_glossary() -> None:
    texts = ((module, line, text) for module in MODULES for line, text in texts_of(module.read_text()))
    assert [f"{module}:{hit}" for module, line, text in texts for hit in found_in(text, line)] == []


def test_docstrings_do_not_continue_the_name_above_them() -> None:
    modules = [path for path in MODULES if path.relative_to(ROOT).parts[0] != "benchmarks"]
    texts = ((module, *each) for module in modules for each in strings_of(module.read_text()))
    assert [f"{module}:{line}" for module, line, text, alone in texts if alone and CLAUSE.match(text)] == []


def test_no_function_class_or_constant_is_called_by_a_participle() -> None:
    modules = [path for path in MODULES if "src" in path.parts]
    names = ((path, "".join(match.groups(""))) for path in modules for match in NAME.finditer(path.read_text()))
    words = ((path, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) for path, name in names)
    assert [f"{path}: {name}" for path, name in words if PARTICIPLE.search(name)] == []
