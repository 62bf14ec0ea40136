# SPDX-License-Identifier: Apache-2.0
"""The interface of schedulers, in general terms, and the form of an installation's questions."""
# ruff: noqa: ARG002 (what a scheduler does by default needs fewer arguments than its own answer)

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, field_validator

from llmb.base.errors import UsageError, closest
from llmb.base.secrets import without_secrets
from llmb.catalogue.records import Record
from llmb.launch.jobspec.job_options import JobOptions, StartMode
from llmb.launch.jobspec.spec import JobSpec
from llmb.launch.site.site import Site
from llmb.runs.folder import RunFolder
from llmb.runs.record import BegunJob, SubmittedJob

NONE = "none"
"""The answer to a question that does not apply here; a question without an answer is open."""


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    meaning: str = ""


class Question:
    """One question, which can refer to the earlier answers."""

    name: ClassVar[str]
    """Name of the answer's field."""
    text: ClassVar[str]
    closed: ClassVar[bool] = True
    """True if only the choices, if there are any, are valid."""
    several: ClassVar[bool] = False
    """True if answers are separated by commas."""
    interactive: ClassVar[bool] = True
    """True to ask on a terminal; the assumed value is used otherwise."""

    def applies(self) -> bool:
        return True

    def choices(self) -> Sequence[Choice]:
        return ()

    def assumed(self) -> str | None:
        """Return the value without an answer; None if that cannot be known, and an answer is required."""
        return None

    def check(self, value: str) -> str | None:
        """Return the problem of a value that is among the choices, or of a question without choices."""
        return None

    def problem(self, value: str) -> str | None:
        """Return the problem of an answer."""
        names = [choice.value for choice in self.choices()]
        values = [item.strip() for item in value.split(",")] if self.several else [value]
        wrong = [item for item in values if self.closed and names and item not in names]
        if wrong:
            near = closest(wrong[0], names, cutoff=0.5, most=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            return f"'{wrong[0]}' is not one of: {', '.join(names)}{hint}"
        return self.check(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nodes that a scheduler groups. None means unknown or not applicable."""

    name: str
    is_default: bool = False
    nodes: int = 0
    gpus_per_node: int | None = None
    """GPUs of most of its nodes; None if the scheduler does not count GPUs there."""
    gres_type: str | None = None
    architecture: str | None = None
    """The kernel's name: x86_64, aarch64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Accounts, partitions and GPUs that a scheduler offers this user."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] | None = None
    """The user's accounts; None if the scheduler has no accounting, or does not answer."""
    default_account: str | None = None

    def partition(self, name: str | None) -> Partition | None:
        return next((item for item in self.partitions if item.name == name), None)


class SchedulerQuestion(Question):
    """A question of one scheduler, based on its offer."""

    after: ClassVar[str] = "scheduler"
    """The general question that it follows."""

    def __init__(self, answers: Any, offer: Offer) -> None:  # noqa: ANN401 (with the fields that it declares)
        self.answers = answers
        self.offer = offer


UNKNOWN = "UNKNOWN"
Phase = Literal[
    "queued",
    "running",
    "completed",
    "failed",
    "cancelled",
    "timed_out",
    "node_fail",
    "preempted",
    "boot_fail",
    "out_of_memory",
    "killed",
    "unknown",
    "unrecognized",
]
FROM_OUTSIDE: frozenset[Phase] = frozenset(["timed_out", "node_fail", "preempted", "boot_fail", "cancelled", "killed"])
"""Ends that do not show the result of the run: it may have been complete."""
INFRASTRUCTURE: frozenset[Phase] = frozenset(["node_fail", "preempted", "boot_fail"])
"""Ends after which the same job may succeed."""


class JobState(Record):
    """A scheduler's report on a job. Exit code and signal are from its processes; None if unknown."""

    job_id: str
    state: str = UNKNOWN
    """The scheduler's own term."""
    phase: Phase = "unknown"
    """The meaning; unknown if the scheduler does not know the job, or has forgotten it, and unrecognized if it reports
    a state that this llmb does not know: whether the job has ended is then queried again."""
    meaning: str | None = None
    """The reason why the job is waiting, or how it ended."""
    end_pending: bool = False
    """True for an unknown state of an ended job whose end may become known later."""
    exit_code: int | None = None
    signal: int | None = None
    nodes: str | None = None
    """The nodes in the scheduler's syntax."""
    restarts: int = 0
    started_s: float | None = None
    """The start time in seconds since 1970, like all times."""
    ended_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase not in ("queued", "running", "unknown", "unrecognized")


class JobHandle(Protocol):
    """The scheduler's view of a job in the history."""

    @property
    def key(self) -> str: ...

    @property
    def job_id(self) -> str | None: ...

    @property
    def folder(self) -> RunFolder:
        """Return the run folder of the job."""

    @property
    def live(self) -> bool:
        """Return True if the job had not ended at the last query."""


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """States by key, without jobs whose scheduler could not be queried. ``warnings`` are shown to the user."""

    states: Mapping[str, JobState]
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults from a cluster's settings for the choices of a job."""

    gpu_type: str | None = None
    """The type of the job's nodes, if known."""
    gpus_per_node: int | None = None
    start: StartMode = "torchrun"
    retries: int = 0


Trait = Literal["tracking", "binding", "selection", "gpus", "mpi", "containers"]
"""The traits that a job relies on: all its processes are tracked, tasks are bound to cores, parts of nodes are
allocated, GPUs are counted, MPI's start-up protocols, and containers."""


class Plugin(Record):
    """The scheduler's implementation of a trait, in its own words."""

    value: str
    fit: bool
    """True if it suits jobs with GPUs on whole nodes."""


class NodeState(Record):
    """A node, as the scheduler sees it."""

    state: str
    usable: bool
    reason: str | None = None
    gpus: int | None = None
    """The number of GPUs that it may allocate here; None if it does not count GPUs."""
    partitions: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """Return why the node gets no jobs; None if it does."""
        return None if self.usable else f"{self.state}{f': {self.reason}' if self.reason else ''}"


class SchedulerSetup(Record):
    """The setup of the scheduler of this machine."""

    version: str | None = None
    traits: dict[Trait, Plugin] = Field(default_factory=dict)
    """Setup without the parts that could not be read."""
    node: NodeState | None = None
    """None if this machine is not a node of it."""


class Overlay(Record):
    """A setting that comes from outside the files of settings."""

    key: str
    """The dotted key, as in cluster_config.yaml."""
    value: str | int | bool | None
    source: Literal["shell", "option", "setting"]
    place: str
    """The variable, the option, or the key of the other setting."""


class FaultPattern(Record):
    """A pattern in a run's log that identifies the cause of a failure."""

    fault: str
    kind: Literal["own", "infrastructure"]
    pattern: str
    """Regular expression; named groups match the node at fault."""
    meaning: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class FaultTable(Record):
    """The content of a file ``faults.yaml``."""

    faults: tuple[FaultPattern, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job whose files are written, ready to be submitted."""

    spec: JobSpec
    folder: RunFolder
    """Folder of the script and of the job's output."""
    environ: Mapping[str, str]
    held: Sequence[int] = ()
    """Descriptors inherited by every program that is run to submit it."""
    again: bool = False
    """True if it was submitted before."""


class Queue(ABC):
    """Takes jobs and reports their states: the functions that a scheduler has to implement.

    Raises InfrastructureError if it does not respond, EnvironmentProblem if it cannot be reached from here.
    """

    @abstractmethod
    def script(self, spec: JobSpec, folder: RunFolder) -> str:
        """Return the text that does the whole job. Raises UsageError if it cannot work in ``folder``."""

    @abstractmethod
    def submit(self, job: Submission) -> SubmittedJob:
        """Submit a job. Raises UsageError if it is rejected."""

    @abstractmethod
    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        """Return the states of ``jobs``."""

    @abstractmethod
    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        """End jobs. Raises UsageError if that is rejected; jobs that have ended are no error."""

    @abstractmethod
    def current_job(self, environ: Mapping[str, str]) -> BegunJob:
        """Return the job that this process runs in."""

    def find(self, jobs: Sequence[JobHandle], since_s: float, claimed: set[str], time_out_s: float) -> dict[str, str]:
        """Return the ids, by key, of ``jobs`` without one that were submitted since; ``claimed`` ids belong to others.

        A job that is not found has none, unless it has begun: its folder then has the id.
        """
        return {}

    def handing_over(self, base: RunFolder, spec: JobSpec) -> tuple[str, ...]:
        """Return the command that submits a job, for the job's record."""
        return ()


class Cluster:
    """The scheduler's view of its nodes, and their description in a cluster's settings.

    The defaults are those of a scheduler that shows nothing of its nodes, and has no settings.
    """

    settings: type[Record] | None = None
    """Schema of its section in cluster_config.yaml."""
    gpus_key: str | None = None
    """The dotted setting in it for the number of GPUs per node."""
    time_limit_key: str | None = None

    def is_installed(self, environ: Mapping[str, str]) -> bool:
        """Return True if jobs can be submitted to the scheduler."""
        return True

    def defaults(self, site: Site, options: JobOptions, gpu_type: str | None = None) -> Defaults:
        """Return the settings' choices for a job with ``options`` that asks for ``gpu_type``, or for none.

        Raises UsageError where the nodes that the options name do not have it.
        """
        return Defaults(gpu_type=gpu_type or site.config.gpu_type)

    def overlays(self, site: Site, partition: str | None) -> Sequence[Overlay]:
        """Return changes of the cluster's settings by the shell, and the nodes of ``partition``. Raises UsageError."""
        return ()

    def offer(self) -> Offer:
        """Return the choices of this user."""
        return Offer()

    def setup(self, node: str, time_out_s: float) -> SchedulerSetup:
        """Return the scheduler's setup, and the state of ``node`` as it sees it."""
        return SchedulerSetup()

    def nodes(self, listed: str | None, partition: str | None, time_out_s: float) -> dict[str, NodeState]:
        """Return the nodes of a list in the scheduler's syntax, or else of a partition or the whole cluster, by name.

        Raises UsageError for a node or a partition that does not exist.
        """
        if listed is None:
            raise UsageError("the scheduler does not list its nodes", do="add --nodes")
        return {name: NodeState(state=UNKNOWN, usable=True) for name in self.host_names(listed)}

    def host_names(self, nodes: str | None) -> list[str]:
        """Return every name in a list of nodes."""
        return nodes.split(",") if nodes else []

    def host_list(self, names: Iterable[str]) -> str:
        """Format the names as a list for its commands; empty for none."""
        return ",".join(names)


class Wording:
    """The scheduler's terms."""

    title: str
    """Its display name."""
    words: frozenset[str] = frozenset()
    """Every state that its jobs may have."""

    def cause(self, signal: str) -> str:
        """Name the sender of this signal to a job."""
        return signal

    def fault_patterns(self) -> Sequence[FaultPattern]:
        """Return the scheduler's own messages in a log that show the cause of a failure."""
        return ()


class InstallerPart:
    """The scheduler's part of an installation. ``answers`` are all answers so far, including those that it declares."""

    answers: type[Record] = Record
    """Declares the answers that only it needs, as options."""
    questions: Sequence[type[SchedulerQuestion]] = ()
    runtimes: Sequence[Choice] = ()
    """Container runtimes that it can start."""
    comments: Mapping[str, str] = MappingProxyType({})
    """The comments on keys of its section of cluster_config.yaml."""

    def training_nodes(self, answers: Any, offer: Offer) -> Partition | None:  # noqa: ANN401 (with its own fields)
        """Return the nodes that train, as far as the scheduler reports them."""
        return None

    def section(self, answers: Any, gpus_per_node: int | None) -> dict[str, Any]:  # noqa: ANN401 (with its own fields)
        """Return the scheduler's section of cluster_config.yaml, without empty values."""
        return {}

    def answers_in(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers, by name, that the scheduler's section of cluster_config.yaml contains."""
        return {}


class Scheduler(Queue, Cluster, Wording, InstallerPart):
    """One scheduler: its queue, its cluster, its wording and its installation, and the options of its jobs."""

    name: str
    choices: type[Record] = Record
    """Declares its options, one per field."""

    def read_options(self, values: Mapping[str, Any], environ: Mapping[str, str], python: str) -> JobOptions:
        """Return the job options from the values of options, above the variables of the shell; ``python`` is the
        interpreter that runs where nothing else is specified. Raises UsageError with all problems."""
        return JobOptions(python=python)

    def options_here(self, environ: Mapping[str, str]) -> JobOptions:
        """Return the options of the job that this process runs in, if they name its nodes; none outside of a job."""
        return JobOptions()

    def variables_here(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Add a script's requirements for running on the nodes of the present job, without secrets."""
        return without_secrets(environ)

    def warnings(self, spec: JobSpec) -> Sequence[str]:
        """Return why it will probably reject a completed job."""
        return ()

    def completed(self, spec: JobSpec, options: JobOptions, site: Site) -> JobSpec:
        """Return the specification with its final flags and limits. Raises UsageError with all problems."""
        return spec
