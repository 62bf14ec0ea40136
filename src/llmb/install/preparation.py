# SPDX-License-Identifier: Apache-2.0
"""Data and checkpoints of fine-tunings, prepared by the environment of the installation: now, or by jobs."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.catalogue.load import Catalogue
from llmb.errors import EnvironmentProblem
from llmb.install.answers import Answers
from llmb.install.environment import run_visibly
from llmb.install.prepared_sizes import seq_len_of
from llmb.prepare.verify import verify_prepared
from llmb.prepared.folders import prepared_folders


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


def _sources(answers: Answers, checkpoint: str, dataset: str) -> tuple[list[str], list[str]]:
    return (
        [checkpoint, answers.checkpoint_source] if answers.checkpoint_source else [],
        [dataset, answers.dataset_source] if answers.dataset_source else [],
    )
