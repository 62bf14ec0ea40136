# SPDX-License-Identifier: Apache-2.0
"""The environment of a job's workers, layer by layer. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from llmb.errors import UsageError, itemized
from llmb.secrets import HIDDEN, has_secret, holds_secret, without_secrets

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The launcher sets the first; the others are read-only in bash.
TAKEN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})
ADVICE = "remove or correct them; 'llmb submit --help-all' shows the form"
READ_ONLY = frozenset({"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"})
PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "BASH_", "llmb_")


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable and who set it."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class VariableLayer:
    """Variables from one place; later layers replace what earlier ones set."""

    origin: str
    variables: Mapping[str, str]


def layered(
    shipped: Iterable[VariableLayer], shell: Mapping[str, str], given: Iterable[VariableLayer]
) -> tuple[Variable, ...]:
    """Every variable once: what llmb ships, unless the shell that submits has it, below what the user has written.

    What holds a secret in that shell does not count as set there.
    """
    variables: dict[str, Variable] = {}
    for layer in shipped:
        variables.update(_variables(layer))
    own = without_secrets({name: shell[name] for name in variables if name in shell})
    variables.update({name: Variable(name, value, "the shell that submitted") for name, value in own.items()})
    for layer in given:
        variables.update(_variables(layer))
    return tuple(variables.values())


def _variables(layer: VariableLayer) -> dict[str, Variable]:
    return {name: Variable(name, value, layer.origin) for name, value in layer.variables.items()}


def parse_variables(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` each. Raises UsageError with all problems."""
    variables: dict[str, str] = {}
    problems = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"'{HIDDEN if has_secret(text) else text}' has no value; write NAME=VALUE")
        elif name in variables and variables[name] != value:
            problems.append(f"duplicate key {name}")
        variables[name] = value
    problems.extend(problem for problem in variable_problems(variables) if problem not in problems)
    if problems:
        raise UsageError(f"--env cannot be used:{itemized(problems)}", do=ADVICE)
    return variables


def variable_problems(variables: Mapping[str, str]) -> Iterator[str]:
    """Why variables cannot be written into a batch script."""
    for name, value in variables.items():
        if not NAME.fullmatch(name):
            yield f"'{name}' is not the name of a variable"
        elif name in TAKEN or name in READ_ONLY or name.startswith(PREFIXES):
            yield f"{name} is set by the launcher of the workers"
        elif holds_secret(name, value):
            yield (
                f"{name} looks like a secret, and variables are written into the batch script; jobs need none:"
                " prepare gated data before, where the secret stays in your shell"
            )
        if not value.isprintable():
            yield f"{name} holds a character that does not print"
