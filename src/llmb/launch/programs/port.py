# SPDX-License-Identifier: Apache-2.0
"""The interface that programs implement for code that prepares, follows and concludes jobs; and a lookup by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

from llmb.base.errors import UsageError, unknown
from llmb.base.options import options_of
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
    """The user's choices and options for a run, and the site where it runs."""

    choices: Choices
    options: FrameworkOptions
    site: Site
    variables: frozenset[str] = frozenset()
    """Names of variables set by the user, the shell or the cluster's settings."""
    gpus_per_node: int
    explicit: frozenset[str] = frozenset()
    """The names in ``variables`` that do not come from the shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramWork:
    """The command or script that a job runs for a program, and the program's requirements."""

    command: tuple[Word, ...] = ()
    """The command of each process; there is one process per rank."""
    launch: Launch | None = None
    """The program's own script, which queues the job or is queued, instead of ``command``."""
    secrets: tuple[str, ...] = ()
    """Names of secret variables to pass to the program from the submitting shell, if they are set there."""
    start: StartMode | None = None
    """The only start mode that the program supports; None if it supports both."""
    container: ContainerSettings
    control_in_container: bool = True
    """True if llmb's commands that begin and finish the job run in the container, which then must have llmb."""
    variables: VariableLayer
    recipe_variables: bool = True
    """True if the catalogue's variables for a recipe apply to this program."""
    title: str = ""
    """A note on the program that is appended to the job's title."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The number of steps done. ``complete`` is True if the last step is done and no requested checkpoint is missing,
    as far as the program checks."""

    steps: int
    complete: bool


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run's processes; ``cause`` describes what ended them from outside, None if nothing did."""

    exit_code: int
    cause: str | None = None
    cancelled: bool = False
    """True if the run was cancelled, such as by ``llmb jobs cancel`` or Ctrl-C."""


class NewSteps(Protocol):
    """Follows the steps of a run, and yields only new steps."""

    def new(self) -> Iterator[StepNews]:
        """Yield the steps done since the last call; a restarted run yields its steps again."""


class Program(Protocol):
    """A program that trains, such as llmb's engine."""

    name: str
    runs_here: bool = False
    """True if ``llmb run`` can start it without a scheduler; its plan is then an ``EnginePlan``."""

    def check_here(self) -> None:
        """Raise EnvironmentProblem if this Python lacks what the program needs in addition to torch."""

    def plan(
        self, catalogue: Catalogue, recipe: Recipe, choices: Choices, options: FrameworkOptions, site: Site
    ) -> Plan:
        """Return the plan of a run, which uses files that were prepared below the site's install root.

        Raises UsageError if the program does not support the run, NotPrepared if preparations are missing."""

    def work(self, plan: Plan, request: ProgramRequest, folder: RunFolder) -> ProgramWork:
        """Return the work for a run in ``folder``, which need not exist; raise UsageError if the site cannot run it."""

    def started(self, plan: Plan) -> Plan:
        """Return the plan, completed with choices that depend on the machine on which the run starts."""

    def progress(self, folder: RunFolder, plan: Plan) -> StepProgress:
        """Read the progress of a run, ended or not, from its files."""

    def new_steps(self, folder: RunFolder) -> NewSteps:
        """Return an object that follows the steps of a run."""

    def result(self, folder: RunFolder, record: RunRecord, end: End) -> Result:
        """Read the result of an ended run from its files. May raise OSError or BrokenRecord if one cannot be read."""


PROGRAMS = {
    "engine": ("llmb.launch.programs.engine.program", "EngineProgram"),
    "reference_suite": ("llmb.launch.programs.reference_suite", "ReferenceSuite"),
    "megatron_bridge": ("llmb.launch.programs.megatron_bridge.program", "MegatronBridge"),
    "torchtitan": ("llmb.launch.programs.torchtitan.titan", "Torchtitan"),
}


@cache
def find_program(name: str) -> Program:
    """Return the program with this name; raise UsageError if there is none."""
    if name not in PROGRAMS:
        raise unknown("program", name, PROGRAMS)
    module, attribute = PROGRAMS[name]
    program: Program = getattr(import_module(module), attribute)()
    return program


def option_text(choices: Choices, name: str) -> str:
    """Return the option that sets field ``name``, such as ``--seed`` or ``--no-compile``, or else ``name`` in words."""
    option = options_of(Choices).get(name)
    if option is None:
        return name.replace("_", " ")
    return option.spelled.replace("--", "--no-", 1) if getattr(choices, name) is False else option.spelled


def requested_container(options: FrameworkOptions, container: ContainerSettings) -> ContainerSettings:
    """Return the cluster's container with the image and mounts in ``options``; raise UsageError if ``options`` have
    either, but the cluster's jobs run without a container."""
    if not options.image and not options.mounts:
        return container
    if container.runtime == "none":
        do = "set container.runtime and container.image in cluster_config.yaml, or omit --image and --mounts"
        raise UsageError("--image and --mounts require a container, but this cluster's jobs have none", do=do)
    chosen = {"image": options.image or container.image, "mounts": (*container.mounts, *options.mounts)}
    return container.model_copy(update=chosen)
