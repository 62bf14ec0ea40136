# SPDX-License-Identifier: Apache-2.0
"""The reference suite's own software in an installation; files of the user or of the suite's installer are never
changed.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, itemized
from llmb.launch.documents.launch_scripts import (
    NEMO_RUN,
    REPOSITORY,
    LaunchScript,
    Need,
    changed_files,
    check_checkout,
    filled_path,
    image_problem,
    is_met,
    nemo_run_commit,
    scripts_of,
)
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.site.cluster_config import SuiteSettings, read_cluster_config
from llmb.launch.site.site import SUITE_FOLDER, SUITES
from llmb.runs.folder import CLUSTER_CONFIG, writing
from llmb.setup.install.answers import EXISTING, Answers, suite_scripts
from llmb.setup.install.install_state import Journal, partial_of
from llmb.setup.install.installation import Installation, InstallStep
from llmb.setup.install.python_environment import activated, empty_environment, run_visibly

DOCUMENTED_ENVIRONMENT = "venv"
"""The folder of the environment in the documents, below STAGE_PATH."""
ENVIRONMENT_PREFIX = f"{SUITES}/environment-"
PYXIS = "pyxis"
MOVE = "move it away"
Commands = Sequence[Sequence[str]]


def suite_environments(answers: Answers, journal: Journal) -> dict[str, str]:
    """Return the path of the virtual environment, by workload, of each workload that needs one."""
    chosen = _chosen(journal)
    needing = (script for script in suite_scripts(answers) if script.installs)
    return {script.workload: str(_environment(script, journal.root, chosen)) for script in needing}


def _chosen(journal: Journal) -> SuiteSettings:
    if journal.is_unchanged(CLUSTER_CONFIG):  # it contains only the answers
        return SuiteSettings()
    return read_cluster_config(journal.root, cluster_schema()).reference_suite


def _environment(script: LaunchScript, root: Path, chosen: SuiteSettings) -> Path:
    if environment := chosen.environments.get(script.workload):
        return Path(environment).expanduser()
    documented = root / DOCUMENTED_ENVIRONMENT
    return documented if _is_filled(script, documented) else root / _own_environment(script)


def _own_environment(script: LaunchScript) -> str:
    return f"{ENVIRONMENT_PREFIX}{script.release}"


def _is_filled(script: LaunchScript, environment: Path) -> bool:
    return nemo_run_commit(environment) == script.commits[NEMO_RUN]


def remove_environments(journal: Journal) -> None:
    """Remove the environments that were created here."""
    for item in journal.state.made:
        if item.path.startswith(ENVIRONMENT_PREFIX):
            journal.tree(item.path)


def suite_steps(what: Installation) -> Iterator[InstallStep]:
    """Yield the steps without duplicates, because scripts of a release share parts."""
    names = set[str]()
    for script in suite_scripts(what.answers):
        for step in _Software(what, script, _chosen(what.journal)).steps():
            if step.name not in names:
                names.add(step.name)
                yield step


@dataclass(frozen=True, slots=True)
class _Software:
    what: Installation
    script: LaunchScript
    chosen: SuiteSettings

    @property
    def journal(self) -> Journal:
        return self.what.journal

    @property
    def root(self) -> Path:
        return self.what.root

    def steps(self) -> Iterator[InstallStep]:
        script, needs = self.script, [need for need in self.script.needs if need.commit_of or need.same_as]
        names = ", ".join(Path(filled_path(need.path, {})).name for need in needs)
        yield InstallStep(
            f"suite {script.release}",
            f"clone the reference suite at {script.tag}",
            lambda: self.checkout() is not None,
            self.clone_suite,
        )
        yield InstallStep(
            f"image of suite {script.release}",
            f"import the image {script.image}",
            lambda: image_problem(self.image()) is None,
            self.get_image,
        )
        yield InstallStep(
            f"files of {script.workload} {script.release}",
            f"put {names} where {script.title} looks for it",
            lambda: all(is_met(script, need, self.values()) for need in needs),
            lambda: ", ".join(self.make(need) for need in needs if not is_met(script, need, self.values())),
        )
        if script.installs:
            yield InstallStep(
                f"environment of suite {script.release}",
                f"make the virtual environment of suite {script.release}, which takes minutes",
                lambda: _is_filled(script, self.environment()),
                self.make_environment,
            )

    def checkout(self) -> Path | None:
        """Return the first unmodified checkout of the release; None if there is none."""
        chosen = [Path(self.chosen.checkout).expanduser()] if self.chosen.checkout else []
        places = [*chosen, self.root / SUITES / self.script.tag, self.root / SUITE_FOLDER]
        scripts = scripts_of(self.script.release)
        checkouts = ((place, check_checkout(place, scripts)) for place in places)
        return next((place for place, files in checkouts if all(item.state == "as released" for item in files)), None)

    def clone_suite(self) -> str:
        target = self.root / SUITES / self.script.tag
        clone = ["git", "clone", "--depth", "1", "--branch", self.script.tag, REPOSITORY]
        self.journal.folder(SUITES)
        self.clone(target, lambda folder: [[*clone, str(folder)]], "the suite as released")
        if self.chosen.checkout:
            return f"{target}; pass it with --suite: reference_suite.checkout is not this release as published"
        return str(target)

    def clone(self, target: Path, commands: Callable[[Path], Commands], what: str) -> None:
        """Clone to ``target``, which appears once complete; raise EnvironmentProblem if it exists or cloning fails."""
        if target.exists():
            changed = changed_files(target, self.script) if target.parent.name == SUITES else []
            raise EnvironmentProblem(
                f"this folder is not {what}{':' * bool(changed)}{itemized(changed)}", where=str(target), do=MOVE
            )
        before, path = partial_of(target), str(target.relative_to(self.root))
        unfinished = str(before.relative_to(self.root))
        environ = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        _call(commands(self.journal.tree(unfinished)), commands(target), environ=environ)
        self.journal.tree(path)
        with writing(target):
            before.rename(target)
        self.journal.forget(unfinished)

    def values(self) -> dict[str, str]:
        """Return the values for path templates. Without a checkout, assume the one that would be created."""
        checkout = self.checkout() or self.root / SUITES / self.script.tag
        return {"root": str(self.root), "folder": str(checkout / self.script.folder)}

    def image(self) -> Path:
        return Path(filled_path(self.script.image_file, self.values()))

    def get_image(self) -> str:
        image, importer = self.image(), self.what.import_image
        if importer is None:
            do = f"run 'enroot import --output {image} docker://{self.script.image}' on a node"
            raise EnvironmentProblem("this machine cannot import images", do=do)
        self.journal.image(str(image.relative_to(self.root)))
        importer(self.script.image, image.parent, PYXIS, self.what.answers.node_architecture)
        if problem := image_problem(image):
            raise EnvironmentProblem(f"the image {problem}", where=str(image), do="remove this file")
        return str(image)

    def make(self, need: Need) -> str:
        """Clone NeMo at its commit, with the release's patch if any, or copy a file; return a text."""
        target = Path(filled_path(need.path, self.values()))
        if not target.is_relative_to(self.root):
            what = f"{target} is missing or differs from the release, and llmb does not change files there"
            raise EnvironmentProblem(what, do=filled_path(need.by, self.values()))
        if need.commit_of:
            commit = self.script.commits[need.commit_of]
            patch = self.released(need.patch) if need.patch else None
            commands = partial(_fetch_commands, str(need.repository), commit, patch)
            self.clone(target, commands, f"{need.commit_of} at commit {commit}")
            return f"{target} at {commit[:12]}"
        path = str(target.relative_to(self.root))
        if target.exists() and not self.journal.entry(path):
            raise EnvironmentProblem(f"this file differs from the release's {need.same_as}", where=str(target), do=MOVE)
        self.journal.folder(str(target.parent.relative_to(self.root)))
        self.journal.file(path, self.released(str(need.same_as)).read_text())
        return str(target)

    def released(self, name: str) -> Path:
        checkout = self.checkout()
        if checkout is None:
            what = f"the suite of {self.script.release} changed while it was read"
            raise EnvironmentProblem(what, do="run the command again")
        return checkout / name

    def environment(self) -> Path:
        return _environment(self.script, self.root, self.chosen)

    def make_environment(self) -> str:
        folder, path = self.environment(), _own_environment(self.script)
        lacks = f"this environment lacks NeMo-Run at commit {self.script.commits[NEMO_RUN]}"
        if folder != self.root / path:
            do = f"install it, or unset reference_suite.environments.{self.script.workload} in {CLUSTER_CONFIG}"
            raise EnvironmentProblem(lacks, where=str(folder), do=do)
        if folder.exists() and not self.journal.entry(path):
            raise EnvironmentProblem(lacks, where=str(folder), do=MOVE)
        self.journal.tree(path)
        answers = self.what.answers
        kind = "venv" if answers.environment == EXISTING else str(answers.environment)
        first = empty_environment(kind, str(answers.python), folder, ["--seed"] if kind == "uv" else [])
        rest = [shlex.split(filled_path(line, self.script.commits)) for line in self.script.installs]
        nemo = next(Path(filled_path(need.path, self.values())) for need in self.script.needs if need.commit_of)
        by_hand = [first, [".", str(folder / "bin" / "activate")], ["cd", str(nemo)], *rest]
        _call([first], by_hand)
        _call(rest, by_hand, folder=nemo, environ=activated(folder))
        return f"{folder} with NeMo-Run at {self.script.commits[NEMO_RUN][:12]}"


def _fetch_commands(repository: str, commit: str, patch: Path | None, target: Path) -> Commands:
    """Return commands that clone only one commit, as NeMo's history takes several gigabytes, and apply ``patch``."""
    inside = ["git", "-C", str(target)]
    commands = [["git", "init", "--quiet", str(target)], [*inside, "fetch", "--depth", "1", repository, commit]]
    applied = [[*inside, "apply", str(patch)]] if patch else []
    return [*commands, [*inside, "checkout", "--quiet", "--detach", commit], *applied]


def _call(
    commands: Commands, by_hand: Commands, *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> None:
    try:
        for command in commands:
            run_visibly(command, folder=folder, environ=environ)
    except EnvironmentProblem as error:
        text = " && ".join(map(shlex.join, by_hand))
        do = f"run these commands on another machine, such as one with network access:\n  {text}"
        raise EnvironmentProblem(error.what, do=do) from error
