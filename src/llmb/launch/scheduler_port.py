# SPDX-License-Identifier: Apache-2.0
"""The interface that schedulers implement, in general terms, and the base class of the installer's questions."""
# ruff: noqa: ARG002 (default implementations need fewer arguments)

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
"""The answer that leaves a setting unset, such as no container, as opposed to a missing answer."""


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    meaning: str = ""


class Question:
    """A question of the installer, which can refer to earlier answers."""

    name: ClassVar[str]
    """Name of the field that stores the answer."""
    text: ClassVar[str]
    closed: ClassVar[bool] = True
    """True if only the choices are valid, provided there are any."""
    several: ClassVar[bool] = False
    """True if several answers are possible, separated by commas."""
    interactive: ClassVar[bool] = True
    """True if a missing answer is asked for on a terminal; otherwise, the assumed value is used."""

    def applies(self) -> bool:
        return True

    def choices(self) -> Sequence[Choice]:
        return ()

    def assumed(self) -> str | None:
        """Return the value to use without an answer; None if an answer is required."""
        return None

    def check(self, value: str) -> str | None:
        """Describe any problem with ``value`` besides not being a choice; return None if there is no such problem."""
        return None

    def problem(self, value: str) -> str | None:
        """Describe what is wrong with an answer; return None if it is valid."""
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
    """A partition of a scheduler; None means unknown or not applicable."""

    name: str
    is_default: bool = False
    nodes: int = 0
    gpus_per_node: int | None = None
    """The most common number of GPUs on its nodes; None for nodes without GPUs that the scheduler manages."""
    gres_type: str | None = None
    architecture: str | None = None
    """The kernel's name for the architecture: x86_64 or aarch64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Partitions, with their GPUs, and accounts that a scheduler offers this user."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] | None = None
    """The user's accounts; None if the scheduler has no accounting or does not answer."""
    default_account: str | None = None

    def partition(self, name: str | None) -> Partition | None:
        return next((item for item in self.partitions if item.name == name), None)


class SchedulerQuestion(Question):
    """A question that only one scheduler needs, with the scheduler's offer."""

    after: ClassVar[str] = "scheduler"
    """Name of the general question after which this question is asked."""

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
"""Phases of jobs that were ended from outside, so that the run may have been complete."""
INFRASTRUCTURE: frozenset[Phase] = frozenset(["node_fail", "preempted", "boot_fail"])
"""Phases of jobs that failed because of the infrastructure, and may succeed if they are retried."""


class JobState(Record):
    """A scheduler's report on a job. Times are in seconds since 1970; exit code and signal are None if unknown."""

    job_id: str
    state: str = UNKNOWN
    """The state in the scheduler's own terms."""
    phase: Phase = "unknown"
    """The state in general terms: ``unknown`` if the scheduler does not, or no longer, know the job or how it ended;
    ``unrecognized`` if it reports a state that llmb does not know, so that the job is queried again."""
    meaning: str | None = None
    """An explanation of the state, such as why the job is waiting or how it ended."""
    end_pending: bool = False
    """True if the job has ended, but the scheduler may report only later how it ended."""
    exit_code: int | None = None
    signal: int | None = None
    nodes: str | None = None
    """The list of nodes in the scheduler's syntax."""
    restarts: int = 0
    started_s: float | None = None
    """The time at which the job last started."""
    ended_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase not in ("queued", "running", "unknown", "unrecognized")


class JobHandle(Protocol):
    """The fields of a job in the history that schedulers use."""

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
    """States by key of the job; jobs that ended, or have no id, may be missing. ``warnings`` are shown to the user."""

    states: Mapping[str, JobState]
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults from a cluster's settings for options of a job; ``gpu_type`` is the type of its nodes, if known."""

    gpu_type: str | None = None
    gpus_per_node: int | None = None
    start: StartMode = "torchrun"
    retries: int = 0
    partition: str | None = None


Trait = Literal["tracking", "binding", "selection", "gpus", "mpi", "containers"]
"""Properties of a scheduler's setup that affect jobs: how it tracks processes, binds tasks to cores, allocates parts of
nodes, counts GPUs, starts MPI, and runs containers."""


class Plugin(Record):
    """The scheduler's setting for a trait, in the scheduler's own terms."""

    value: str
    fit: bool
    """True if the setting is suitable for jobs with GPUs on whole nodes."""


class NodeState(Record):
    """The state of a node according to the scheduler."""

    state: str
    usable: bool
    reason: str | None = None
    gpus: int | None = None
    """The number of GPUs that the scheduler can allocate on the node; None if it manages none there."""
    partitions: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """Describe why the scheduler does not use the node; return None if it does."""
        return None if self.usable else f"{self.state}{f': {self.reason}' if self.reason else ''}"


class SchedulerSetup(Record):
    """The scheduler's setup, as seen from this machine."""

    version: str | None = None
    traits: dict[Trait, Plugin] = Field(default_factory=dict)
    """Settings by trait, except settings that could not be read."""
    node: NodeState | None = None
    """The state of this machine; None if it is not a node of the scheduler."""


class Overlay(Record):
    """A setting that does not come directly from its key in a settings file."""

    key: str
    """The dotted key, as in cluster_config.yaml."""
    value: str | int | bool | None
    source: Literal["shell", "option", "setting"]
    place: str
    """The variable, the option, or the key of the other setting from which it comes."""


class FaultPattern(Record):
    """A pattern that identifies the cause of a failure in a run's log."""

    fault: str
    kind: Literal["own", "infrastructure"]
    pattern: str
    """A regular expression; named groups match nodes at fault."""
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
    """The content of a ``faults.yaml`` file."""

    faults: tuple[FaultPattern, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job whose files have been written, ready to be submitted."""

    spec: JobSpec
    folder: RunFolder
    """Folder of the script and of the job's output."""
    environ: Mapping[str, str]
    held: Sequence[int] = ()
    """File descriptors that programs inherit if they are run to submit the job."""
    again: bool = False
    """True if the job was submitted before."""


class Queue(ABC):
    """Accepts jobs and reports their states; every scheduler implements the abstract methods.

    Methods raise InfrastructureError if the scheduler does not respond, EnvironmentProblem if it is not installed here.
    """

    @abstractmethod
    def script(self, spec: JobSpec, folder: RunFolder) -> str:
        """Return the batch script of a job; raise UsageError if it cannot run in ``folder``."""

    @abstractmethod
    def submit(self, job: Submission) -> SubmittedJob:
        """Submit a job; raise UsageError if it is rejected."""

    @abstractmethod
    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        """Query and return the states of ``jobs``."""

    @abstractmethod
    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        """Cancel jobs, ignoring ended jobs; raise UsageError if a job cannot be cancelled."""

    @abstractmethod
    def current_job(self, environ: Mapping[str, str]) -> BegunJob:
        """Return the job in which this process runs."""

    def find(self, jobs: Sequence[JobHandle], since_s: float, claimed: set[str], time_out_s: float) -> dict[str, str]:
        """Find the ids, by key, of ``jobs`` that were submitted after ``since_s`` but whose ids were not recorded.

        ``claimed`` are ids of other jobs. A job may be missing from the answer if it was never queued.
        """
        return {}

    def handing_over(self, base: RunFolder, spec: JobSpec) -> tuple[str, ...]:
        """Return the command that submits a job, to be saved in the run's record."""
        return ()


class Cluster:
    """The nodes of a scheduler, and its settings.

    The defaults are for a scheduler that does not report its nodes and has no settings.
    """

    settings: type[Record] | None = None
    """Schema of the scheduler's section in cluster_config.yaml."""
    gpus_key: str | None = None
    """Dotted key of the setting for the number of GPUs per node."""
    time_limit_key: str | None = None

    def is_installed(self, environ: Mapping[str, str]) -> bool:
        """Return True if jobs can be submitted to the scheduler from this machine."""
        return True

    def defaults(self, site: Site, options: JobOptions, gpu_type: str | None = None) -> Defaults:
        """Return the settings' defaults for a job with ``options`` that requests ``gpu_type``, if any.

        Raises UsageError if a partition has another GPU type, or if partitions have several and none is requested.
        """
        return Defaults(gpu_type=gpu_type or site.config.gpu_type)

    def overlays(self, site: Site, partition: str | None) -> Sequence[Overlay]:
        """Return the settings that override the cluster's: from the shell, ``partition`` and the partition's own
        section. Raises UsageError if one is invalid."""
        return ()

    def offer(self) -> Offer:
        """Return the partitions and accounts that this user can use."""
        return Offer()

    def setup(self, node: str, time_out_s: float) -> SchedulerSetup:
        """Return the scheduler's setup, with the state of ``node``."""
        return SchedulerSetup()

    def nodes(self, listed: str | None, partition: str | None, time_out_s: float) -> dict[str, NodeState]:
        """Return nodes by name: the nodes in ``listed``, or else of ``partition``, or else of the whole cluster.

        Raises UsageError if a node or the partition does not exist, or if the scheduler does not list its nodes.
        """
        do = "run 'llmb doctor' on each node, or set another 'scheduler' in cluster_config.yaml"
        raise UsageError("the configured scheduler has no list of nodes", do=do)

    def host_names(self, nodes: str | None) -> list[str]:
        """Return the names in a list of nodes in the scheduler's syntax."""
        return nodes.split(",") if nodes else []

    def host_list(self, names: Iterable[str]) -> str:
        """Format names of nodes as a list in the scheduler's syntax; an empty string if there are none."""
        return ",".join(names)


class Wording:
    """The scheduler's terms."""

    title: str
    """The scheduler's display name."""
    words: frozenset[str] = frozenset()
    """The states of jobs that llmb knows, in the scheduler's terms."""

    def cause(self, signal: str) -> str:
        """Complete "ended by ..." for a job that received ``signal``; by default, return the signal's name."""
        return signal

    def fault_patterns(self) -> Sequence[FaultPattern]:
        """Return patterns of the scheduler's own messages in logs that show the cause of a failure."""
        return ()


class InstallerPart:
    """The scheduler's part of an installation; its methods' ``answers`` contain all answers so far."""

    answers: type[Record] = Record
    """Declares, as options, the answers that only this scheduler needs."""
    questions: Sequence[type[SchedulerQuestion]] = ()
    runtimes: Sequence[Choice] = ()
    """Container runtimes that the scheduler can start."""
    comments: Mapping[str, str] = MappingProxyType({})
    """Comments on the keys of the scheduler's section in cluster_config.yaml."""

    def training_nodes(self, answers: Any, offer: Offer) -> Partition | None:  # noqa: ANN401 (with its own fields)
        """Return the partition for training, if the scheduler reports it."""
        return None

    def section(self, answers: Any, gpus_per_node: int | None) -> dict[str, Any]:  # noqa: ANN401 (with its own fields)
        """Return the scheduler's section for cluster_config.yaml, without empty values."""
        return {}

    def answers_in(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers, by name, that the scheduler's section in cluster_config.yaml contains."""
        return {}


class Scheduler(Queue, Cluster, Wording, InstallerPart):
    """A scheduler: its queue, cluster, terms and part of the installation, and the options of its jobs."""

    name: str
    choices: type[Record] = Record
    """Declares the options of the scheduler's jobs, one option per field."""

    def read_options(self, values: Mapping[str, Any], environ: Mapping[str, str], python: str) -> JobOptions:
        """Build the job's options from option values or else from variables in ``environ``; ``python`` is the default
        interpreter. Raises UsageError if an option or variable is invalid."""
        return JobOptions(python=python)

    def options_here(self, environ: Mapping[str, str]) -> JobOptions:
        """Return options that select the nodes of the job in which this process runs, if it runs in a job."""
        return JobOptions()

    def variables_here(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment, without secrets, in which a batch script can run inside the current job."""
        return without_secrets(environ)

    def warnings(self, spec: JobSpec) -> Sequence[str]:
        """Return the known reasons why the scheduler will probably reject the job."""
        return ()

    def completed(self, spec: JobSpec, options: JobOptions, site: Site) -> JobSpec:
        """Return the specification with its final flags and limits; raise UsageError if they are invalid."""
        return spec
