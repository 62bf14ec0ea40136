# SPDX-License-Identifier: Apache-2.0
"""``llmb install``: installs on a cluster or a machine, with questions on a terminal, or removes the installation."""

import os
import shutil
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from llmb.base.errors import UserInterrupt
from llmb.catalogue.catalogue import Catalogue
from llmb.cli.common import Json
from llmb.cli.prepare import checked_access
from llmb.cli.root import agree, can_ask, say
from llmb.cli.shared_options import takes, value_options
from llmb.launch.scheduler_lookup import SCHEDULERS
from llmb.launch.scheduler_port import Choice, Question
from llmb.reports.install_report import answers_table, install_document, steps_table
from llmb.reports.output import bold, print_output, table_lines
from llmb.reports.table import rows_table, table_of, texts
from llmb.setup.install.answers import LISTED, OPTIONS, Answers, absolute, answers_of_shell, parse_answers
from llmb.setup.install.cluster_file import read_answers, write_answers
from llmb.setup.install.images import ImageRequest, import_image
from llmb.setup.install.install_state import read_state
from llmb.setup.install.installation import Removal, complete_removal, hub_repositories, planned_removal, undo
from llmb.setup.install.installing import all_answers, free_text, install_all, next_commands, would_install
from llmb.setup.install.python_environment import Surroundings, look_around
from llmb.setup.install.questions import completed, completed_path
from llmb.setup.prepare.hub import can_check


def ask(question: Question, problem: str | None) -> str:
    """Show ``problem``, if any, and return the first valid answer; raise UserInterrupt at the end of input or on
    Ctrl-C."""
    width = shutil.get_terminal_size().columns
    choices, assumed = tuple(question.choices()), question.assumed()
    if problem:
        _write(f"  {problem}\n")
    _write(f"\n{bold(question.text) if sys.stderr.isatty() else question.text}\n")
    rows = ((f" {number}", one.value, one.meaning) for number, one in enumerate(choices, start=1))
    table = rows_table("", ("", "", ""), rows)
    table.columns[0].right, table.columns[1].wrap = True, False
    _write("".join(f"{line}\n" for line in table_lines(table, width) if line.strip()))
    while True:
        text = ask_line(_prompt(question, choices, assumed)) or assumed or ""
        names = [choice.value for choice in choices]
        items = [text] if not question.several else [item.strip() for item in text.split(",")]
        value = ",".join(chain.from_iterable(_named(item, names) for item in items))
        wrong = question.problem(value) if value else "an answer is needed"
        if wrong is None:
            return value
        indent = "  "
        _write(fill(wrong, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) + "\n")


def ask_line(prompt: str) -> str:
    """Read a line from the terminal; raise UserInterrupt at the end of input or on Ctrl-C."""
    _write(prompt)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt as signal:
        _write("\n")
        raise UserInterrupt("interrupted; nothing was installed") from signal
    if not line:
        raise UserInterrupt("the input ended; nothing was installed")
    return line.strip()


def _prompt(question: Question, choices: tuple[Choice, ...], assumed: str | None) -> str:
    kinds = "numbers or names" if question.several else "number or name"
    what = kinds if choices and question.closed else f"{kinds}, or another" if choices else "answer"
    return f"{what} [{assumed}]: " if assumed else f"{what}: "


def _named(item: str, names: list[str]) -> list[str]:
    if item not in names and item.isdecimal() and 1 <= int(item) <= len(names):
        return [names[int(item) - 1]]
    return [item]


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
CHANGED_BY_NAME = "Enter installs, a name such as gpu-type changes that answer, q ends: "


@dataclass(frozen=True, slots=True)
class Sources:
    """Answers from the argument PATH, from --config and from --add-workload."""

    path_argument: Annotated[Path | None, typer.Argument(metavar="PATH", help="The same as --path.")] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file; options override it.")] = None
    add_workload: Annotated[
        list[str] | None, typer.Option(help="The same as --workload; installed workloads are kept.")
    ] = None

    def answers(self, values: dict[str, Any]) -> Answers:
        """Return the answers of the command line, completed from the file of --config."""
        given = parse_answers({**values, "workloads": [*(values["workloads"] or []), *(self.add_workload or [])]})
        if self.path_argument:
            given = parse_answers({"path": str(self.path_argument)}).above(given)
        return given.above(read_answers(self.config, say)) if self.config else given


@app.command()
@takes(value_options(OPTIONS.values(), envvar=False), Sources)
def install(
    values: dict[str, Any],
    sources: Sources,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answers to this file, without secrets.")
    ] = None,
    keep_settings: Annotated[
        bool, typer.Option("--keep-settings", help="Keep your cluster_config.yaml even if it contradicts the answers.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", "--undo", help="Remove the installation; keep results.")] = False,
    with_results: Annotated[
        bool,
        typer.Option("--with-results", help="With --remove: also remove results and data of workloads, and .llmb."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps without running them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for answers or confirmation.")] = False,
    json: Json = False,
) -> None:
    """Install llmb on a cluster or machine: folders, environment, settings, launch scripts, data and checkpoints.

    On a terminal, the command asks for all values that neither options nor --config specify, and checks every answer
    immediately; accounts and partitions are those of the scheduler. Without a terminal, it lists the missing answers
    with their options and valid values.

    A repeated call only does what is missing, and resumes an interrupted installation. --config also accepts the
    answers file of the reference suite's installer. GPU_TYPE, SBATCH_ACCOUNT and SBATCH_PARTITION are used if neither
    the options nor the file has an answer.

    Examples:

    - `llmb install`

    - `llmb install --config answers.yaml --yes`

    - `llmb install /shared/llmb --gpu-partition batch --gpu-type h100 -w pretrain_llama3.1 --record answers.yaml`

    - `llmb install /shared/llmb --add-workload finetune_llama3 --prepare job`

    - `llmb install /shared/llmb -w pretrain_llama3.1 --suite-release 25.04`

    - `llmb install /shared/llmb --remove`
    """
    around, asks = look_around(Catalogue()), can_ask() and not yes
    known = sources.answers(values).above(answers_of_shell(os.environ, SCHEDULERS.keys() - around.unusable.keys()))
    known = completed_path(known, around, ask if asks else None)
    root = Path(os.path.normpath(absolute(str(known.path))))
    if asks:
        say(f"{root}: {free_text(root)} free")
    if remove:
        _remove(root, results=with_results, dry_run=dry_run, yes=yes, json=json)
        return
    if read_state(root):
        say(f"there is an installation in {root}; its answers are the defaults")
    answers = _answers(all_answers(known, root), around, asks=asks, confirm=asks and not dry_run)
    if record:
        write_answers(record, answers)
    what = (root, answers, around.catalogue, _import_image)
    done = would_install(*what) if dry_run else install_all(*what, say, keep_settings=keep_settings)
    commands = list(next_commands(around.catalogue, answers, root, jobs=bool(done.jobs)))
    if json:
        print_output(install_document(answers, root, done.results, done.jobs, commands))
        return
    print_output(steps_table(root, done.results))
    if all(item.state != "open" for item in done.results):
        print_output("\n" + "".join(f"# {purpose}:\n{command}\n" for purpose, command in commands))


def _answers(given: Answers, around: Surroundings, *, asks: bool, confirm: bool) -> Answers:
    answers = completed(given, around, ask if asks else None)
    if not confirm:
        return answers
    answers = _confirmed(answers, around)
    if can_check():
        checked_access(hub_repositories(around.catalogue, answers))  # asks for a missing token first
    return answers


def _import_image(source: str, folder: Path, runtime: str, architecture: str | None) -> Path:
    request = ImageRequest(source=source, folder=folder, runtime=runtime, architecture=architecture)
    return import_image(request, say).path


def _confirmed(answers: Answers, around: Surroundings) -> Answers:
    while True:
        lines = table_lines(answers_table(answers), shutil.get_terminal_size().columns)
        sys.stderr.write("\n" + "".join(f"{line}\n" for line in lines) + "\n")
        text = ask_line(CHANGED_BY_NAME).lower().removeprefix("--").replace("-", "_")
        if text in ("", "y", "yes"):
            return answers
        if text in ("q", "quit", "n", "no"):
            raise UserInterrupt("nothing was installed")
        if text in OPTIONS and text != "path":
            open_again = () if text in LISTED else None
            answers = completed(answers.model_copy(update={text: open_again}), around, ask)
        else:
            say(f"there is no answer named '{text}'")


def _remove(root: Path, *, results: bool, dry_run: bool, yes: bool, json: bool) -> None:
    if not dry_run and complete_removal(root):
        _print_removal(root, Removal((".",), ()), json=json)
        return
    paths = planned_removal(root, results=results)
    if dry_run:
        planned = {"status": "planned", "path": root, "would_remove": paths}
        print_output(planned if json else "".join(f"{path}\n" for path in paths))
        return
    if not yes:
        also = ", with all results" if results else ""
        question = f"Remove {len(paths)} files and folders from {root}{also}?"
        agree(question, default=False, refused="nothing was changed")
    _print_removal(root, undo(root, say, results=results), json=json)


def _print_removal(root: Path, removal: Removal, *, json: bool) -> None:
    document = {"status": "removed", "path": root, "removed": removal.removed, "kept": removal.remaining}
    states = {"removed": removal.removed, "kept: changed since installation, or not empty": removal.remaining}
    rows = [(path, state) for state, paths in states.items() for path in paths]
    print_output(document if json else table_of(f"Removed from {root}", rows, texts("path: 0", "state: 1")))
