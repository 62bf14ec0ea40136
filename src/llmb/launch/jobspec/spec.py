# SPDX-License-Identifier: Apache-2.0
"""The specification of a job, which is saved in the run folder and from which a scheduler runs the job."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from llmb.base.errors import UsageError, itemized
from llmb.base.secrets import HIDDEN, has_secret, holds_secret, without_secrets
from llmb.catalogue.records import Record
from llmb.launch.jobspec.job_options import UNBOUND, Binding, Boost, ContainerSettings, StartMode
from llmb.runs.folder import RunFolder, read_stored, write_atomically

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The launcher sets RANKS; READ_ONLY are read-only in bash.
RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})
ADVICE = "remove or correct them; see 'llmb submit --help-all' for the format"
READ_ONLY = frozenset({"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"})
PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "BASH_", "llmb_")


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable and its source."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class VariableLayer:
    """Variables from one source; later layers replace variables of earlier layers."""

    origin: str
    variables: Mapping[str, str]


def layered(
    shipped: Iterable[VariableLayer], shell: Mapping[str, str], explicit: Iterable[VariableLayer]
) -> tuple[Variable, ...]:
    """Merge variables: the submitting shell overrides ``shipped``, and ``explicit`` overrides both.

    Variables of the shell that contain secrets are ignored.
    """
    variables: dict[str, Variable] = {}
    for layer in shipped:
        variables.update(_variables(layer))
    exported = without_secrets({name: shell[name] for name in variables if name in shell})
    variables.update({name: Variable(name, value, "the shell that submitted") for name, value in exported.items()})
    for layer in explicit:
        variables.update(_variables(layer))
    return tuple(variables.values())


def _variables(layer: VariableLayer) -> dict[str, Variable]:
    return {name: Variable(name, value, layer.origin) for name, value in layer.variables.items()}


def parse_variables(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts of the form ``NAME=VALUE``; raise UsageError with all problems if a text is invalid."""
    variables: dict[str, str] = {}
    problems = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"'{HIDDEN if has_secret(text) else text}' has no value; it must be NAME=VALUE")
        elif name in variables and variables[name] != value:
            problems.append(f"duplicate key {name}")
        variables[name] = value
    problems.extend(problem for problem in variable_problems(variables) if problem not in problems)
    if problems:
        raise UsageError(f"--env is invalid:{itemized(problems)}", do=ADVICE)
    return variables


def variable_problems(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons why variables cannot be written into a batch script."""
    for name, value in variables.items():
        if not NAME.fullmatch(name):
            yield f"'{name}' is not a valid variable name"
        elif name in RANKS or name in READ_ONLY or name.startswith(PREFIXES):
            yield f"{name} is reserved for the scheduler, the shell or llmb"
        elif holds_secret(name, value):
            yield f"{name} looks like a secret, which the batch script would contain; set HF_TOKEN only in your shell"
        if not value.isprintable():
            yield f"{name} contains an unprintable character"


@dataclass(frozen=True, slots=True)
class Placement:
    """The numbers of nodes and of processes per node. Each process uses one GPU, or runs on a CPU."""

    nodes: int
    processes_per_node: int
    whole_nodes: bool
    """True if the job occupies whole nodes."""

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def place(scale: int, gpus_per_node: int | None) -> Placement:
    """Place processes on one node or several full nodes; raise UsageError if the last of several nodes is not full."""
    per_node = gpus_per_node or scale
    if scale < per_node:
        return Placement(1, scale, whole_nodes=False)
    nodes, rest = divmod(scale, per_node)
    if rest:
        fitting = [size for size in range(per_node, 0, -1) if scale % size == 0]
        raise UsageError(
            f"a scale of {scale} is not divisible by {per_node} GPUs per node",
            choices=(f"--gpus-per-node {size}" for size in fitting),
            do="pass one of these, or another --scale",
        )
    return Placement(nodes, per_node, whole_nodes=True)


class Placeholder(Record):
    """A word of a command with a value that is unknown until the job starts."""

    slot: Literal["run_folder", "python"]
    """The value: the run folder, or the interpreter with llmb and torch."""
    before: str = ""
    """Text before the value; like ``after``, it has no characters that a shell interprets."""
    after: str = ""
    """Text after the value."""


Word = str | Placeholder
RUN_FOLDER = Placeholder(slot="run_folder")
PYTHON = Placeholder(slot="python")


def filled(word: Word, run_folder: str, python: str) -> str:
    if isinstance(word, str):
        return word
    return word.before + {"run_folder": run_folder, "python": python}[word.slot] + word.after


class Launch(Record):
    """A program's own script that queues a job, or is queued itself, instead of a batch script of llmb.

    ``named`` contains the script's variables for requests to the scheduler: ``account``, ``partition``, ``time``,
    and ``flags`` for all others, as ``KEY=VALUE`` separated by semicolons.
    """

    queued_by: Literal["script", "scheduler"]
    """``script`` if the script queues the job itself, ``scheduler`` if it is submitted as a batch script."""
    folder: str
    """The working directory of the script."""
    script: str
    named: dict[str, str] = Field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Keys of ``named`` that the script requires."""
    removed: tuple[str, ...] = ()
    """Variables to hide from the script."""
    environment: str | None = None
    """The script's virtual environment."""
    logs: tuple[str, ...]
    """Patterns, with ``{job_id}``, of the logs that training writes; the newest match is the run's log."""
    outputs: tuple[str, ...]
    """Patterns of the output files of the script's batch job."""


class JobSpec(Record):
    """The content of ``job_spec.json``.

    ``begin`` runs first; if it fails, the job ends. ``work`` runs in each process, with its output in ``log``.
    ``finish`` runs last, with the exit code and any signal as arguments. A job with a ``launch`` has no such commands.
    """

    schema_version: int = 1
    scheduler: str
    program: str
    title: str
    """The title in the first lines of the batch script."""
    name: str
    """The job's name, which repeats of a run share."""
    placement: Placement
    gpus: bool
    """True if each process uses a GPU, False if it computes on a CPU."""
    nvlink_domain_nodes: int = 1
    """Number of nodes whose GPUs NVLink connects."""
    node: str | None = None
    """The node that the job occupies as a whole; None for a job on any nodes."""
    time_limit_min: float | None
    retries: int = 0
    start: StartMode | Literal["once", "rounds"]
    """How the scheduler starts processes: ``torchrun`` with one task per node, ``task-per-gpu`` with one task per
    process, ``once`` as one process for the job. ``rounds`` runs the steps in ``rounds.txt`` and continues if one
    fails; if the file lists no nodes for a step, ``work`` prints them."""
    cpus: int | None = None
    """CPU cores per task; None for the scheduler's default on GPUs, and for one core per process on a CPU."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """The scheduler's own flags in order, except flags that contain the run folder."""
    step_flags: dict[str, str | None] = Field(default_factory=dict)
    """The scheduler's flags for the start of the workers only."""
    excluded_nodes: str | None = None
    """The nodes not to use, as a list in the scheduler's syntax."""
    variables: tuple[Variable, ...] = ()
    secrets: tuple[str, ...] = ()
    """Names of variables that are passed from the submitting shell although they may contain secrets; their values are
    not written to any file."""
    gpu_type: str | None = None
    """A GPU type from the catalogue, or ``cpu``; None if the type is unknown or not needed."""
    modules: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    prolog: tuple[str, ...] = ()
    """Shell commands that every node runs before the workers, outside of a container."""
    vboost: Boost | None = None
    """Boost of the GPUs while the workers train."""
    binding: Binding = UNBOUND
    """CPU and memory binding of each worker."""
    python: str
    """The interpreter on the nodes, outside of a container."""
    container: ContainerSettings = ContainerSettings()
    control_in_container: bool = True
    """True if ``begin`` and ``finish`` also run in the container."""
    sampled: bool = False
    """True if llmb runs a sampler on every node, outside of a container, because the workers start none."""
    begin: tuple[Word, ...] = ()
    work: tuple[Word, ...] = ()
    launch: Launch | None = None
    finish: tuple[Word, ...] = ()
    log: str
    """Name of the log in the run folder."""
    documented_root: str | None = None
    """The folder below which the run's files are linked under their documented names; None for no links."""

    @property
    def bind_arguments(self) -> tuple[str, str] | None:
        """Return the arguments of ``llmb.launch.bind`` before the worker's command; None if workers are not bound."""
        return self.binding.arguments(gpus=self.gpus, workers=self.placement.processes_per_node)


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    write_atomically(folder.job_spec, spec.model_dump_json(indent=2) + "\n")


def read_spec(folder: RunFolder) -> JobSpec:
    """Read the specification of a job; raise ValueError if it is invalid, OSError if it cannot be read."""
    return read_stored(folder.job_spec, JobSpec)
