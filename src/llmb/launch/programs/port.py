# SPDX-License-Identifier: Apache-2.0
"""The interface of programs for the code that assembles, follows and concludes jobs; and programs by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

from llmb.base.errors import UsageError, unknown
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.launch.jobspec.job_options import ContainerSettings, FrameworkOptions, StartMode
from llmb.launch.jobspec.spec import Launch, VariableLayer, Word
from llmb.launch.site.site import Site
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import RunRecord
from llmb.runs.result import Result
from llmb.runs.steps import StepNews


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """The request for a plan, and where the run is."""

    choices: Choices
    options: FrameworkOptions
    site: Site
    variables: frozenset[str] = frozenset()
    """Names of variables set by the user, the shell or the cluster's settings."""
    gpus_per_node: int
    explicit: frozenset[str] = frozenset()
    """Names of ``variables`` that do not come from the shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramWork:
    """A program's requirements for the job that runs it."""

    command: tuple[Word, ...] = ()
    """The command of one process per GPU, or of this many processes on a CPU."""
    launch: Launch | None = None
    """The program's own script, instead of ``command``, which queues the job."""
    secrets: tuple[str, ...] = ()
    """Names of variables with secrets that it needs from the submitting shell."""
    start: StartMode | None = None
    """The only supported start mode; None if both are supported."""
    container: ContainerSettings
    control_in_container: bool = True
    """True if the container has llmb, which begins and finishes the job."""
    variables: VariableLayer
    recipe_variables: bool = True
    """True if the catalogue's variables for a recipe are for this program."""
    title: str = ""
    """Note on the program, appended to a job's title."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The progress of a run. ``complete``: every step is done, and the last checkpoint exists if requested."""

    steps: int
    complete: bool


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run's processes. ``cause`` ended them from outside; None if they ended by themselves."""

    exit_code: int
    cause: str | None = None
    cancelled: bool = False
    """True if they were ended on purpose."""


class NewSteps(Protocol):
    """Yields each step once."""

    def new(self) -> Iterator[StepNews]:
        """Return steps done since the last call; a restarted run returns its steps again."""


class Program(Protocol):
    """Something that trains."""

    name: str
    runs_here: bool = False
    """True if ``llmb run`` starts it on this machine, without a scheduler; its plan is then an ``EnginePlan``."""

    def check_here(self) -> None:
        """Raise EnvironmentProblem if this Python cannot start it."""

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> Plan:
        """Return the plan, with prepared files below the root of the site's installation.

        Raises UsageError with everything that it does not support, and NotPrepared.
        """

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:
        """Return the work in ``folder``, which need not exist. Raises UsageError where the site cannot run it."""

    def started(self, plan: Plan) -> Plan:
        """Return the plan with the choices of the machine where the run starts."""

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        """Read the progress of a run from its files, whether it has ended or not."""

    def new_steps(self, folder: RunFolder) -> NewSteps:
        """Follow the steps of a run that is still running."""

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        """Read the result of a run that ended from its files. Raises OSError."""


PROGRAMS = {
    "engine": ("llmb.launch.programs.engine.program", "EngineProgram"),
    "reference_suite": ("llmb.launch.programs.reference_suite", "ReferenceSuite"),
    "megatron_bridge": ("llmb.launch.programs.megatron_bridge.program", "MegatronBridge"),
    "torchtitan": ("llmb.launch.programs.torchtitan.titan", "Torchtitan"),
}


@cache
def find_program(name: str) -> Program:
    """Find a program by name. Raises UsageError if it does not exist."""
    if name not in PROGRAMS:
        raise unknown("program", name, PROGRAMS)
    module, attribute = PROGRAMS[name]
    program: Program = getattr(import_module(module), attribute)()
    return program


def requested_container(options: FrameworkOptions, container: ContainerSettings) -> ContainerSettings:
    """Return the cluster's container with the options' image and mounts. Raises UsageError if the cluster has none."""
    if not options.image and not options.mounts:
        return container
    if container.runtime == "none":
        do = "set container.runtime in cluster_config.yaml, or omit --image and --mounts"
        raise UsageError("this cluster's jobs run without a container", do=do)
    chosen = {"image": options.image or container.image, "mounts": (*container.mounts, *options.mounts)}
    return container.model_copy(update=chosen)
