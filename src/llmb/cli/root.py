# SPDX-License-Identifier: Apache-2.0
"""Functions that commands share: the install root, confirmation, messages, results, and named files."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmb.base.errors import EnvironmentProblem, UsageError, UserInterrupt
from llmb.base.input_files import check_reachable
from llmb.catalogue.records import Recipe, Unspecified, unspecified_text
from llmb.cli.common import print_message
from llmb.reports.output import print_line, print_output
from llmb.reports.table import Table
from llmb.runs.folder import ROOT_VARIABLES, chosen_root, write_atomically

if TYPE_CHECKING:
    from llmb.jobs.campaigns.proposal import CampaignContext


def print_for_recipe(recipe: Recipe, result: dict[str, Any] | Table | Iterable[Table]) -> None:
    """Print a result. A table follows a line with the defaults of the request; a JSON document contains them."""
    if not isinstance(result, dict):
        print_unspecified(recipe.unspecified)
        if recipe.config_file:
            print_line(recipe.config_file.text)
    print_output(result)


def print_unspecified(choices: Sequence[Unspecified]) -> None:
    """Print the defaults of the request, if any, on one line."""
    if choices:
        print_line(unspecified_text(choices))


def can_ask() -> bool:
    """Return whether a question would be shown and could be answered; --quiet hides questions."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agree(question: str, *, default: bool, do: str = "add --yes", refused: str = "nothing was queued") -> None:
    """Ask for confirmation; raise UserInterrupt if the answer is no, UsageError if there is no terminal to ask on."""
    if not can_ask():
        raise UsageError(f"there is no terminal to ask on, or --quiet hides the question: {question}", do=do)
    if not typer.confirm(question, default=default, err=True):
        raise UserInterrupt(refused)


def say(*texts: str) -> None:
    """Print each text as a line on standard error."""
    for text in texts:
        print_message(f"llmb: {text}")


def warn(warnings: Iterable[str]) -> None:
    """Print each warning once."""
    say(*(f"warning: {warning}" for warning in dict.fromkeys(warnings)))


def context_here(*, dry_run: bool = False) -> "CampaignContext":
    """Return the context of this command's jobs, and print notes on the settings; raise UsageError if they are
    invalid."""
    from llmb.jobs.campaigns.proposal import campaign_context  # takes longer than all that other commands need

    context = campaign_context(install_here(), os.environ, dry_run=dry_run)
    say(*context.site.notes)
    return context


def write_named(path: Path, content: str | bytes, option: str) -> None:
    """Write a file that the user named with ``option``; raise EnvironmentProblem if it cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        what, do = f"the file cannot be written: {error.strerror}", f"set {option} to another path"
        raise EnvironmentProblem(what, where=str(path), do=do) from error


def run_paths(paths: Iterable[Path]) -> list[Path]:
    """Replace archives, and names of runs such as labels or 'latest', with the runs' folders; keep other paths."""
    from llmb.jobs.find_runs import run_folders  # slow to load

    found: list[Path] = []
    for path in paths:
        check_reachable(path)
        try:
            is_path = (os.path.lexists(path) or len(path.parts) > 1) and ".tar" not in path.suffixes
            found += [path] if is_path else [run.path for run in run_folders(str(path), install_here(), say)]
        except UsageError:  # the code that reads the path reports the problem
            found.append(path)
    return found


def install_here() -> Path:
    """Return the install root, and print it unless it is the default or set by LLMB_INSTALL; raise the errors
    of ``chosen_root``."""
    root = chosen_root(os.environ, Path.cwd())
    if root.chosen_by not in (None, ROOT_VARIABLES[0]):
        say(f"install root: {root.path} ({root.chosen_by})")
    return root.path
