# SPDX-License-Identifier: Apache-2.0
"""The complete help of a command: every option, in as many lines as it needs."""

from collections.abc import Iterator
from enum import Enum
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

WIDTH = 100
INDENT = " " * 8
SHOWN_BY_TYPER = "Options"


def full_help(ctx: Any) -> str:  # noqa: ANN401 (typer keeps its context type private)
    """The description, and each panel with its options; the short help's come first."""
    command = ctx.command
    width = min(get_terminal_size().columns, WIDTH)
    panels: dict[str, list[Any]] = {}
    for item in command.get_params(ctx):
        name = "Arguments" if item.param_type_name == "argument" else item.rich_help_panel or SHOWN_BY_TYPER
        panels.setdefault(name, []).append(item)
    paragraphs = (command.help or "").strip().split("\n\n")
    parts = [command.get_usage(ctx).strip(), *(fill(" ".join(text.split()), width) for text in paragraphs)]
    for name, items in panels.items():
        parts.append(f"{name}\n" + "\n".join(line for item in items for line in _entry(item, width)))
    return "\n\n".join(parts) + "\n"


def option_names(item: Any) -> str:  # noqa: ANN401
    """How it is given: its names and the form of its value."""
    if item.param_type_name == "argument":
        return str(item.metavar or item.name.upper())
    kind = "" if item.is_flag else f" {item.metavar or _kind(item)}"
    return ", ".join([*item.opts, *item.secondary_opts]) + kind


def _entry(item: Any, width: int) -> Iterator[str]:  # noqa: ANN401
    yield f"  {option_names(item)}"
    words = [(item.help or "").strip(), *_default(item)]
    yield fill(" ".join(filter(None, words)), width, initial_indent=INDENT, subsequent_indent=INDENT)


def _kind(item: Any) -> str:  # noqa: ANN401
    """The values that it takes."""
    declared = getattr(getattr(item, "type_descriptor", None), "annotation", str)
    if get_origin(declared) is Literal:
        return f"<{'|'.join(map(str, get_args(declared)))}>"
    if isinstance(declared, type) and issubclass(declared, Enum):
        return f"<{'|'.join(str(member.value) for member in declared)}>"
    return f"<{getattr(declared, '__name__', 'text').lower()}>"


def _default(item: Any) -> Iterator[str]:  # noqa: ANN401
    """Said unless the help says it, or it is nothing."""
    if item.required:
        yield "Required."
    elif item.default not in (None, False, ()) and "Default" not in (item.help or ""):
        yield f"Default: {getattr(item.default, 'value', item.default)}."
