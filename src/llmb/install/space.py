# SPDX-License-Identifier: Apache-2.0
"""Whether an installation fits on the disk."""

import shutil
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU
from llmb.install.answers import EXISTING, NONE, Answers
from llmb.install.environment import FOLDER as ENVIRONMENT
from llmb.install.prepared_sizes import prepared_sizes
from llmb.prepared.folders import prepared_folders
from llmb.runs.disk_space import check_room

ENVIRONMENT_BYTES = 12 * 10**9
"""PyTorch for CUDA with its libraries, and as much again while it is unpacked; a guess on the safe side."""
CPU_ENVIRONMENT_BYTES = 3 * 10**9
DOWNLOADED = 2
"""A checkpoint is downloaded, and converted beside the download."""


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
