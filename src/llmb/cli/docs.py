# SPDX-License-Identifier: Apache-2.0
"""``llmb docs``: the project's own documentation, which every installation has, and the manual page.

Cluster nodes often reach no web page.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb import __version__
from llmb.cli.common import Json, option_names
from llmb.errors import LlmbError, UsageError, unknown
from llmb.report.output import print_markdown, print_output
from llmb.report.table import result_table

FOLDER = Path(__file__).parents[1] / "docs"
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


@cache
def doc_pages() -> tuple[DocPage, ...]:
    """As ``README.md`` lists them, by task."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return tuple(
        _read_page(task[1], FOLDER / listed[1], listed[2])
        for task in _TASK.finditer(text)
        for listed in _LISTED.finditer(task[2])
    )


def find_doc_page(name: str) -> DocPage:
    """By its name or its path below ``docs``. Raises UsageError with similar names."""
    pages = {page.name: page for page in doc_pages()}
    wanted = Path(name).stem
    if wanted not in pages:
        raise unknown("page", wanted, pages, do="'llmb docs' lists all pages")
    return pages[wanted]


def _read_page(task: str, path: Path, about: str) -> DocPage:
    with path.open(encoding="utf-8") as file:
        title = next((line[2:].strip() for line in file if line.startswith("# ")), path.stem)
    return DocPage(path.stem, task, title, " ".join(about.split()), path)


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that has a word, and the heading above the place where it has most of them."""

    page: DocPage
    heading: str
    score: float


def search_pages(text: str) -> list[FoundPage]:
    """The pages with any of the words, those first that have more of them, in titles and headings above all."""
    words = {_stem(word) for word in _WORD.findall(text.lower())} - _COMMON
    found = [_search(page, words) for page in doc_pages()]
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


MOST_FOUND = 8
ENVIRONMENT = {
    "LLMB_INSTALL": "The root of installation: where runs, logs and prepared data are. Default: the nearest folder "
    "above that holds cluster_config.yaml, else ~/.llmb.",
    "NO_COLOR": "No colors and no bold text.",
    "COLUMNS": "The width of tables.",
}


def man_page(commands: dict[str, tuple[str, Any]]) -> str:
    """``commands`` by their full names: what each does, and the command itself with its options."""
    lines = [
        f'.TH LLMB 1 "" "llmb {__version__}" "User Commands"',
        *_section("NAME", ["llmb \\- measures how fast a machine or a cluster trains large language models"]),
        *_section("SYNOPSIS", [".B llmb", r"\fICOMMAND\fR [\fIOPTION\fR]..."]),
        ".SH COMMANDS",
        *(line for name, (meaning, command) in commands.items() for line in _command(name, meaning, command)),
        *_section("EXIT STATUS", _terms(_exit_codes())),
        *_section("ENVIRONMENT", _terms(ENVIRONMENT)),
        *_section("SEE ALSO", _terms({f"llmb docs {page.name}": page.title for page in doc_pages()})),
    ]
    return "\n".join(lines) + "\n"


def _section(name: str, lines: Iterator[str] | list[str]) -> Iterator[str]:
    yield f".SH {name}"
    yield from lines


def _command(name: str, meaning: str, command: Any) -> Iterator[str]:  # noqa: ANN401 (typer keeps its types private)
    yield f".SS llmb {name}"
    yield _text(meaning)
    for item in getattr(command, "params", ()):
        yield from _terms({option_names(item): item.help or ""})


def _exit_codes() -> dict[str, str]:
    """As the errors themselves describe them."""
    meanings = {item.exit_code: (item.__doc__ or "").split(" (exit code")[0] for item in LlmbError.__subclasses__()}
    return {"0": "The command succeeded.", **{str(code): meanings[code] for code in sorted(meanings)}}


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, meaning in terms.items():
        yield ".TP"
        yield rf"\fB{_text(term)}\fR"
        yield _text(meaning)


def _text(text: str) -> str:
    """One line of text that roff takes for no request."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("`", "").replace("**", "")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _complete(incomplete: str) -> list[str]:
    return [page.name for page in doc_pages() if page.name.startswith(incomplete)]


@app.command()
def docs(
    page: Annotated[
        list[str] | None,
        typer.Argument(help="Name of the page; without one, all are listed.", autocompletion=_complete),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print where the page's file is.")] = False,
    find: Annotated[
        str | None, typer.Option("--find", metavar="WORDS", help="List the pages on these words, the best first.")
    ] = None,
    man: Annotated[bool, typer.Option("--man", help="Print the manual page of all commands, for man.")] = False,
    json: Json = False,
) -> None:
    """Print a page of the documentation, which is part of every installation.

    On a terminal it is formatted; into a file or a pipe goes its Markdown. `llmb docs schema NAME` prints the JSON
    Schema of a stored file: run.json, metrics.jsonl, cluster_config.yaml, campaign, catalogue and others.

    Examples:

    - `llmb docs`

    - `llmb docs run-on-slurm | less`

    - `llmb docs schema run.json`

    - `llmb docs --find slow nodes`

    - `llmb docs --man > ~/.local/share/man/man1/llmb.1`
    """
    if man:
        print_output(_man_page())
    elif find is not None:
        _find(" ".join((find, *(page or ()))), as_json=json)
    elif not page:
        _list(as_json=json)
    elif page[0] == "schema":
        _print_schema(page[1:])
    elif len(page) > 1:
        raise UsageError("more than one page", do=f"'llmb docs --find {' '.join(page)}' searches")
    else:
        _print(find_doc_page(page[0]), only_path=path, as_json=json)


def _list(*, as_json: bool) -> None:
    if as_json:
        print_output({"pages": [_entry(page) for page in doc_pages()]})
        return
    print_output("'llmb docs PAGE' prints a page, 'llmb docs --find WORDS' searches them.\n")
    for task, pages in groupby(doc_pages(), key=lambda page: page.task):
        table = result_table(f"\n{task}", "page", "about")
        for page in pages:
            table.add_row(page.name, page.about.removesuffix("."))
        print_output(table)


def _find(words: str, *, as_json: bool) -> None:
    found = search_pages(words)[:MOST_FOUND]
    if as_json:
        print_output({"pages": [{**_entry(one.page), "heading": one.heading} for one in found]})
        return
    if not found:
        raise UsageError(f"no page of the documentation has '{words}'", do="'llmb docs' lists all pages")
    table = result_table(f"pages on '{words}'; 'llmb docs PAGE' prints one", "page", "title", "under")
    for one in found:
        table.add_row(one.page.name, one.page.title, one.heading if one.heading != one.page.title else "")
    print_output(table)


def _print(page: DocPage, *, only_path: bool, as_json: bool) -> None:
    text = page.path.read_text(encoding="utf-8")
    if as_json:
        print_output({**_entry(page), "text": text})
    elif only_path:
        print_output(f"{page.path}\n")
    elif sys.stdout.isatty():
        print_markdown(text)
    else:
        print_output(text)


def _print_schema(names: list[str]) -> None:
    from llmb.cli.stored_schemas import STORED, stored_schema  # it loads much that other pages do without

    if len(names) != 1:
        raise UsageError("the schema of one stored file is printed", choices=STORED, do="'llmb docs schema run.json'")
    print_output(stored_schema(names[0]))


def _entry(page: DocPage) -> dict[str, str]:
    return {"name": page.name, "task": page.task, "title": page.title, "about": page.about, "path": str(page.path)}


def _man_page() -> str:
    from llmb.cli.main import COMMANDS, named_commands

    commands: dict[str, tuple[str, Any]] = {}
    for name in COMMANDS:
        for full_name, command in named_commands(name):
            meaning = COMMANDS[name][1] if full_name == name else (command.help or "").split("\n\n")[0]
            commands[full_name] = (meaning, command)
    return man_page(commands)
