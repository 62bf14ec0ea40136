# SPDX-License-Identifier: Apache-2.0
"""One job, fully specified except for its folder: the scheduler's input, which the run folder stores."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from llmb.base.errors import UsageError, itemized
from llmb.base.secrets import HIDDEN, has_secret, holds_secret, without_secrets
from llmb.catalogue.records import Record
from llmb.launch.jobspec.job_options import Binding, Boost, ContainerSettings, StartMode
from llmb.runs.folder import RunFolder, read_stored, write_atomically

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The launcher sets the first; the others are read-only in bash.
RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})
ADVICE = "remove or correct them; 'llmb submit --help-all' shows the form"
READ_ONLY = frozenset({"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"})
PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "BASH_", "llmb_")


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable and its source."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class VariableLayer:
    """Variables from one place; later layers replace what earlier ones set."""

    origin: str
    variables: Mapping[str, str]


def layered(
    shipped: Iterable[VariableLayer], shell: Mapping[str, str], explicit: Iterable[VariableLayer]
) -> tuple[Variable, ...]:
    """Merge variables: the user's settings override llmb's, as does the submitting shell.

    What holds a secret in that shell does not count as set there.
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
    """Parse texts of the form ``NAME=VALUE``. Raises UsageError with all problems."""
    variables: dict[str, str] = {}
    problems = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"'{HIDDEN if has_secret(text) else text}' has no value; write NAME=VALUE")
        elif name in variables and variables[name] != value:
            problems.append(f"duplicate key {name}")
        variables[name] = value
    problems.extend(problem for problem in variable_problems(variables) if problem not in problems)
    if problems:
        raise UsageError(f"--env cannot be used:{itemized(problems)}", do=ADVICE)
    return variables


def variable_problems(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield reasons why variables cannot be written into a batch script."""
    for name, value in variables.items():
        if not NAME.fullmatch(name):
            yield f"'{name}' is not the name of a variable"
        elif name in RANKS or name in READ_ONLY or name.startswith(PREFIXES):
            yield f"{name} is set by the launcher of the workers"
        elif holds_secret(name, value):
            yield (
                f"{name} looks like a secret, and variables are written into the batch script; jobs need none:"
                " prepare gated data first, with the secret only in your shell"
            )
        if not value.isprintable():
            yield f"{name} contains a character that is not printable"


@dataclass(frozen=True, slots=True)
class Placement:
    """Equal nodes, with a process per GPU, or with this many processes on a CPU."""

    nodes: int
    processes_per_node: int
    whole_nodes: bool
    """True if every GPU of the nodes is used."""

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def place(scale: int, gpus_per_node: int | None) -> Placement:
    """Place ``scale`` processes on nodes; None means one node. Raises UsageError if they do not fill nodes evenly."""
    per_node = gpus_per_node or scale
    if scale < per_node:
        return Placement(1, scale, whole_nodes=False)
    nodes, rest = divmod(scale, per_node)
    if rest:
        fitting = [size for size in range(per_node, 0, -1) if scale % size == 0]
        raise UsageError(
            f"a scale of {scale} is not divisible by {per_node} GPUs per node",
            choices=(f"--gpus-per-node {size}" for size in fitting),
            do="choose another --scale, or use fewer GPUs per node",
        )
    return Placement(nodes, per_node, whole_nodes=True)


class Placeholder(Record):
    """A value that is unknown until the job starts."""

    slot: Literal["run_folder", "python"]
    """The run folder, or the interpreter that has llmb and torch where the process runs."""
    before: str = ""
    """Text before it without a space, with no character that a shell interprets."""
    after: str = ""
    """Text that follows it."""


Word = str | Placeholder
RUN_FOLDER = Placeholder(slot="run_folder")
PYTHON = Placeholder(slot="python")


def filled(word: Word, run_folder: str, python: str) -> str:
    if isinstance(word, str):
        return word
    return word.before + {"run_folder": run_folder, "python": python}[word.slot] + word.after


class Launch(Record):
    """A program's own script that queues a job, or is queued, instead of a batch script of llmb's.

    ``named``: the variables by which it takes what a scheduler is asked for: ``account``, ``partition``, ``time``,
    and ``flags`` for any others as ``KEY=VALUE`` with semicolons between them.
    """

    queued_by: Literal["script", "scheduler"]
    """True if the script queues the job itself; otherwise it is submitted to the scheduler as a batch script."""
    folder: str
    """The folder in which it is called."""
    script: str
    named: dict[str, str] = Field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Names in ``named`` that the script requires."""
    removed: tuple[str, ...] = ()
    """Variables to hide from the script."""
    environment: str | None = None
    """The script's virtual environment."""
    logs: tuple[str, ...]
    """Patterns of the files that training writes, with ``{job_id}``; of several, the newest is the run's."""
    outputs: tuple[str, ...]
    """Patterns of the files that the script's batch job writes."""


class JobSpec(Record):
    """The content of ``job_spec.json``.

    ``begin`` runs first and may refuse; ``work`` is one process per GPU, and is followed to its end, with its output in
    ``log``; ``finish`` gets the exit code and the signal that ended the job, if one did. A job with a ``launch`` has
    none of these.
    """

    schema_version: int = 1
    scheduler: str
    program: str
    title: str
    """The title on top of a script."""
    name: str
    """A name that equal runs share."""
    placement: Placement
    gpus: bool
    """True if each process has a GPU; otherwise it computes on a CPU."""
    nvlink_domain_nodes: int = 1
    """Number of nodes whose GPUs NVLink connects."""
    node: str | None = None
    """The one node that the job takes as a whole; None for a job on any nodes."""
    time_limit_min: float | None
    retries: int = 0
    start: StartMode | Literal["once", "rounds"]
    """Like torchrun one task of the scheduler per node, which starts its processes; or one task per process, or one
    process for the whole job, whose placement then only counts its GPUs. ``rounds``: steps on some of the nodes, as
    ``rounds.txt`` in the run folder lists them, each of which may fail; ``work`` prints the nodes of the last."""
    cpus: int | None = None
    """CPU cores per process; None if the scheduler decides, and for one core per process on a CPU."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """The scheduler's own flags in their order, except those that name the run folder."""
    step_flags: dict[str, str | None] = Field(default_factory=dict)
    """The scheduler's flags for the start of the workers only."""
    excluded_nodes: str | None = None
    """The nodes in the scheduler's syntax for lists."""
    variables: tuple[Variable, ...] = ()
    secrets: tuple[str, ...] = ()
    """Names of variables that the job gets from the shell that submits although they may hold secrets. Their values are
    in no file."""
    gpu_type: str | None = None
    """A GPU type of the catalogue, or ``cpu``; None for a preparation without GPUs."""
    modules: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    prolog: tuple[str, ...] = ()
    """Shell commands that every node runs before the workers, outside of a container."""
    vboost: Boost | None = None
    """Boost of every node's GPUs while the workers train."""
    binding: Binding = Binding()
    """Binding of each worker."""
    python: str
    """The interpreter on the nodes, outside of a container."""
    container: ContainerSettings = ContainerSettings()
    control_in_container: bool = True
    """True if ``begin`` and ``finish`` run in the container, too."""
    sampled: bool = False
    """True if a sampler of llmb runs on every node, outside of a container, for workers that start none."""
    begin: tuple[Word, ...] = ()
    work: tuple[Word, ...] = ()
    launch: Launch | None = None
    finish: tuple[Word, ...] = ()
    log: str
    """Name of the log in the run folder."""
    documented_root: str | None = None
    """The root of the document's names for the run's files; None without such names."""


def write_spec(folder: RunFolder, spec: JobSpec) -> None:
    write_atomically(folder.job_spec, spec.model_dump_json(indent=2) + "\n")


def read_spec(folder: RunFolder) -> JobSpec:
    """Read the specification. Raises ValueError if it is invalid, OSError if there is none."""
    return read_stored(folder.job_spec, JobSpec)
