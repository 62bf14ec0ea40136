# SPDX-License-Identifier: Apache-2.0
"""A run on this machine from its request to its result, for the command and for Python."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request
from llmb.jobs.local_run import Say, local_spec, run_here
from llmb.jobspec.spec import JobSpec
from llmb.programs.engine.here import check_here
from llmb.programs.engine.nsys import with_profiler
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.choices import Choices
from llmb.runs.claim import create_run_folder
from llmb.runs.device import Device
from llmb.runs.disk_space import check_space
from llmb.runs.folder import RunFolder, experiment_name, run_parent
from llmb.runs.plan import EnginePlan, make_plan
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

    def sample(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The workers' command and variables, for a folder that need not exist."""
        folder = RunFolder(run_parent(self.install, self.plan) / "SECONDS" / experiment_name(self.plan))
        spec = local_spec(self.plan, self.install, self.environ, folder)
        return local_command(spec, folder), self._variables(spec)

    def check(self) -> None:
        """Raises EnvironmentProblem if this machine cannot run it."""
        check_machine(self.plan, self.machine)
        check_here(self.asked)
        saved_in = Path(self.plan.checkpoint_dir) if self.plan.checkpoint_dir else run_parent(self.install, self.plan)
        check_space(self.plan, saved_in)

    def start(self, on_step: Callable[[StepNews], None], say: Say) -> tuple[RunFolder, Result]:
        """Runs it to its end, successful or not. Raises UserInterrupt and EnvironmentProblem."""
        folder = create_run_folder(self.install, self.plan)
        spec = local_spec(self.plan, self.install, self.environ, folder)
        result = run_here(self.plan, spec, folder, self.install, self._variables(spec), on_step, say)
        return folder, result

    def _variables(self, spec: JobSpec) -> dict[str, str]:
        return local_variables(spec, self.machine.cores, self.environ)


def plan_here(
    catalogue: Catalogue, request: Request, choices: Choices, environ: Mapping[str, str], install: Path
) -> LocalRun:
    """Raises UsageError with everything that is wrong with the request."""
    machine = this_machine()
    recipe = recipe_for(catalogue, request, machine)
    checkpoint = read_checkpoint(Path(choices.load_checkpoint)) if choices.load_checkpoint else None
    device: Device = "cpu" if recipe.gpu_type == CPU else "cuda"
    asked = make_plan(recipe, choices, device=device, checkpoint=checkpoint)
    return LocalRun(plan=with_profiler(asked), asked=asked, machine=machine, install=install, environ=environ)
