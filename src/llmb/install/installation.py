# SPDX-License-Identifier: Apache-2.0
"""What an installation is made with, the form of its steps, and the data and checkpoints that it prepares."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, gpu_types_of, resolve
from llmb.checkpoints.prepared_data import prepared_folders
from llmb.errors import EnvironmentProblem
from llmb.install.answers import Answers
from llmb.install.environment import run_visibly
from llmb.install.state import Journal
from llmb.prepare.hub_access import NeededRepository, access_problem, can_check, check_access, needed_repositories
from llmb.prepare.verify import verify_prepared

IMAGES = "images"

PREPARED_HOW = ("here", "job")
TINY = "tiny"
"""A size that is prepared only if it is asked for."""

ImportImage = Callable[[str, Path, str, str | None], Path]
"""Gets an image's name, the folder for its file, the runtime and the nodes' architecture; returns the file, which
exists when it is complete."""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One step; ``do`` returns what was done, in words."""

    name: str
    title: str
    is_done: Callable[[], bool]
    do: Callable[[], str]


def prepared_sizes(catalogue: Catalogue, answers: Answers) -> Iterator[tuple[str, str]]:
    """Workload and size of each: those of the documents that the GPU type can train, or the size that is given."""
    for name in answers.workloads:
        workload = catalogue.workloads.get(name)
        for size in workload.sources if workload else ():
            is_wanted = size == answers.size if answers.size else size != TINY
            if workload and is_wanted and answers.gpu_type in (None, *gpu_types_of(workload, size)):
                yield name, size


def seq_len_of(catalogue: Catalogue, answers: Answers, workload: str, size: str) -> int:
    """The length that the GPU type's layout packs samples to."""
    return resolve(catalogue, Request(workload=workload, size=size, gpu_type=answers.gpu_type)).layout.seq_len


def hub_repositories(catalogue: Catalogue, answers: Answers) -> tuple[NeededRepository, ...]:
    """Repositories that the preparations download from; none where nothing is prepared or all is local."""
    if answers.prepare not in PREPARED_HOW:
        return ()
    models = list(prepared_sizes(catalogue, answers))
    return needed_repositories(
        catalogue, models, weights=not answers.checkpoint_source, data=not answers.dataset_source
    )


def check_hub(repositories: Sequence[NeededRepository]) -> str:
    """What was found, in words. Raises EnvironmentProblem for a repository that cannot be read."""
    if not can_check():
        return "not checked: this needs pip install 'llmb[prepare]' beside the command that installs"
    found = check_access(repositories)
    if problem := access_problem(found):
        raise problem
    reason = next((item.reason for item in found if item.state == "not checked"), None)
    return f"not checked: {reason}" if reason else f"granted: {', '.join(item.name for item in repositories)}"


def is_prepared(catalogue: Catalogue, root: Path, answers: Answers, workload: str, size: str) -> bool:
    """Whether everything is there that the GPU type trains on: data that is packed to other lengths is not needed."""
    found = verify_prepared(catalogue, workload, size, prepared_folders(root, workload), None)
    own = f"_{seq_len_of(catalogue, answers, workload, size)}"
    return all("/packed/" in item.name and not item.name.endswith(own) for item in found.lacking)


@dataclass
class Preparations:
    """Starts preparations, and keeps the jobs that were queued."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    """As ``llmb prepare submit --json`` prints them."""

    def do(self, python: Path, root: Path, answers: Answers, workload: str, size: str) -> str:
        """Raises EnvironmentProblem if a command fails."""
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
        return f"jobs {ids} prepare {workload} {size}" if ids else "jobs that were queued before prepare it"

    def _queued(self, command: Sequence[str]) -> list[dict[str, Any]]:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False, env=os.environ
        )
        if done.returncode:
            raise EnvironmentProblem("the preparation cannot be queued; the reason is above")
        found: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is installed, and by what means."""

    journal: Journal
    answers: Answers
    catalogue: Catalogue
    import_image: ImportImage | None = None
    """None where images cannot be imported here: an image is then used by the name it was given."""
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
