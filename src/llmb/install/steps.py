# SPDX-License-Identifier: Apache-2.0
"""The steps of an installation, in their order. Each proves whether it is done, so that any end can be resumed."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmb.install.answers import EXISTING, suite_scripts
from llmb.install.cluster_file import Section, is_settled, settings, write_settings
from llmb.install.environment import contents_text, is_made, make_environment, proven, python_of
from llmb.install.image_sources import SUFFIXES, image_path
from llmb.install.images import has_image
from llmb.install.installation import IMAGES, Installation, InstallStep
from llmb.install.preparation import (
    PREPARED_HOW,
    check_hub,
    hub_repositories,
    is_prepared,
    prepared_sizes,
)
from llmb.install.suite import suite_environments, suite_steps
from llmb.prepared.folders import WORKLOADS
from llmb.schedulers.lookup import LOCAL, find_scheduler

DATASETS = "datasets"
LAUNCH = "launch.sh"
EXECUTABLE = 0o755


def steps(what: Installation) -> Sequence[InstallStep]:
    own = [_folders(what), *_environment(what), *_image(what), _settings(what), _scripts(what)]
    return [*own, *suite_steps(what), *_preparations(what)]


def _folders(what: Installation) -> InstallStep:
    own = [WORKLOADS, DATASETS, IMAGES, *(f"{WORKLOADS}/{name}" for name in what.answers.workloads)]

    def do() -> str:
        for name in own:
            what.journal.folder(name)
        return f"{len(what.answers.workloads)} below {what.root / WORKLOADS}"

    return InstallStep("folders", "make folders", lambda: all((what.root / name).is_dir() for name in own), do)


def _environment(what: Installation) -> Iterator[InstallStep]:
    answers = what.answers
    if answers.environment == EXISTING:
        python = python_of(answers, what.root)

        def is_done() -> bool:
            return what.journal.state.proven_python == str(python) and python.exists()

        def prove() -> str:
            found = contents_text(proven(python, answers))
            what.journal.save(proven_python=str(python))
            return found

        yield InstallStep("environment", f"look at {python}", is_done, prove)
        return
    yield InstallStep(
        "environment",
        f"make the Python environment with {answers.environment}, which takes minutes",
        lambda: is_made(answers, what.root),
        lambda: make_environment(answers, what.journal),
    )


def _image(what: Installation) -> Iterator[InstallStep]:
    wanted = _registry_image(what)
    importer, runtime = what.import_image, str(what.answers.container_runtime)
    if wanted is None or importer is None or runtime not in SUFFIXES:
        return
    target = image_path(wanted, what.image_folder, runtime)

    def do() -> str:
        if target.is_relative_to(what.root):
            what.journal.image(str(target.relative_to(what.root)))
        found = importer(wanted, what.image_folder, runtime, what.answers.node_architecture)
        what.journal.save(image=str(found))
        return str(found)

    def is_done() -> bool:
        return what.journal.state.image == str(target) and has_image(target)

    yield InstallStep("image", f"import the image {wanted}", is_done, do)


def _registry_image(what: Installation) -> str | None:
    """The image, if it is not a file."""
    image = what.answers.image
    return image if image and not Path(image).exists() else None


def _settings(what: Installation) -> InstallStep:
    def wanted() -> Section:
        imported = what.journal.state.image if _registry_image(what) and what.import_image else None
        image = imported or what.answers.image
        return settings(what.answers, what.root, image, suite_environments(what.answers, what.journal))

    return InstallStep(
        "settings",
        "write cluster_config.yaml",
        lambda: is_settled(what.journal, wanted()),
        lambda: write_settings(what.journal, wanted(), keep=what.keep_settings),
    )


def _scripts(what: Installation) -> InstallStep:
    texts = {
        f"{WORKLOADS}/{name}/{LAUNCH}": launch_script(name, what.root, python_of(what.answers, what.root))
        for name in what.answers.workloads
    }

    def is_done() -> bool:
        return all(_has(what.root / path, text) for path, text in texts.items())

    def do() -> str:
        for path, text in texts.items():
            what.journal.file(path, text, mode=EXECUTABLE)
        return f"{LAUNCH} of {', '.join(what.answers.workloads)}"

    return InstallStep("scripts", f"write {LAUNCH} of each workload", is_done, do)


def launch_script(workload: str, root: Path, python: Path) -> str:
    """Two lines that do what ``llmb launch`` does, from any folder. Pure."""
    words = ["env", f"LLMB_INSTALL={root}", str(python), "-P", "-m", "llmb.cli.main", "launch", workload]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def _has(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _preparations(what: Installation) -> Iterator[InstallStep]:
    answers = what.answers
    if answers.prepare not in PREPARED_HOW:
        return
    suites = {script.workload for script in suite_scripts(answers) if script.prepares}
    models = [model for model in prepared_sizes(what.catalogue, answers) if model[0] not in suites]
    preparations = [_preparation(what, *model) for model in models]
    if models and (repositories := hub_repositories(what.catalogue, answers)):
        yield InstallStep(
            "access",
            "check access to the repositories on the Hugging Face hub",
            lambda: all(step.is_done() for step in preparations),
            lambda: check_hub(repositories),
        )
    yield from preparations


def _preparation(what: Installation, workload: str, size: str) -> InstallStep:
    answers = what.answers
    how = "now" if answers.prepare == "here" else f"as {find_scheduler(answers.scheduler or LOCAL).title} jobs"
    return InstallStep(
        f"prepare {workload}",
        f"prepare data and checkpoint of {workload} {size}, {how}",
        lambda: is_prepared(what.catalogue, what.root, answers, workload, size),
        lambda: what.preparations.do(python_of(answers, what.root), what.root, answers, workload, size),
    )
