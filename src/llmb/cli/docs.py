# SPDX-License-Identifier: Apache-2.0
"""``llmb docs``."""

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any

import typer

from llmb import __version__
from llmb.cli.common import option_names
from llmb.cli.options import Json
from llmb.doc_pages import DocPage, doc_pages, find_doc_page, search_pages
from llmb.errors import LlmbError, UsageError
from llmb.report.output import print_json, print_markdown, print_table, print_text
from llmb.report.table import result_table

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


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:  # noqa: ARG001 (typer passes both)
    return [page.name for page in doc_pages() if page.name.startswith(incomplete)]


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(help="Name of the page; without one, all are listed.", autocompletion=_complete)
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print where the page's file is.")] = False,
    find: Annotated[
        str | None,
        typer.Option("--find", metavar="WORDS", help="List the pages on these words, the best first."),
    ] = None,
    man: Annotated[bool, typer.Option("--man", help="Print the manual page of all commands, for man.")] = False,
    json: Json = False,
) -> None:
    """Print a page of the documentation, which is part of every installation.

    On a terminal it is formatted; into a file or a pipe goes its Markdown.

    Examples:

    - `llmb docs`

    - `llmb docs run-on-slurm | less`

    - `llmb docs --find "slow nodes"`

    - `llmb docs --man > ~/.local/share/man/man1/llmb.1`
    """
    if man:
        print_text(_man_page())
    elif find is not None:
        _find(find, as_json=json)
    elif page is None:
        _list(as_json=json)
    else:
        _print(find_doc_page(page), only_path=path, as_json=json)


def _list(*, as_json: bool) -> None:
    if as_json:
        print_json({"pages": [_entry(page) for page in doc_pages()]})
        return
    print_text("'llmb docs PAGE' prints a page, 'llmb docs --find WORDS' searches them.\n")
    for task, pages in groupby(doc_pages(), key=lambda page: page.task):
        table = result_table(f"\n{task}", "page", "about")
        for page in pages:
            table.add_row(page.name, page.about.removesuffix("."))
        print_table(table)


def _find(words: str, *, as_json: bool) -> None:
    found = search_pages(words)[:MOST_FOUND]
    if as_json:
        print_json({"pages": [{**_entry(one.page), "heading": one.heading} for one in found]})
        return
    if not found:
        raise UsageError(f"no page of the documentation has '{words}'", do="'llmb docs' lists all pages")
    table = result_table(f"pages on '{words}'; 'llmb docs PAGE' prints one", "page", "title", "under")
    for one in found:
        table.add_row(one.page.name, one.page.title, one.heading if one.heading != one.page.title else "")
    print_table(table)


def _print(page: DocPage, *, only_path: bool, as_json: bool) -> None:
    text = page.path.read_text(encoding="utf-8")
    if as_json:
        print_json({**_entry(page), "text": text})
    elif only_path:
        print_text(f"{page.path}\n")
    elif sys.stdout.isatty():
        print_markdown(text)
    else:
        print_text(text)


def _entry(page: DocPage) -> dict[str, str]:
    return {"name": page.name, "task": page.task, "title": page.title, "about": page.about, "path": str(page.path)}


def _man_page() -> str:
    from llmb.cli.docs import man_page
    from llmb.cli.main import COMMANDS, named_commands

    commands: dict[str, tuple[str, Any]] = {}
    for name in COMMANDS:
        for full_name, command in named_commands(name):
            meaning = COMMANDS[name][1] if full_name == name else (command.help or "").split("\n\n")[0]
            commands[full_name] = (meaning, command)
    return man_page(commands)
