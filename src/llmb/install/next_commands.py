# SPDX-License-Identifier: Apache-2.0
"""What the user of a new installation calls first. Pure."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.install.answers import Answers
from llmb.install.environment import python_of
from llmb.install.preparation import prepared_sizes


def next_commands(catalogue: Catalogue, answers: Answers, root: Path, *, jobs: bool) -> Iterator[str]:
    """``jobs`` prepare something in the background."""
    llmb = shlex.quote(str(python_of(answers, root).with_name("llmb")))
    yield f"export LLMB_INSTALL={shlex.quote(str(root))}"
    if jobs:
        yield f"{llmb} jobs list  # preparations in the background"
    if answers.prepare in ("here", "job"):
        for workload, size in prepared_sizes(catalogue, answers):
            yield f"{llmb} prepare verify -w {workload} -s {size}  # what is prepared, and what is missing"
    plain = [name for name in answers.workloads if not catalogue.workloads[name].sources]
    model = f"-w {plain[0]}" if plain else f"-w {answers.workloads[0]} --synthetic"
    command = "submit" if answers.scheduler == "slurm" else "run"
    wait = " --wait" if command == "submit" else ""
    yield f"{llmb} {command} {model} -s tiny --gpu-type cpu --scale 2{wait}  # a first result"
