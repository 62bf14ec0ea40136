# SPDX-License-Identifier: Apache-2.0
"""An installation as a whole: what is known of it, what would be done, and doing it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.catalogue.load import Catalogue
from llmb.install.answers import Answers
from llmb.install.cluster_file import answers_in, check_settings, kept_changes, settings
from llmb.install.environment import FOLDER as ENVIRONMENT
from llmb.install.environment import RECORD
from llmb.install.preparation import Preparations
from llmb.install.run_steps import StepResult, planned, run_steps
from llmb.install.space import check_space
from llmb.install.state import InstallState, Journal, opened_journal, read_state
from llmb.install.steps import ImportImage, Installation, steps
from llmb.runs.folder import CLUSTER_CONFIG


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
            journal.save(root=str(root), image=None)
        # Not after an environment was made, which takes minutes. What an image is named is known later.
        wanted = {key: value for key, value in settings(answers, root, None).items() if key != "container"}
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
