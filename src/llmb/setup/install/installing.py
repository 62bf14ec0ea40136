# SPDX-License-Identifier: Apache-2.0
"""Plans and performs a whole installation, from its recorded state."""

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmb.base.errors import LlmbError, UserInterrupt
from llmb.base.trust import WORKLOADS
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import CPU, Request, gpu_types_of, resolve
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.scheduler_port import NONE
from llmb.runs.checkpoint_use import check_room
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.runs.record import LOCAL
from llmb.setup.install.answers import EXISTING, Answers, suite_scripts
from llmb.setup.install.cluster_file import (
    Section,
    answers_in,
    check_settings,
    is_settled,
    settings,
    user_changes,
    write_settings,
)
from llmb.setup.install.images import SUFFIXES, has_image, image_path
from llmb.setup.install.install_state import InstallState, Journal, opened_journal, read_state
from llmb.setup.install.installation import (
    IMAGES,
    PREPARED_HOW,
    ImportImage,
    Installation,
    InstallStep,
    Preparations,
    check_hub,
    hub_repositories,
    is_prepared,
    prepared_sizes,
)
from llmb.setup.install.python_environment import FOLDER as ENVIRONMENT
from llmb.setup.install.python_environment import RECORD, contents_text, make_environment, matches, proven, python_of
from llmb.setup.install.suite import remove_environments, suite_environments, suite_steps

RESUMED = "the same command resumes here"
ENVIRONMENT_BYTES = 12 * 10**9
"""A conservative estimate of the size of PyTorch for CUDA, both packed and unpacked."""
CPU_ENVIRONMENT_BYTES = 3 * 10**9
DOWNLOADED = 2
"""The factor for a checkpoint's size while it is downloaded and converted."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step: ``done`` now, ``kept`` if it was done before, or ``open`` if it is only planned."""

    name: str
    state: Literal["done", "kept", "open"]
    text: str


@dataclass(frozen=True, slots=True)
class Installed:
    """The results of steps that were done, or would be done."""

    results: Sequence[StepResult]
    jobs: Sequence[dict[str, Any]] = field(default_factory=list)
    """The jobs of preparations in the background."""


def all_answers(answers: Answers, root: Path) -> Answers:
    """Return the explicit answers, completed from the installation, else from cluster_config.yaml.

    Raise UsageError if a file is unusable.
    """
    state = read_state(root)
    if state is None:
        return answers.above(answers_in(root))
    return answers.above(state.answers).model_copy(update={"path": str(root)})


def would_install(root: Path, answers: Answers, catalogue: Catalogue, import_image: ImportImage | None) -> Installed:
    """Return all steps of an installation, without performing any: steps that are not done are open."""
    state = read_state(root) or InstallState(root=str(root), made_root=False, answers=answers)
    journal = Journal(root, state)
    what = Installation(journal=journal, answers=answers, catalogue=catalogue, import_image=import_image)
    return Installed(planned(all_steps(what)))


def install_all(
    root: Path,
    answers: Answers,
    catalogue: Catalogue,
    import_image: ImportImage | None,
    say: Callable[[str], None],
    *,
    keep_settings: bool = False,
) -> Installed:
    """Perform the steps that are not done; the same call resumes. Raise the LlmbError of a failed check or step."""
    check_space(catalogue, answers, root)
    with opened_journal(root, answers) as journal:
        before = Path(journal.state.root)  # the same folder may have two names, such as through a link
        if before != root and not (before.exists() and before.samefile(root)):
            say(f"this installation was at {journal.state.root}; files that contain that path are recreated")
            say("run 'llmb jobs rebuild' afterwards: the history lists run folders by their paths")
            (root / ENVIRONMENT / RECORD).unlink(missing_ok=True)
            remove_environments(journal)
            journal.save(root=str(root), image=None)
        # Checked before the environment is made, which takes minutes. The image's name is known only later.
        section = settings(answers, root, None, suite_environments(answers, journal))
        rest = {key: value for key, value in section.items() if key != "container"}
        if not keep_settings:
            check_settings(journal, rest)
        for line in user_changes(journal, rest):
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
        return Installed(run_steps(all_steps(what), say), preparations.jobs)


def run_steps(steps: Sequence[InstallStep], say: Callable[[str], None]) -> list[StepResult]:
    """Run the steps in order. Raise the first failed step's error, or UserInterrupt; earlier steps stay done."""
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
    return [
        StepResult(step.name, "kept", "done before") if step.is_done() else StepResult(step.name, "open", step.title)
        for step in steps
    ]


def check_space(catalogue: Catalogue, answers: Answers, root: Path) -> None:
    """Raise EnvironmentProblem if the disk has less free space than the installation needs."""
    need = 0
    if answers.environment != EXISTING and not (root / ENVIRONMENT).exists():
        need += CPU_ENVIRONMENT_BYTES if answers.torch in (CPU, NONE, EXISTING) else ENVIRONMENT_BYTES
    for workload, size in prepared_sizes(catalogue, answers) if answers.prepare in ("here", "job") else ():
        documented = catalogue.workloads[workload].checkpoints.get(size)
        if documented and not prepared_folders(root, workload).models.exists():
            need += int(documented.size_gb * 2**30) * DOWNLOADED
    check_room("the installation needs", need, root, "free some space, or pass a --path on another disk")


def free_text(root: Path) -> str:
    """Describe the free space on the disk of a folder, which need not exist."""
    existing = next(place for place in (root, *root.parents) if place.exists())
    return f"{shutil.disk_usage(existing).free / 10**9:,.0f} GB"


def next_commands(catalogue: Catalogue, answers: Answers, root: Path, *, jobs: bool) -> Iterator[tuple[str, str]]:
    """Yield the purpose and the text of each next command; ``jobs`` is True if preparations run in the background."""
    llmb = _llmb(python_of(answers, root))
    yield "in this shell, and in the next ones", f"export LLMB_INSTALL={shlex.quote(str(root))}"
    if jobs:
        yield "preparations in the background", f"{llmb} jobs list"
    if answers.prepare in ("here", "job"):
        for workload, size in prepared_sizes(catalogue, answers):
            yield "what is prepared, and what is missing", f"{llmb} prepare verify -w {workload} -s {size}"
    command = "run" if answers.scheduler == LOCAL else "submit"
    wait = " --wait" if command == "submit" else ""
    yield "a first result", f"{llmb} {command} {_first_run(catalogue, answers.workloads)}{wait}"


def _first_run(catalogue: Catalogue, names: Sequence[str]) -> str:
    tiny = [
        (resolve(catalogue, Request(workload=name, size="tiny", gpu_type=CPU)), bool(catalogue.workloads[name].sources))
        for name in (*names, "pretrain_llama3.1")
        if CPU in gpu_types_of(catalogue.workloads[name], "tiny")
    ]
    recipe, has_data = min(tiny[:-1] or tiny, key=lambda each: (bool(each[0].engine_problem), each[1]))
    program = " --framework torchtitan" if recipe.engine_problem else ""
    return f"-w {recipe.workload}{' --synthetic' if has_data else ''} -s tiny --gpu-type cpu --scale 2{program}"


def _llmb(python: Path) -> str:
    script = python.with_name("llmb")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(str(python))} -P -m llmb.cli.main"


DATASETS = "datasets"
LAUNCH = "launch.sh"
EXECUTABLE = 0o755


def all_steps(what: Installation) -> Sequence[InstallStep]:
    """Return the steps in order."""
    steps = [_folders(what), *_environment(what), *_image(what), _settings(what), _scripts(what)]
    return [*steps, *suite_steps(what), *_preparations(what)]


def _folders(what: Installation) -> InstallStep:
    names = [WORKLOADS, DATASETS, IMAGES, *(f"{WORKLOADS}/{name}" for name in what.answers.workloads)]

    def do() -> str:
        for name in names:
            what.journal.folder(name)
        return f"{len(what.answers.workloads)} below {what.root / WORKLOADS}"

    return InstallStep("folders", "make folders", lambda: all((what.root / name).is_dir() for name in names), do)


def _environment(what: Installation) -> Iterator[InstallStep]:
    answers = what.answers
    if answers.environment == EXISTING:
        python = python_of(answers, what.root)

        def is_done() -> bool:
            return what.journal.state.proven_python == str(python) and python.exists()

        def prove() -> str:
            contents = contents_text(proven(python, answers))
            what.journal.save(proven_python=str(python))
            return contents

        yield InstallStep("environment", f"check {python}", is_done, prove)
        return
    yield InstallStep(
        "environment",
        f"make the Python environment with {answers.environment}, which takes minutes",
        lambda: matches(answers, what.root),
        lambda: make_environment(answers, what.journal),
    )


def _image(what: Installation) -> Iterator[InstallStep]:
    image = _registry_image(what)
    importer, runtime = what.import_image, str(what.answers.container_runtime)
    if image is None or importer is None or runtime not in SUFFIXES:
        return
    target = image_path(image, what.image_folder, runtime)

    def do() -> str:
        if target.is_relative_to(what.root):
            what.journal.image(str(target.relative_to(what.root)))
        build = importer(image, what.image_folder, runtime, what.answers.node_architecture)
        what.journal.save(image=str(build))
        return str(build)

    def is_done() -> bool:
        return what.journal.state.image == str(target) and has_image(target)

    yield InstallStep("image", f"import the image {image}", is_done, do)


def _registry_image(what: Installation) -> str | None:
    image = what.answers.image
    return image if image and not Path(image).exists() else None


def _settings(what: Installation) -> InstallStep:
    def expected() -> Section:
        imported = what.journal.state.image if _registry_image(what) and what.import_image else None
        image = imported or what.answers.image
        return settings(what.answers, what.root, image, suite_environments(what.answers, what.journal))

    return InstallStep(
        "settings",
        "write cluster_config.yaml",
        lambda: is_settled(what.journal, expected()),
        lambda: write_settings(what.journal, expected(), keep=what.keep_settings),
    )


def _scripts(what: Installation) -> InstallStep:
    texts = {
        f"{WORKLOADS}/{name}/{LAUNCH}": launch_script(name, what.root, python_of(what.answers, what.root))
        for name in what.answers.workloads
    }

    def is_done() -> bool:
        paths = {what.root / path: text for path, text in texts.items()}
        return all(path.is_file() and path.read_bytes() == text.encode() for path, text in paths.items())

    def do() -> str:
        for path, text in texts.items():
            what.journal.file(path, text, mode=EXECUTABLE)
        return f"{LAUNCH} of {', '.join(what.answers.workloads)}"

    return InstallStep("scripts", f"write {LAUNCH} of each workload", is_done, do)


def launch_script(workload: str, root: Path, python: Path) -> str:
    """Return a two-line script that runs ``llmb launch`` for the workload from any folder."""
    words = ["env", f"LLMB_INSTALL={root}", str(python), "-P", "-m", "llmb.cli.main", "launch", workload]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


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
