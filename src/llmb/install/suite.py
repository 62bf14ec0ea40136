# SPDX-License-Identifier: Apache-2.0
"""The reference suite's own software in an installation: checkout, image, NeMo, virtual environment, data.

What its own installer, or its user, has made is taken as it is, and never changed.
"""

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from llmb.errors import EnvironmentProblem, InfrastructureError
from llmb.input_files import open_file
from llmb.install.answers import EXISTING, OPTIONS, Answers, absolute, suite_scripts
from llmb.install.environment import activated, empty_environment, run_visibly
from llmb.install.installation import PREPARED_HOW, Installation, InstallStep
from llmb.install.state import Journal, partial_of
from llmb.prepare.hub import Hub
from llmb.prepare.verify import verify_prepared
from llmb.prepared.folders import WORKLOADS, prepared_folders
from llmb.reference_suite.launch_scripts import (
    NEMO_RUN,
    NEMO_RUN_JOB,
    REPOSITORY,
    TOKEN,
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
from llmb.reference_suite.prepared_data import NemoItem
from llmb.runs.folder import CLUSTER_CONFIG, RunFolder, writing
from llmb.schedulers.installer import NONE
from llmb.schedulers.lookup import LOCAL, cluster_schema, find_scheduler
from llmb.secrets import HIDDEN, redacted, without_secrets
from llmb.site.cluster_config import SuiteSettings, read_cluster_config
from llmb.site.site import SUITE_FOLDER, SUITES
from llmb.tools import LONGEST_S, ask_program

DOCUMENTED_ENVIRONMENT = "venv"
"""Where the documents make it, below STAGE_PATH."""
OWN_ENVIRONMENTS = f"{SUITES}/environment-"
PYXIS = "pyxis"
MOVE = "move it away"
Commands = Sequence[Sequence[str]]


def suite_environments(answers: Answers, journal: Journal) -> dict[str, str]:
    """The virtual environment of each workload that needs one."""
    chosen = _chosen(journal)
    needing = (script for script in suite_scripts(answers) if script.installs)
    return {script.workload: str(_environment(script, journal.root, chosen)) for script in needing}


def _chosen(journal: Journal) -> SuiteSettings:
    """What the user's settings say, or those of the suite's own installer."""
    if journal.is_own(CLUSTER_CONFIG):  # it says what was answered
        return SuiteSettings()
    return read_cluster_config(journal.root, cluster_schema()).reference_suite


def _environment(script: LaunchScript, root: Path, chosen: SuiteSettings) -> Path:
    if named := chosen.environments.get(script.workload):
        return Path(named).expanduser()
    documented = root / DOCUMENTED_ENVIRONMENT
    return documented if _is_filled(script, documented) else root / _own_environment(script)


def _own_environment(script: LaunchScript) -> str:
    return f"{OWN_ENVIRONMENTS}{script.release}"


def _is_filled(script: LaunchScript, environment: Path) -> bool:
    return nemo_run_commit(environment) == script.commits[NEMO_RUN]


def remove_environments(journal: Journal) -> None:
    """After a move, the environments that were made here do not work."""
    for item in journal.state.made:
        if item.path.startswith(OWN_ENVIRONMENTS):
            journal.tree(item.path)


def suite_steps(what: Installation) -> Iterator[InstallStep]:
    """Nothing twice that scripts of a release share."""
    seen = set[str]()
    for script in suite_scripts(what.answers):
        for step in _Software(what, script, _chosen(what.journal)).steps():
            if step.name not in seen:
                seen.add(step.name)
                yield step


@dataclass(frozen=True, slots=True)
class _Software:
    """What one launch script needs."""

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
        script = self.script
        made = ", ".join(Path(filled_path(need.path, {})).name for need in self.made_here())
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
            f"put {made} where {script.title} looks for it",
            lambda: all(is_met(script, need, self.values()) for need in self.made_here()),
            self.make_files,
        )
        if script.installs:
            yield InstallStep(
                f"environment of suite {script.release}",
                f"make the virtual environment of suite {script.release}, which takes minutes",
                lambda: _is_filled(script, self.environment()),
                self.make_environment,
            )
        if script.prepares and self.what.answers.prepare in PREPARED_HOW:
            yield InstallStep(
                f"data of {script.workload} {script.release}",
                f"queue the suite's jobs that prepare data and checkpoint of {script.workload}",
                lambda: has_data(self.what, script),
                lambda: queue_data(self.what, script, Path(self.values()["folder"]), self.environment()),
            )

    def checkout(self) -> Path | None:
        """The first checkout that is as released."""
        chosen = [Path(self.chosen.checkout).expanduser()] if self.chosen.checkout else []
        places = [*chosen, self.root / SUITES / self.script.tag, self.root / SUITE_FOLDER]
        return next((place for place in places if _is_released(place, self.script.release)), None)

    def clone_suite(self) -> str:
        target = self.root / SUITES / self.script.tag
        if target.exists():
            changes = "; ".join(changed_files(target, self.script)) or "other files were changed"
            raise EnvironmentProblem(f"this is not the suite as released: {changes}", where=str(target), do=MOVE)
        self.journal.folder(SUITES)
        _make_at_once(self.journal, target, partial(_suite_clone, self.script.tag))
        if self.chosen.checkout:
            return f"{target}; give it with --suite: reference_suite.checkout is another release"
        return str(target)

    def values(self) -> dict[str, str]:
        """What templates of paths have. Without a checkout, as if the one that is to be made were there."""
        checkout = self.checkout() or self.root / SUITES / self.script.tag
        return {"root": str(self.root), "folder": str(checkout / self.script.folder)}

    def image(self) -> Path:
        return Path(filled_path(self.script.image_file, self.values()))

    def get_image(self) -> str:
        image, importer = self.image(), self.what.import_image
        if importer is None:
            do = f"call 'enroot import --output {image} docker://{self.script.image}' on a node"
            raise EnvironmentProblem("no image can be imported here", do=do)
        self.journal.image(str(image.relative_to(self.root)))
        importer(self.script.image, image.parent, PYXIS, self.what.answers.node_architecture)
        if problem := image_problem(image):
            raise EnvironmentProblem(f"the image {problem}", where=str(image), do="remove it")
        return str(image)

    def made_here(self) -> list[Need]:
        """What is cloned, copied or downloaded; the rest is made by jobs."""
        return [need for need in self.script.needs if need.commit_of or need.same_as or need.hub]

    def make_files(self) -> str:
        values, done = self.values(), list[str]()
        for need in self.made_here():
            if is_met(self.script, need, values):
                continue
            target = Path(filled_path(need.path, values))
            if not target.is_relative_to(self.root):
                what = f"{target} is missing, or not that of the release, and llmb changes nothing there"
                raise EnvironmentProblem(what, do=filled_path(need.by, values))
            done.append(self.clone(need, target) if need.commit_of else self.copy(need, target))
        return ", ".join(done)

    def clone(self, need: Need, target: Path) -> str:
        commit = self.script.commits[str(need.commit_of)]
        if target.exists():
            raise EnvironmentProblem(f"this is not {need.commit_of} at commit {commit}", where=str(target), do=MOVE)
        patch = self.released(need.patch) if need.patch else None
        _make_at_once(self.journal, target, partial(_clone_at, str(need.repository), commit, patch))
        return f"{target} at {commit[:12]}"

    def copy(self, need: Need, target: Path) -> str:
        path = str(target.relative_to(self.root))
        if target.exists() and not self.journal.made(path):
            of = f"{target.name} of {need.hub}" if need.hub else f"release's {need.same_as}"
            raise EnvironmentProblem(f"this is not the {of}", where=str(target), do=MOVE)
        text = self.of_hub(need, target) if need.hub else self.released(str(need.same_as)).read_text()
        self.journal.folder(str(target.parent.relative_to(self.root)))
        self.journal.file(path, text)
        return str(target)

    def of_hub(self, need: Need, target: Path) -> str:
        """The text of a file of ``--tokenizer-source`` or, without it, of the hub."""
        given, name = self.what.answers.tokenizer_source, target.name
        with TemporaryDirectory() as cache:
            folder = absolute(given) if given else _download(str(need.hub), target, Path(cache))
            with open_file(folder / name, do="give a folder that has it with --tokenizer-source") as stream:
                content = stream.read()
        if hashlib.sha256(content).hexdigest() != need.sha256:
            what, do = f"this is not the released {name} of {need.hub}", _hub_by_hand(str(need.hub), target)
            raise EnvironmentProblem(what, where=str(folder / name) if given else f"the hub's {name}", do=do)
        return content.decode()

    def released(self, name: str) -> Path:
        """A file of the checkout."""
        checkout = self.checkout()
        if checkout is None:
            raise EnvironmentProblem(f"the suite of {self.script.release} was changed meanwhile", do="try again")
        return checkout / name

    def environment(self) -> Path:
        return _environment(self.script, self.root, self.chosen)

    def make_environment(self) -> str:
        folder, path = self.environment(), _own_environment(self.script)
        if folder != self.root / path:
            commit = self.script.commits[NEMO_RUN]
            do = f"install it there, or unset reference_suite.environments.{self.script.workload}"
            raise EnvironmentProblem(f"NeMo-Run is not at commit {commit} there", where=str(folder), do=do)
        if folder.exists() and not self.journal.made(path):
            raise EnvironmentProblem("this environment is not complete", where=str(folder), do=MOVE)
        self.journal.tree(path)
        first, rest, nemo = self.empty(folder), self.filling(), self.nemo()
        by_hand = [first, [".", str(folder / "bin" / "activate")], ["cd", str(nemo)], *rest]
        _call([first], by_hand)
        _call(rest, by_hand, folder=nemo, environ=activated(folder))
        return f"{folder} with NeMo-Run at {self.script.commits[NEMO_RUN][:12]}"

    def empty(self, folder: Path) -> Sequence[str]:
        answers = self.what.answers
        kind = "venv" if answers.environment == EXISTING else str(answers.environment)
        return empty_environment(kind, str(answers.python), folder, ["--seed"] if kind == "uv" else [])

    def filling(self) -> Commands:
        return [shlex.split(filled_path(line, self.script.commits)) for line in self.script.installs]

    def nemo(self) -> Path:
        need = next(need for need in self.script.needs if need.commit_of)
        return Path(filled_path(need.path, self.values()))


def _is_released(checkout: Path, release: str) -> bool:
    return all(item.state == "as released" for item in check_checkout(checkout, scripts_of(release)))


def _suite_clone(tag: str, target: Path) -> Commands:
    return [["git", "clone", "--depth", "1", "--branch", tag, REPOSITORY, str(target)]]


def _clone_at(repository: str, commit: str, patch: Path | None, target: Path) -> Commands:
    """One commit alone: NeMo's history is some gigabytes."""
    inside = ["git", "-C", str(target)]
    commands = [["git", "init", "--quiet", str(target)], [*inside, "fetch", "--depth", "1", repository, commit]]
    applied = [[*inside, "apply", str(patch)]] if patch else []
    return [*commands, [*inside, "checkout", "--quiet", "--detach", commit], *applied]


def _download(repository: str, target: Path, cache: Path) -> Path:
    """The folder with the file of the hub that ``target`` is to be a copy of."""
    try:
        return Hub(cache).fetch(repository, "model", [target.name], [target.name], lambda *_: None)
    except (EnvironmentProblem, InfrastructureError) as error:
        raise EnvironmentProblem(error.what, do=_hub_by_hand(repository, target)) from error


def _hub_by_hand(repository: str, target: Path) -> str:
    command = ["hf", "download", repository, target.name, "--local-dir", str(target.parent)]
    return f"{_by_hand([command])}\nor give a folder that has the file with --tokenizer-source"


def _make_at_once(journal: Journal, target: Path, commands: Callable[[Path], Commands]) -> None:
    """A folder that has its name only when it is complete; what a killed attempt left is removed first."""
    before, path = partial_of(target), str(target.relative_to(journal.root))
    unfinished = str(before.relative_to(journal.root))
    if shutil.which("git") is None:
        raise EnvironmentProblem("there is no git on this machine", do=_by_hand(commands(target)))
    _call(commands(journal.tree(unfinished)), commands(target), environ={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    journal.tree(path)
    with writing(target):
        before.rename(target)
    journal.forget(unfinished)


def _call(
    commands: Commands,
    by_hand: Commands,
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Raises EnvironmentProblem with the commands that do it by hand."""
    try:
        for command in commands:
            run_visibly(command, folder=folder, environ=environ)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(error.what, do=_by_hand(by_hand)) from error


def _by_hand(commands: Commands) -> str:
    """The commands that do the same where they can."""
    return f"call on a machine that can, such as one with the network:\n  {' && '.join(map(shlex.join, commands))}"


NEEDED = (TOKEN, "GPU_TYPE", "SBATCH_ACCOUNT", "SBATCH_PARTITION")
LEFT_OUT = frozenset(
    ("STAGE_PATH", "IMAGE", "HF_HOME", "NEMO_HOME", "SKIP_IMPORT_CHECKPOINT", "SKIP_DATASET_DOWNLOAD", "TIME_LIMIT")
)
"""Variables by which the script would do something else, or elsewhere."""
ANSWER_LIMIT_S = 60.0
CALLED = "suite_preparation"
"""Folder of a workload with what the script printed, which names its jobs."""


def has_data(what: Installation, script: LaunchScript) -> bool:
    """Whether checkpoint and dataset are there in NeMo's form."""
    return all(item.state == "complete" for item in _items(what, script))


def _items(what: Installation, script: LaunchScript) -> Sequence[NemoItem]:
    folders = prepared_folders(what.root, script.workload)
    return verify_prepared(what.catalogue, script.workload, script.sizes[0], folders, None).nemo


@dataclass(frozen=True, slots=True)
class _QueuedJob:
    """A job of the suite, as a scheduler is asked for it."""

    job_id: str
    folder: RunFolder
    live: bool = True

    @property
    def key(self) -> str:
        return self.job_id


def queue_data(what: Installation, script: LaunchScript, folder: Path, environment: Path) -> str:
    """Calls the suite's script in ``folder``, unless jobs that it queued before still wait or run.

    Raises EnvironmentProblem if it cannot be called, or queues nothing.
    """
    for item in _items(what, script):
        if item.state == "of llmb":
            raise EnvironmentProblem(str(item.problem), where=str(item.path))
    own = what.root / WORKLOADS / script.workload
    called = RunFolder(own / CALLED)
    if live := _live(what, called):
        return f"queued before as {', '.join(live)}"
    given = _variables(what.answers, what.root, own)
    passed = without_secrets(activated(environment))
    environ = {name: value for name, value in passed.items() if name not in LEFT_OUT} | given
    if missing := [name for name in NEEDED if not environ.get(name)]:
        names = ", ".join(missing)
        raise EnvironmentProblem(f"{script.prepares} needs {names}", do=f"export {names} in this shell")
    said = ask_program([f"./{script.prepares}"], LONGEST_S, environ=environ, cwd=str(folder))
    output = redacted((said.text + said.errors).replace(environ[TOKEN], HIDDEN))
    what.journal.folder(str(called.path.relative_to(what.root)))
    what.journal.file(str(called.launch_output.relative_to(what.root)), output)
    sys.stderr.write(output)
    queued = NEMO_RUN_JOB.findall(output)
    if said.problem or not queued:
        why = said.problem or "it ended without the id of a job"
        raise EnvironmentProblem(
            f"{script.prepares} failed, and what it printed is above: {why}",
            where=str(folder),
            do=_data_by_hand(script, folder, environment, given),
        )
    return f"queued as {', '.join(queued)}"


def _live(what: Installation, called: RunFolder) -> list[str]:
    """Ids of jobs of an earlier call that have not ended."""
    try:
        ids = NEMO_RUN_JOB.findall(called.launch_output.read_text())
    except FileNotFoundError:
        return []
    jobs = [_QueuedJob(job_id, called) for job_id in ids]
    found = find_scheduler(what.answers.scheduler or LOCAL).states(jobs, ANSWER_LIMIT_S)
    return [job_id for job_id, state in found.states.items() if state.phase in ("queued", "running")]


def _variables(answers: Answers, root: Path, own: Path) -> dict[str, str]:
    """What the suite's installer exports for the script."""
    shell = {name: os.environ[name] for name in NEEDED if os.environ.get(name)}
    return {**shell, **dict(_answered(answers)), "LLMB_INSTALL": str(root), "LLMB_WORKLOAD": str(own)}


def _answered(answers: Answers) -> Iterator[tuple[str, str]]:
    """Answers that have a variable of the suite, and how jobs ask for GPUs."""
    for option in OPTIONS.values():
        value = getattr(answers, option.field, None)
        if value not in (None, NONE):
            yield from ((variable, str(value)) for variable in option.set_by)
    section = find_scheduler(answers.scheduler or LOCAL).section(answers, answers.gpus_per_node)
    if section.get("gpu_request") == "gpus-per-node":
        yield "SBATCH_GPUS_PER_NODE", str(section["gpus_per_node"])


def _data_by_hand(script: LaunchScript, folder: Path, environment: Path, given: Mapping[str, str]) -> str:
    """The call, with the token by its name."""
    shown = [f"{name}={shlex.quote(value)}" for name, value in sorted(given.items()) if name != TOKEN]
    enter = f". {shlex.quote(str(environment / 'bin' / 'activate'))} && cd {shlex.quote(str(folder))}"
    return f"call, with {TOKEN} exported:\n  {enter} && {' '.join(shown)} ./{script.prepares}"
