# SPDX-License-Identifier: Apache-2.0
"""Prepares an installation's data and checkpoints, and removes the installation; defines what its steps share."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.base.errors import EnvironmentProblem, UsageError, pip_install
from llmb.base.trust import STATE_FOLDER, WORKLOADS, check_inside
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, gpu_types_of, is_tiny, resolve
from llmb.jobs.history import database_path, read_history
from llmb.jobs.job import LIVE
from llmb.jobs.store import Filter
from llmb.jobs.task import PREPARATIONS
from llmb.runs.checkpoints.prepared_data import PREPARED, prepared_folders
from llmb.runs.folder import writing
from llmb.setup.install.answers import Answers
from llmb.setup.install.install_state import (
    LOCK,
    InstalledItem,
    InstallState,
    Journal,
    locked_journal,
    partial_of,
    read_state,
    remove,
    state_path,
)
from llmb.setup.install.python_environment import run_visibly
from llmb.setup.prepare.hub import NeededRepository, access_problem, can_check, check_access, needed_repositories
from llmb.setup.prepare.verify import verify_prepared

IMAGES = "images"

PREPARED_HOW = ("here", "job")

ImportImage = Callable[[str, Path, str, str | None], Path]
"""Imports an image, given its name, folder, runtime and the nodes' architecture; returns the path of the file."""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One step; ``do`` performs it, and returns a description of the change."""

    name: str
    title: str
    is_done: Callable[[], bool]
    do: Callable[[], str]


def prepared_sizes(catalogue: Catalogue, answers: Answers) -> Iterator[tuple[str, str]]:
    """Yield workloads and sizes to prepare that the GPU type can train: the explicit size, or all but tiny ones."""
    for name in answers.workloads:
        workload = catalogue.workloads.get(name)
        for size in workload.sources if workload else ():
            is_chosen = size == answers.size if answers.size else not is_tiny(size)
            if workload and is_chosen and answers.gpu_type in (None, *gpu_types_of(workload, size)):
                yield name, size


def seq_len_of(catalogue: Catalogue, answers: Answers, workload: str, size: str) -> int:
    """Return the sequence length of the GPU type's layout, to which data is packed."""
    return resolve(catalogue, Request(workload=workload, size=size, gpu_type=answers.gpu_type)).layout.seq_len


def hub_repositories(catalogue: Catalogue, answers: Answers) -> tuple[NeededRepository, ...]:
    """Return the hub's repositories that the preparations need; none if nothing has to be downloaded."""
    if answers.prepare not in PREPARED_HOW:
        return ()
    models = list(prepared_sizes(catalogue, answers))
    return needed_repositories(
        catalogue, models, weights=not answers.checkpoint_source, data=not answers.dataset_source
    )


def check_hub(repositories: Sequence[NeededRepository]) -> str:
    """Describe the access to the repositories. Raise EnvironmentProblem if the user may not read one of them."""
    if not can_check():
        return f"not checked: this needs {pip_install('prepare')}"
    access = check_access(repositories)
    if problem := access_problem(access):
        raise problem
    reason = next((item.reason for item in access if item.state == "not checked"), None)
    return f"not checked: {reason}" if reason else f"granted: {', '.join(item.name for item in repositories)}"


def is_prepared(catalogue: Catalogue, root: Path, answers: Answers, workload: str, size: str) -> bool:
    """Return True if everything that the GPU type trains on exists; data packed to other lengths is not needed."""
    items = verify_prepared(catalogue, workload, size, prepared_folders(root, workload), None)
    suffix = f"_{seq_len_of(catalogue, answers, workload, size)}"
    return all("/packed/" in item.name and not item.name.endswith(suffix) for item in items.lacking)


@dataclass
class Preparations:
    """Starts preparations, and collects the queued jobs."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    """The jobs that ``llmb prepare submit --json`` prints."""

    def do(self, python: Path, root: Path, answers: Answers, workload: str, size: str) -> str:
        """Prepare a size of a workload, or queue jobs for it. Raise EnvironmentProblem if a command fails."""
        llmb = ["env", f"LLMB_INSTALL={root}", str(python), "-P", "-m", "llmb.cli.main", "prepare"]
        model = ["-w", workload, "-s", size]
        if answers.prepare == "here":
            source, other = _sources(answers, "--source", "--source")
            run_visibly([*llmb, "checkpoint", *model, *source])
            run_visibly([*llmb, "dataset", *model, *other])
            return f"{workload} {size} is prepared"
        checkpoint, dataset = _sources(answers, "--checkpoint-source", "--dataset-source")
        queued = self._queued([*llmb, "submit", *model, *checkpoint, *dataset, "--yes", "--json"])
        self.jobs += queued
        ids = ", ".join(job["job_id"] for job in queued)
        return f"queued to prepare {workload} {size}: {ids}" if ids else "jobs that prepare it were queued before"

    def _queued(self, command: Sequence[str]) -> list[dict[str, Any]]:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False, env=os.environ
        )
        if process.returncode:
            raise EnvironmentProblem("the preparation cannot be queued; the reason is above")
        jobs: list[dict[str, Any]] = json.loads(process.stdout)["jobs"]
        return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Everything that the steps of an installation need."""

    journal: Journal
    answers: Answers
    catalogue: Catalogue
    import_image: ImportImage | None = None
    """None if images cannot be imported here: an image is then used by its name."""
    keep_settings: bool = False
    preparations: Preparations = field(default_factory=Preparations)

    @property
    def root(self) -> Path:
        return self.journal.root

    @property
    def image_folder(self) -> Path:
        return Path(self.answers.image_folder) if self.answers.image_folder else self.root / IMAGES


def _sources(answers: Answers, checkpoint: str, dataset: str) -> tuple[list[str], list[str]]:
    return (
        [checkpoint, answers.checkpoint_source] if answers.checkpoint_source else [],
        [dataset, answers.dataset_source] if answers.dataset_source else [],
    )


RESULTS = ("experiments", PREPARATIONS, PREPARED)
"""Folders of a workload that runs and preparations create."""
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Removal:
    removed: tuple[str, ...]
    remaining: tuple[str, ...]
    """The paths that were not removed, because they were changed or contain something else."""


def planned_removal(root: Path, *, results: bool) -> list[str]:
    """Return the paths that ``undo`` removes if unchanged, except history; raise UsageError without an installation."""
    state = read_state(root)
    if state is None:
        do = "pass the folder of an installation with --path, or set LLMB_INSTALL"
        raise UsageError("nothing was installed here", where=str(root), do=do)
    paths = [item.path for item in state.made if (root / item.path).exists()]
    outputs = [str(path.relative_to(root)) for path in _results(root, state.answers.workloads)]
    return [*paths, *(outputs if results else [])]


def undo(root: Path, say: Callable[[str], None], *, results: bool) -> Removal:
    """Remove unchanged items; with ``results`` also runs, prepared data and history.

    Raise UsageError or EnvironmentProblem; a second call continues.
    """
    with locked_journal(root) as journal:
        _check_no_live_jobs(root, say)
        state = journal.state
        folders = []
        with writing(root):
            if results:
                for path in _results(root, state.answers.workloads):
                    shutil.rmtree(path)
                    folders.append(str(path.relative_to(root)))
                _remove_history(root)
            removed, remaining = remove(root, [item for item in state.made if item.path != STATE_FOLDER])
            _remove_state(root, state)
    if root.exists() and state.made_root:
        remaining = [*remaining, "."]
    return Removal((*folders, *removed), tuple(remaining))


def _results(root: Path, workloads: Sequence[str]) -> list[Path]:
    folders = [root / WORKLOADS / name / kind for name in workloads for kind in RESULTS]
    existing = [path for path in folders if path.is_dir()]
    for path in existing:
        check_inside(path, root)
    return existing


def _remove_history(root: Path) -> None:
    for path in (root / STATE_FOLDER).iterdir():
        if path.name in (LOCK, state_path(root).name):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_state(root: Path, state: InstallState) -> None:
    """Remove the state last, together with its folders, so that a killed removal can be completed."""
    (root / STATE_FOLDER / LOCK).unlink(missing_ok=True)
    is_created = state.made_root or InstalledItem(path=STATE_FOLDER, kind="folder") in state.made
    if not is_created or len([*(root / STATE_FOLDER).iterdir()]) > 1:
        state_path(root).unlink()
        return
    is_empty = state.made_root and len([*root.iterdir()]) == 1
    target = root if is_empty else root / STATE_FOLDER
    shutil.rmtree(target.rename(partial_of(target)))


def complete_removal(root: Path) -> bool:
    """Remove leftovers of a killed removal or of an installation killed at its start; return True if there were any."""
    if state_path(root).exists():
        return False
    leftovers = [partial for target in (root, root / STATE_FOLDER) if (partial := partial_of(target)).exists()]
    for partial in leftovers:
        shutil.rmtree(partial)
    return bool(leftovers)


def _check_no_live_jobs(root: Path, say: Callable[[str], None]) -> None:
    if not database_path(root).exists():
        return
    with read_history(root, say) as store:
        live = [str(job.job_id or job.key) for job in store.jobs(Filter(states=LIVE))]
    if live:
        names = ", ".join(live[:MOST_NAMED]) + (", ..." if len(live) > MOST_NAMED else "")
        do = f"set LLMB_INSTALL={root}, then run 'llmb jobs refresh', and 'llmb jobs wait' or 'llmb jobs cancel'"
        raise UsageError(f"jobs are queued or running: {names}; nothing was removed", where=str(root), do=do)
