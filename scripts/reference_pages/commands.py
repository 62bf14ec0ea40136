# SPDX-License-Identifier: Apache-2.0
"""docs/reference/cli.md: every command and its options."""

import inspect
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from llmb.cli.main import COMMANDS, named_commands
from reference_pages.markdown import page, table, type_text

INTRO = """`llmb` and `llmb-run` are the same program. Results go to stdout, everything else to stderr; `--json` prints
one JSON document and nothing else on stdout, and an error as one JSON document on stderr: `error` with `what`, `where`,
`valid`, `do` and `exit_code`. Names may be written in any case. Workload and size may be given by their place too:
`llmb run pretrain_llama3.1 8b`. `llmb version` and `llmb help COMMAND` do what `--version` and `--help` do.

Every command has `--help` (`-h`, the usual options), `--help-all` (all options), `--output FILE` (the result goes to a
file), `-q` or `--quiet` (nothing beside the result but errors) and `-v` or `--verbose` (the plan of a run, the cause of
an error). `llmb --install-completion` makes the shell complete commands, workloads, sizes, dtypes, GPU types, releases
and job ids. See also [exit codes](files.md#exit-codes)."""


def commands_page() -> str:
    overview = [[f"[`llmb {name}`](#llmb-{name})", meaning] for name, (_, meaning) in COMMANDS.items()]
    sections = (command_section(*item) for name in COMMANDS for item in named_commands(name))
    return page("# Commands", INTRO, table(["command", "does"], overview), *sections)


def command_section(name: str, command: Any) -> str:  # noqa: ANN401 (typer keeps its command types private)
    if hasattr(command, "commands"):
        return page(f"## llmb {name}", f"{COMMANDS[name][1]} `{'`, `'.join(command.commands)}`; see below.")
    annotations = get_type_hints(command.callback)
    rows = [option_row(param, annotations[param.name]) for param in command.params if param.name in annotations]
    columns = ["option", "type", "default", "meaning"]
    return page(f"## llmb {name}", inspect.cleandoc(command.help), table(columns, rows))


def option_row(param: Any, annotation: Any) -> list[str]:  # noqa: ANN401 (typer keeps its parameter types private)
    names = sorted(param.opts, key=len) if param.param_type_name == "option" else [param.metavar or param.name.upper()]
    default = param.default.value if isinstance(param.default, Enum) else param.default
    shown = f"`{default}`" if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
    return [
        ", ".join(f"`{name}`" for name in names),
        option_type(annotation),
        "required" if param.required else shown,
        param.help or "",
    ]


def option_type(annotation: Any) -> str:  # noqa: ANN401
    """The type of an option's value, without None, which means that the option is not specified."""
    if annotation is bool:
        return "flag"
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (item for item in get_args(annotation) if item is not types.NoneType)
    if get_origin(annotation) is list:
        return f"{type_text(get_args(annotation)[0])}, several"
    return type_text(annotation)
