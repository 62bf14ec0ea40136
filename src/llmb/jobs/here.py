# SPDX-License-Identifier: Apache-2.0
"""A run on this machine from its request to its result, for the command and for Python."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request
from llmb.jobs.local_run import Say, local_spec, run_here
from llmb.jobspec.spec import JobSpec
from llmb.programs.engine.here import check_here
from llmb.programs.engine.nsys import with_profiler
from llmb.resources.nvml import find_gpus
from llmb.resources.other_work import run_text
from llmb.resources.processes import NodeProcesses
from llmb.runs.choices import Choices
from llmb.runs.claim import create_run_folder
from llmb.runs.disk_space import check_space
from llmb.runs.folder import RunFolder, experiment_name, run_parent
from llmb.runs.plan import EnginePlan
from llmb.runs.planning import NotPrepared, plan_training
from llmb.runs.result import Result
from llmb.runs.step_follower import StepNews
from llmb.schedulers.local.command import local_command, local_variables
from llmb.site.machine import Machine, check_machine, recipe_for, this_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """A run that is planned, but not started."""

    plan: EnginePlan
    asked: EnginePlan
    """The plan before a profiler was chosen."""
    machine: Machine
    install: Path
    environ: Mapping[str, str]
    label: str | None = None
    missing: NotPrepared | None = None
    """What has to be prepared before it can be started."""

    def sample(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The workers' command and variables, for a folder that need not exist."""
        folder = RunFolder(run_parent(self.install, self.plan) / "SECONDS" / experiment_name(self.plan))
        spec = local_spec(self.plan, self.install, self.environ, folder)
        return local_command(spec, folder), self._variables(spec)

    def check(self) -> None:
        """Raises NotPrepared, and EnvironmentProblem if this machine cannot run it."""
        if self.missing:
            raise self.missing
        check_machine(self.plan, self.machine)
        check_here(self.asked)
        saved_in = Path(self.plan.checkpoint_dir) if self.plan.checkpoint_dir else run_parent(self.install, self.plan)
        check_space(self.plan, saved_in)

    def beside(self) -> Iterator[str]:
        """What else works on this machine now: other runs of llmb, and processes on its GPUs."""
        processes = NodeProcesses()
        processes.look()
        for run in processes.others():
            yield f"warning: another run is on this machine: {run_text(run)}; step times of both will be rough"
        gpus = find_gpus() if self.plan.device == "cuda" else ""
        if not isinstance(gpus, str) and (pids := sorted({pid for each in gpus.processes() for pid in each or ()})):
            yield f"warning: other processes compute on the GPUs of this machine: {', '.join(map(str, pids))}"

    def start(self, on_step: Callable[[StepNews], None], say: Say) -> tuple[RunFolder, Result]:
        """Runs it to its end, successful or not. Raises UserInterrupt and EnvironmentProblem."""
        folder = create_run_folder(self.install, self.plan)
        spec = local_spec(self.plan, self.install, self.environ, folder)
        result = run_here(self.plan, spec, folder, self.install, self._variables(spec), on_step, say, self.label)
        return folder, result

    def _variables(self, spec: JobSpec) -> dict[str, str]:
        return local_variables(spec, self.machine.cores, self.environ)


def plan_here(
    catalogue: Catalogue, request: Request, choices: Choices, environ: Mapping[str, str], install: Path
) -> LocalRun:
    """Raises UsageError with everything that is wrong with the request."""
    machine = this_machine()
    recipe = recipe_for(catalogue, request, machine)
    missing = None
    try:
        asked = plan_training(catalogue, recipe, choices, install)
    except NotPrepared as error:
        asked, missing = error.plan, error
    return LocalRun(
        plan=with_profiler(asked),
        asked=asked,
        machine=machine,
        install=install,
        environ=environ,
        label=choices.label,
        missing=missing,
    )
