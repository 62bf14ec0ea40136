# SPDX-License-Identifier: Apache-2.0
"""The manual page ``llmb(1)``, in roff, from the commands themselves."""

from collections.abc import Iterator
from typing import Any

from llmb import __version__
from llmb.cli.full_help import option_names
from llmb.doc_pages import doc_pages
from llmb.errors import LlmbError

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
    return {"0": "The command did what it was asked for.", **{str(code): meanings[code] for code in sorted(meanings)}}


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, meaning in terms.items():
        yield ".TP"
        yield rf"\fB{_text(term)}\fR"
        yield _text(meaning)


def _text(text: str) -> str:
    """One line of text that roff takes for no request."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("`", "").replace("**", "")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain
