# SPDX-License-Identifier: Apache-2.0
"""The questions of an installation, in order, with conditions, valid answers and defaults; invalid answers are reported
together.
"""

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmb.base.errors import UsageError
from llmb.catalogue.resolve import CPU, gpu_types_of, sizes_of
from llmb.launch.documents.launch_scripts import launch_scripts, scripts_of
from llmb.launch.scheduler_lookup import SCHEDULERS, find_scheduler
from llmb.launch.scheduler_port import NONE, Choice, Partition, Question, Scheduler
from llmb.runs.record import LOCAL
from llmb.setup.install.answers import (
    ALL,
    EXISTING,
    LISTED,
    Answers,
    absolute,
    flag_of,
    parse_answers,
    path_problem,
    suite_scripts,
)
from llmb.setup.install.images import source_problem
from llmb.setup.install.installation import prepared_sizes
from llmb.setup.install.python_environment import Surroundings, torch_builds

GRACE = "aarch64"
"""The architecture of hosts that are connected to their GPUs by NVLink."""


class GeneralQuestion(Question):
    """A question that is independent of the scheduler."""

    def __init__(self, answers: Answers, around: Surroundings) -> None:
        self.answers = answers
        self.around = around

    @property
    def scheduler(self) -> Scheduler:
        return find_scheduler(self.answers.scheduler or LOCAL)

    @property
    def queues(self) -> bool:
        """Return True if jobs wait in a queue for nodes of a cluster."""
        return self.scheduler.name != LOCAL

    @property
    def nodes(self) -> Partition | None:
        """Return the nodes that train, or None if the scheduler does not report them."""
        return self.scheduler.training_nodes(self.answers, self.around.offer(self.scheduler.name))


class Path(GeneralQuestion):
    name, text = "path", "Folder of the installation, on a file system that all nodes mount"

    def assumed(self) -> str | None:
        return self.around.root

    def check(self, value: str) -> str | None:
        return path_problem(value)


class SchedulerName(GeneralQuestion):
    name, text = "scheduler", "What starts jobs"

    def choices(self) -> list[Choice]:
        queues = [find_scheduler(name) for name in SCHEDULERS if name != LOCAL]
        clusters = [Choice(item.name, f"a cluster that {item.title} manages") for item in queues]
        return [*clusters, Choice(LOCAL, "this machine alone")]

    def assumed(self) -> str:
        return next(name for name in SCHEDULERS if name not in self.around.unusable)

    def check(self, value: str) -> str | None:
        return self.around.unusable.get(value)


class GpuType(GeneralQuestion):
    name, text = "gpu_type", "GPU type"

    def choices(self) -> list[Choice]:
        gpus = [Choice(name, gpu.name) for name, gpu in self.around.catalogue.gpus.items()]
        return [*gpus, Choice(CPU, "no GPU: tiny models on processes")]

    def assumed(self) -> str | None:
        """Return the GPU type of this machine if it runs the jobs, else of the scheduler's nodes; None if unknown."""
        if not self.queues:
            return self.around.gpu_type or (CPU if not self.around.gpus else None)
        kind = (self.nodes.gres_type or "").lower() if self.nodes else ""
        return kind if kind in self.around.catalogue.gpus else None


class NodeArchitecture(GeneralQuestion):
    name, text = "node_architecture", "Architecture of the nodes"
    interactive = False

    @property
    def is_grace(self) -> bool:
        gpu = self.around.catalogue.gpus.get(self.answers.gpu_type or "")
        return gpu is not None and gpu.nvlink_c2c

    def choices(self) -> list[Choice]:
        return [Choice("x86_64"), Choice("aarch64", "Grace, and other ARM")]

    def assumed(self) -> str:
        if self.is_grace:
            return GRACE
        return (self.nodes.architecture if self.nodes else None) or self.around.architecture

    def check(self, value: str) -> str | None:
        return f"{self.answers.gpu_type} has {GRACE} hosts" if self.is_grace and value != GRACE else None


class GpusPerNode(GeneralQuestion):
    name, text = "gpus_per_node", "GPUs per node"

    def applies(self) -> bool:
        return self.answers.has_gpus

    def assumed(self) -> str | None:
        if not self.queues:
            return str(self.around.gpus) if self.around.gpus else None
        gpu = self.around.catalogue.gpus.get(self.answers.gpu_type or "")
        count = (self.nodes.gpus_per_node if self.nodes else None) or (gpu.gpus_per_node if gpu else None)
        return str(count) if count else None

    def check(self, value: str) -> str | None:
        if not value.isdecimal() or int(value) < 1:
            return f"'{value}' is not a number of GPUs"
        if self.nodes and self.nodes.gpus_per_node and int(value) > self.nodes.gpus_per_node:
            return f"the nodes of {self.nodes.name} have {self.nodes.gpus_per_node}"
        return None


class NodeNetwork(GeneralQuestion):
    name, text = "fabric", "Network between nodes"

    def applies(self) -> bool:
        return self.queues and self.answers.has_gpus

    def choices(self) -> list[Choice]:
        choices = [Choice(name, fabric.title) for name, fabric in self.around.catalogue.fabrics.items()]
        return [Choice(NONE, "NCCL chooses"), *choices]

    def assumed(self) -> str:
        return NONE


class Workloads(GeneralQuestion):
    name, text = "workloads", "Workloads, separated by commas"
    several = True

    def choices(self) -> list[Choice]:
        items = self.around.catalogue.workloads
        names = workloads_for(self.answers.gpu_type, self.around)
        return [*(Choice(name, ", ".join(sizes_of(items[name]))) for name in names), Choice(ALL, "every one of these")]


class SuiteReleases(GeneralQuestion):
    name, text = "suite_releases", "Releases of the reference suite's own software, separated by commas"
    several, interactive = True, False

    def applies(self) -> bool:
        return bool(self.answers.suite_releases)

    def choices(self) -> list[Choice]:
        return [*map(Choice, dict.fromkeys(item.release for item in launch_scripts()))]

    def check(self, value: str) -> str | None:  # noqa: ARG002 (all releases are known by now)
        if not self.queues:
            return f"the suite's jobs run on a cluster, but {LOCAL} is this machine alone"
        for release in () if ALL in self.answers.workloads else self.answers.suite_releases:
            if not any(suite_scripts(self.answers, release)):
                has = [f"{item.workload} on {', '.join(item.gpu_types)}" for item in scripts_of(release)]
                return f"release {release} has {'; '.join(has)}, but none of these is installed"
        return None


class ContainerRuntime(GeneralQuestion):
    name, text = "container_runtime", "Containers"

    def applies(self) -> bool:
        return bool(self.scheduler.runtimes)

    def choices(self) -> list[Choice]:
        return [Choice(NONE, "no containers: jobs use the environment"), *self.scheduler.runtimes]

    def assumed(self) -> str:
        return NONE


class Image(GeneralQuestion):
    name, text = "image", "Image: a file, or a name in a registry"

    def applies(self) -> bool:
        return self.answers.container_runtime not in (None, NONE)

    def check(self, value: str) -> str | None:
        return source_problem(value)


class PythonEnvironment(GeneralQuestion):
    name, text = "environment", "Python environment"

    def choices(self) -> list[Choice]:
        return [
            Choice("uv", "made by uv"),
            Choice("venv", "made by Python's venv and pip"),
            Choice("conda", "made by conda"),
            Choice(EXISTING, "a Python that has llmb and torch"),
        ]

    def assumed(self) -> str:
        return "uv" if "uv" in self.around.programs else "venv"

    def check(self, value: str) -> str | None:
        if value in ("uv", "conda") and value not in self.around.programs:
            return f"{value} is not on this machine"
        here, target = self.around.architecture, self.answers.node_architecture
        in_container = self.answers.container_runtime not in (None, NONE)
        if value != EXISTING and target not in (None, here) and not in_container:
            return (
                f"this machine is {here} and the nodes are {target}: an environment made here does not run there; run "
                "this command on such a node, or use a container"
            )
        return None


class Python(GeneralQuestion):
    name, text = "python", "Python: a program, for uv also a version, for conda only a version"

    def assumed(self) -> str:
        return platform.python_version() if self.answers.environment == "conda" else self.around.python

    def check(self, value: str) -> str | None:
        is_version, conda = value.replace(".", "").isdecimal(), self.answers.environment == "conda"
        if is_version and (conda or self.answers.environment == "uv"):
            return None
        if conda or shutil.which(absolute(value) if "/" in value else value) is None:
            return f"'{value}' is not a version, such as 3.12" if conda else f"there is no program '{value}'"
        return None


class Torch(GeneralQuestion):
    name, text = "torch", "Build of PyTorch, or the address of an index"
    closed = False

    def applies(self) -> bool:
        return self.answers.environment not in (None, EXISTING)

    def choices(self) -> list[Choice]:
        choices = [Choice(build.name, build.meaning) for build in torch_builds()]
        return [*choices, Choice(EXISTING, "that of the Python with which the environment is made")]

    def assumed(self) -> str:
        """Without GPUs, return the CPU build, else the newest that the driver here supports, else pip's default."""
        if self.answers.gpu_type == CPU:
            return CPU
        driver = self.around.driver or 0
        runnable = [build.name for build in torch_builds() if build.least_driver and build.least_driver <= driver]
        return runnable[0] if runnable else torch_builds()[0].name

    def check(self, value: str) -> str | None:
        names = [choice.value for choice in self.choices()]
        if value not in names and "://" not in value:
            return f"'{value}' is neither the address of an index nor one of: {', '.join(names)}"
        return None


class Prepare(GeneralQuestion):
    name, text = "prepare", "Prepare data and checkpoints for fine-tuning"

    def applies(self) -> bool:
        return any(prepared_sizes(self.around.catalogue, self.answers))

    def choices(self) -> list[Choice]:
        jobs = [Choice("job", f"as {self.scheduler.title} jobs, in the background")] if self.queues else []
        return [Choice("here", "now, on this machine"), *jobs, Choice("no", "later, by llmb prepare")]


class Size(GeneralQuestion):
    name, text = "size", "Model size to prepare"
    interactive = False

    def applies(self) -> bool:
        return self.answers.size is not None

    def check(self, value: str) -> str | None:
        workloads = self.around.catalogue.workloads
        sizes = {size for name in self.answers.workloads if name in workloads for size in workloads[name].sources}
        listed = ", ".join(sorted(sizes)) or "none, as these workloads do not fine-tune"
        return None if value in sizes else f"'{value}' is not one of the sizes: {listed}"


QUESTIONS: Sequence[type[GeneralQuestion]] = (
    SchedulerName,
    GpuType,
    NodeArchitecture,
    GpusPerNode,
    NodeNetwork,
    Workloads,
    SuiteReleases,
    ContainerRuntime,
    Image,
    PythonEnvironment,
    Python,
    Torch,
    Prepare,
    Size,
)
"""Questions in order, each after the ones that it depends on; the scheduler's questions are inserted between them."""


def workloads_for(gpu_type: str | None, around: Surroundings) -> list[str]:
    """Return the workloads that run on a GPU type; all workloads if it is None."""
    return [
        name
        for name, item in around.catalogue.workloads.items()
        if gpu_type is None or any(gpu_type in gpu_types_of(item, size) for size in sizes_of(item))
    ]


Ask = Callable[[Question, str | None], str]
"""Asks a question, shows the problem with the previous answer, if any, and returns a valid answer."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """A missing or invalid answer."""

    question: Question
    problem: str | None

    def text(self) -> str:
        what = self.problem or "it is not specified"
        line = f"{flag_of(self.question.name)}: {what}"
        choices = self.question.choices()
        if self.problem is None and choices:
            line += f"; valid: {', '.join(choice.value for choice in choices)}"
        return line


class Interview:
    """The answers so far, and the missing or invalid ones that the user was not asked for."""

    def __init__(self, answers: Answers, ask: Ask | None) -> None:
        self.answers, self.ask = answers, ask
        self.lacking: list[Lacking] = []

    def settle(self, question: Question) -> None:
        """Store the explicit answer, the user's reply, or the default; otherwise record that the answer is lacking."""
        if not question.applies():
            return
        answer = answer_text(self.answers, question.name)
        problem = question.problem(answer) if answer is not None else None
        if answer is not None and not problem:
            self._take(question, answer)
        elif self.ask and (question.interactive or problem):
            self._take(question, self.ask(question, problem))
        else:
            assumed = question.assumed()
            if not problem and assumed is not None:
                problem = question.problem(assumed)
            if problem or assumed is None:
                self.lacking.append(Lacking(question, problem))
            else:
                self._take(question, assumed)

    def _take(self, question: Question, value: str) -> None:
        if question.name == "python":
            value = shutil.which(str(absolute(value)) if "/" in value else value) or value  # or a version
        answer = parse_answers({question.name: [value] if question.name in LISTED else value})
        self.answers = self.answers.model_copy(update={question.name: getattr(answer, question.name)})

    def complete(self) -> Answers:
        """Return the answers; raise UsageError with all missing or invalid answers."""
        if self.lacking:
            lines = "\n".join(f"  {item.text()}" for item in self.lacking)
            noun = "an answer is" if len(self.lacking) == 1 else f"{len(self.lacking)} answers are"
            do = "pass valid answers as options or keys of --config FILE; on a terminal, omit --yes to be asked"
            raise UsageError(f"{noun} missing or invalid:\n{lines}", do=do)
        return self.answers


def completed_path(answers: Answers, around: Surroundings, ask: Ask | None) -> Answers:
    """Complete the path, on which other answers may depend; raise UsageError if it is missing or invalid."""
    interview = Interview(answers, ask)
    interview.settle(Path(answers, around))
    return interview.complete()


def completed(answers: Answers, around: Surroundings, ask: Ask | None) -> Answers:
    """Complete all answers but the path. Raise UsageError for missing or invalid ones, and errors as ``offer`` does."""
    if problems := list(answers.problems()):
        raise UsageError("\n".join(problems))
    interview = Interview(answers, ask)
    for kind in QUESTIONS:
        interview.settle(kind(interview.answers, around))
        name = interview.answers.scheduler
        if name and name not in around.unusable:
            for question in find_scheduler(name).questions:
                if question.after == kind.name:
                    interview.settle(question(interview.answers, around.offer(name)))
    complete = interview.complete()
    if ALL not in complete.workloads:
        return complete
    return complete.model_copy(update={"workloads": tuple(workloads_for(complete.gpu_type, around))})


def answer_text(answers: Answers, name: str) -> str | None:
    """Return an answer as a user would type it; None if it is open."""
    value = getattr(answers, name)
    if value is None or value == ():
        return None
    return ",".join(value) if isinstance(value, tuple) else str(value)
