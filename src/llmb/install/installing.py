# SPDX-License-Identifier: Apache-2.0
"""An installation as a whole: what is known of it, what would be done, and doing it."""

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU
from llmb.errors import LlmbError, UserInterrupt
from llmb.install.answers import EXISTING, Answers
from llmb.install.cluster_file import answers_in, check_settings, kept_changes, settings
from llmb.install.environment import FOLDER as ENVIRONMENT
from llmb.install.environment import RECORD, python_of
from llmb.install.installation import ImportImage, Installation, InstallStep
from llmb.install.preparation import Preparations, prepared_sizes
from llmb.install.state import InstallState, Journal, opened_journal, read_state
from llmb.install.steps import steps
from llmb.install.suite import remove_environments, suite_environments
from llmb.prepared.folders import prepared_folders
from llmb.runs.disk_space import check_room
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.schedulers.installer import NONE
from llmb.schedulers.lookup import LOCAL

RESUMED = "the same command resumes here"
ENVIRONMENT_BYTES = 12 * 10**9
"""PyTorch for CUDA with its libraries, and as much again while it is unpacked; a guess on the safe side."""
CPU_ENVIRONMENT_BYTES = 3 * 10**9
DOWNLOADED = 2
"""A checkpoint is downloaded, and converted beside the download."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``kept`` was done before."""

    name: str
    state: Literal["done", "kept", "open"]
    text: str


@dataclass(frozen=True, slots=True)
class Installed:
    """What was done, or would be."""

    results: Sequence[StepResult]
    jobs: Sequence[dict[str, Any]] = field(default_factory=list)
    """That prepare something in the background."""


def known_answers(given: Answers, root: Path) -> Answers:
    """The answers that are given, above those of an installation in ``root``, above those of a cluster_config.yaml.

    Raises UsageError for files that cannot be used.
    """
    state = read_state(root)
    if state is None:
        return given.above(answers_in(root))
    return given.above(state.answers).model_copy(update={"path": str(root)})


def would_install(root: Path, answers: Answers, catalogue: Catalogue, import_image: ImportImage | None) -> Installed:
    """Reads, and writes nothing."""
    state = read_state(root) or InstallState(root=str(root), made_root=False, answers=answers)
    journal = Journal(root, state)
    what = Installation(journal=journal, answers=answers, catalogue=catalogue, import_image=import_image)
    return Installed(planned(steps(what)))


def install_all(
    root: Path,
    answers: Answers,
    catalogue: Catalogue,
    import_image: ImportImage | None,
    say: Callable[[str], None],
    *,
    keep_settings: bool = False,
) -> Installed:
    """Raises the LlmbError of the step that fails; the same call resumes there."""
    check_space(catalogue, answers, root)
    with opened_journal(root, answers) as journal:
        if _was_moved(Path(journal.state.root), root):
            say(f"this installation was at {journal.state.root}: what holds that path is made again")
            say("call 'llmb jobs rebuild' afterwards: the history lists run folders by their paths")
            (root / ENVIRONMENT / RECORD).unlink(missing_ok=True)
            remove_environments(journal)
            journal.save(root=str(root), image=None)
        # Not after an environment was made, which takes minutes. What an image is named is known later.
        found = settings(answers, root, None, suite_environments(answers, journal))
        wanted = {key: value for key, value in found.items() if key != "container"}
        if not keep_settings:
            check_settings(journal, wanted)
        for line in kept_changes(journal, wanted):
            say(f"note: {CLUSTER_CONFIG} was changed, and is kept: {line}")
        journal.save(answers=answers)
        preparations = Preparations()
        what = Installation(
            journal=journal,
            answers=answers,
            catalogue=catalogue,
            import_image=import_image,
            keep_settings=keep_settings,
            preparations=preparations,
        )
        return Installed(run_steps(steps(what), say), preparations.jobs)


def _was_moved(before: Path, root: Path) -> bool:
    """False for two names of the same folder, such as through a link."""
    return before != root and not (before.exists() and before.samefile(root))


def run_steps(steps: Sequence[InstallStep], say: Callable[[str], None]) -> list[StepResult]:
    """Raises the error of the first step that fails; those before it are done."""
    results = []
    for number, step in enumerate(steps, start=1):
        if step.is_done():
            results.append(StepResult(step.name, "kept", "done before"))
            continue
        say(f"{number}/{len(steps)} {step.title}")
        try:
            results.append(StepResult(step.name, "done", step.do()))
        except LlmbError as error:
            after = "\n" if error.do and "\n" in error.do else "; "  # not behind a command
            do = f"{error.do}{after}{RESUMED}" if error.do else RESUMED
            what = f"step {number} of {len(steps)}, {step.name}: {error.what}"
            raise type(error)(what, where=error.where, choices=error.choices, do=do) from error
        except KeyboardInterrupt as signal:
            raise UserInterrupt(f"interrupted in step {number} of {len(steps)}, {step.name}; {RESUMED}") from signal
    return results


def planned(steps: Sequence[InstallStep]) -> list[StepResult]:
    """What would be done."""
    return [
        StepResult(step.name, "kept", "done before") if step.is_done() else StepResult(step.name, "open", step.title)
        for step in steps
    ]


def check_space(catalogue: Catalogue, answers: Answers, root: Path) -> None:
    """Raises EnvironmentProblem if the disk has less free than the installation takes."""
    need = 0
    if answers.environment != EXISTING and not (root / ENVIRONMENT).exists():
        need += CPU_ENVIRONMENT_BYTES if answers.torch in (CPU, NONE, EXISTING) else ENVIRONMENT_BYTES
    for workload, size in prepared_sizes(catalogue, answers) if answers.prepare in ("here", "job") else ():
        documented = catalogue.workloads[workload].checkpoints.get(size)
        if documented and not prepared_folders(root, workload).models.exists():
            need += int(documented.size_gb * 10**9) * DOWNLOADED
    check_room("the installation needs", need, root, "free some space, or give a --path on another disk")


def free_text(root: Path) -> str:
    """What is free on the disk of a folder that need not exist, in words."""
    existing = next(place for place in (root, *root.parents) if place.exists())
    return f"{shutil.disk_usage(existing).free / 10**9:,.0f} GB"


def next_commands(catalogue: Catalogue, answers: Answers, root: Path, *, jobs: bool) -> Iterator[tuple[str, str]]:
    """Commands, each after what it is for. ``jobs`` prepare something in the background."""
    llmb = _llmb(python_of(answers, root))
    yield "in this shell, and in the next ones", f"export LLMB_INSTALL={shlex.quote(str(root))}"
    if jobs:
        yield "preparations in the background", f"{llmb} jobs list"
    if answers.prepare in ("here", "job"):
        for workload, size in prepared_sizes(catalogue, answers):
            yield "what is prepared, and what is missing", f"{llmb} prepare verify -w {workload} -s {size}"
    plain = [name for name in answers.workloads if not catalogue.workloads[name].sources]
    model = f"-w {plain[0]}" if plain else f"-w {answers.workloads[0]} --synthetic"
    command = "run" if answers.scheduler == LOCAL else "submit"
    wait = " --wait" if command == "submit" else ""
    yield "a first result", f"{llmb} {command} {model} -s tiny --gpu-type cpu --scale 2{wait}"


def _llmb(python: Path) -> str:
    """The command as a shell takes it."""
    script = python.with_name("llmb")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(str(python))} -P -m llmb.cli.main"
