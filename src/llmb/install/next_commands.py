# SPDX-License-Identifier: Apache-2.0
"""What the user of a new installation calls first."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.install.answers import Answers
from llmb.install.environment import python_of
from llmb.install.prepared_sizes import prepared_sizes


def next_commands(catalogue: Catalogue, answers: Answers, root: Path, *, jobs: bool) -> Iterator[tuple[str, str]]:
    """Commands, each after what it is for. ``jobs`` prepare something in the background."""
    llmb = _llmb(python_of(answers, root))
    yield "in this shell, and in the next ones", f"export LLMB_INSTALL={shlex.quote(str(root))}"
    if jobs:
        yield "preparations in the background", f"{llmb} jobs list"
    if answers.prepare in ("here", "job"):
        for workload, size in prepared_sizes(catalogue, answers):
            yield "what is prepared, and what is missing", f"{llmb} prepare verify -w {workload} -s {size}"
    plain = [name for name in answers.workloads if not catalogue.workloads[name].sources]
    model = f"-w {plain[0]}" if plain else f"-w {answers.workloads[0]} --synthetic"
    command = "submit" if answers.scheduler == "slurm" else "run"
    wait = " --wait" if command == "submit" else ""
    yield "a first result", f"{llmb} {command} {model} -s tiny --gpu-type cpu --scale 2{wait}"


def _llmb(python: Path) -> str:
    """The command as a shell takes it."""
    script = python.with_name("llmb")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(str(python))} -P -m llmb.cli.main"
