# SPDX-License-Identifier: Apache-2.0
"""The project's own documentation, which every installation has: cluster nodes often reach no web page."""

from dataclasses import dataclass
from pathlib import Path

from llmb.errors import unknown

FOLDER = Path(__file__).parent / "docs"
SECTIONS = ("tutorial", "how-to", "reference", "explanation")


@dataclass(frozen=True, slots=True)
class DocPage:
    name: str
    """Name of its file without the ending; unique over all sections."""
    section: str
    title: str
    path: Path


def see(page: str, what: str = "") -> str:
    """The advice to read a page, by the command that prints it; ``what`` it tells may follow."""
    return f"see 'llmb docs {page}'{what and ' '}{what}"


def doc_pages(folder: Path = FOLDER) -> list[DocPage]:
    """In the order of the sections, by name."""
    return [_page(section, path) for section in SECTIONS for path in sorted((folder / section).glob("*.md"))]


def find_doc_page(name: str, folder: Path = FOLDER) -> DocPage:
    """By its name or its path below ``docs``. Raises UsageError with similar names."""
    pages = {page.name: page for page in doc_pages(folder)}
    wanted = Path(name).stem
    if wanted not in pages:
        raise unknown("page", wanted, pages, do="'llmb docs' lists all pages")
    return pages[wanted]


def _page(section: str, path: Path) -> DocPage:
    with path.open(encoding="utf-8") as file:
        return DocPage(path.stem, section, file.readline().lstrip("# ").strip(), path)
