# SPDX-License-Identifier: Apache-2.0
"""Checkpoint and dataset of the reference suite's fine-tunings, which a script of the suite prepares in jobs."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.install.answers import OPTIONS, Answers
from llmb.install.environment import activated
from llmb.install.installation import Installation
from llmb.prepare.verify import verify_prepared
from llmb.prepared.folders import WORKLOADS, prepared_folders
from llmb.reference_suite.launch_scripts import NEMO_RUN_JOB, TOKEN, LaunchScript
from llmb.reference_suite.prepared_data import NemoItem
from llmb.runs.folder import RunFolder
from llmb.schedulers.installer import NONE
from llmb.schedulers.lookup import LOCAL, find_scheduler
from llmb.secrets import HIDDEN, redacted, without_secrets
from llmb.tools import LONGEST_S, ask_program

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
    base: RunFolder
    array_index: int | None = None
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
            do=_by_hand(script, folder, environment, given),
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


def _by_hand(script: LaunchScript, folder: Path, environment: Path, given: Mapping[str, str]) -> str:
    """The call, with the token by its name."""
    shown = [f"{name}={shlex.quote(value)}" for name, value in sorted(given.items()) if name != TOKEN]
    enter = f". {shlex.quote(str(environment / 'bin' / 'activate'))} && cd {shlex.quote(str(folder))}"
    return f"call, with {TOKEN} exported:\n  {enter} && {' '.join(shown)} ./{script.prepares}"
