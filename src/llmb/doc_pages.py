# SPDX-License-Identifier: Apache-2.0
"""The project's own documentation, which every installation has: cluster nodes often reach no web page."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmb.errors import unknown

FOLDER = Path(__file__).parent / "docs"
_WORD = re.compile(r"[a-z0-9][a-z0-9.]*[a-z0-9]")
_COMMON = {"my", "is", "the", "with", "how", "to", "of", "and", "for", "on", "in", "do", "which", "ar", "it", "an"}
_TASK = re.compile(r"^## (.*)$((?:.|\n(?!## ))*)", re.MULTILINE)
_LISTED = re.compile(r"^- \[.*?\]\((.*?)\):((?:.|\n(?!-|\n))*)", re.MULTILINE)
"""A page in the list of pages: its file, and what it is about."""


@dataclass(frozen=True, slots=True)
class DocPage:
    name: str
    """Name of its file without the ending; unique over all folders."""
    task: str
    """What it helps with: a heading of the list of pages."""
    title: str
    about: str
    path: Path


def see(page: str, what: str = "") -> str:
    """The advice to read a page, by the command that prints it; ``what`` it tells may follow."""
    return f"see 'llmb docs {page}'{what and ' '}{what}"


@cache
def doc_pages(folder: Path = FOLDER) -> tuple[DocPage, ...]:
    """As ``README.md`` lists them, by task."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    return tuple(
        _page(task[1], folder / listed[1], listed[2])
        for task in _TASK.finditer(text)
        for listed in _LISTED.finditer(task[2])
    )


def find_doc_page(name: str, folder: Path = FOLDER) -> DocPage:
    """By its name or its path below ``docs``. Raises UsageError with similar names."""
    pages = {page.name: page for page in doc_pages(folder)}
    wanted = Path(name).stem
    if wanted not in pages:
        raise unknown("page", wanted, pages, do="'llmb docs' lists all pages")
    return pages[wanted]


def _page(task: str, path: Path, about: str) -> DocPage:
    with path.open(encoding="utf-8") as file:
        title = next((line[2:].strip() for line in file if line.startswith("# ")), path.stem)
    return DocPage(path.stem, task, title, " ".join(about.split()), path)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that has a word, and the heading above the place where it has most of them."""

    page: DocPage
    heading: str
    score: float


def search_pages(text: str, folder: Path = FOLDER) -> list[FoundPage]:
    """The pages with any of the words, those first that have more of them, in titles and headings above all."""
    words = {_stem(word) for word in _WORD.findall(text.lower())} - _COMMON
    found = [_search(page, words) for page in doc_pages(folder)]
    return sorted((one for one in found if one.score), key=lambda one: -one.score)


def _search(page: DocPage, words: set[str]) -> FoundPage:
    points = _points(page.title, words, 10) + _points(page.name, words, 10) + _points(page.about, words, 6)
    best, heading, seen = 0.0, page.title, set[str]()
    for part in re.split(r"^#+ ", page.path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        own = _points(name, words, 4) + _points(body, words, 1)
        seen |= words & {_stem(word) for word in _WORD.findall(part.lower())}
        if own > best:
            best, heading = own, name.strip()
    return FoundPage(page, heading, (points + best) * len(seen) / max(1, len(words)))


def _points(text: str, words: set[str], each: float) -> float:
    return each * len(words & {_stem(word) for word in _WORD.findall(text.lower())})


def _stem(word: str) -> str:
    """Without the endings that forms of one word differ in."""
    return re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word)
