# SPDX-License-Identifier: Apache-2.0
"""The questions of an installation in their order: when each applies, what may be answered, and what is assumed."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llmb.catalogue.resolve import CPU, gpu_types_of, sizes_of
from llmb.catalogue.schema import WorkloadFile
from llmb.errors import closest
from llmb.install.answers import ALL, EXISTING, NONE, Answers, absolute, path_problem
from llmb.install.detect import Surroundings, torch_builds
from llmb.install.image_sources import source_problem
from llmb.install.prepared_sizes import prepared_sizes
from llmb.schedulers.port import Partition

GRACE = "aarch64"
"""The architecture of hosts whose GPU type begins with gb."""


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One answer. Functions get the answers so far, and what was seen of the machine."""

    name: str
    """Name of the field of ``Answers``."""
    text: str
    applies: Callable[[Answers, Surroundings], bool] = lambda answers, around: True
    choices: Callable[[Answers, Surroundings], Sequence[Choice]] = lambda answers, around: ()
    assumed: Callable[[Answers, Surroundings], str | None] = lambda answers, around: None
    """What holds without an answer; None if that cannot be known, and an answer is required."""
    closed: bool = True
    """If there are choices, no other answer is valid."""
    several: bool = False
    """Answers are separated by commas."""
    is_asked: bool = True
    """On a terminal; what is assumed is taken otherwise."""
    check: Callable[[str, Answers, Surroundings], str | None] = lambda value, answers, around: None
    """What is wrong with a value that is among the choices, or of a question without choices."""

    def problem(self, value: str, answers: Answers, around: Surroundings) -> str | None:
        """What is wrong with an answer."""
        names = [choice.value for choice in self.choices(answers, around)]
        given = [item.strip() for item in value.split(",")] if self.several else [value]
        wrong = [item for item in given if self.closed and names and item not in names]
        if wrong:
            near = closest(wrong[0], names, cutoff=0.5, most=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            return f"'{wrong[0]}' is not one of: {', '.join(names)}{hint}"
        return self.check(value, answers, around)


def uses_slurm(answers: Answers, around: Surroundings) -> bool:
    return answers.scheduler == "slurm"


def has_gpus(answers: Answers) -> bool:
    return answers.gpu_type not in (None, CPU)


def makes_environment(answers: Answers) -> bool:
    return answers.environment not in (None, EXISTING)


def workloads_for(gpu_type: str | None, around: Surroundings) -> list[str]:
    """Workloads that run on a GPU type, or all."""
    found = around.catalogue.workloads.items()
    return [name for name, item in found if gpu_type is None or _runs_on(item, gpu_type)]


def _runs_on(workload: WorkloadFile, gpu_type: str) -> bool:
    return any(gpu_type in gpu_types_of(workload, size) for size in sizes_of(workload))


def _schedulers(answers: Answers, around: Surroundings) -> list[Choice]:
    return [Choice("slurm", "a cluster that Slurm manages"), Choice("local", "this machine alone")]


def _scheduler_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    return around.no_slurm if value == "slurm" else None


def _accounts(answers: Answers, around: Surroundings) -> list[Choice]:
    names = around.queue.accounts
    return [] if names is None else [*map(Choice, names), Choice(NONE, "Slurm's own default")]


def _account(answers: Answers, around: Surroundings) -> str | None:
    offer = around.queue
    return offer.default_account or (NONE if not offer.accounts else None)


def _partitions(answers: Answers, around: Surroundings) -> list[Choice]:
    return [Choice(item.name, _partition_text(item)) for item in around.queue.partitions]


def _partition_text(item: Partition) -> str:
    gpus = f"{item.gpus_per_node} x {item.gres_type or 'GPU'} each" if item.gpus_per_node else "no GPUs counted"
    nodes = f"{item.nodes} node{'' if item.nodes == 1 else 's'}"
    return ", ".join(filter(None, (nodes, gpus, item.architecture, "the default" if item.is_default else None)))


def _gpu_partition(answers: Answers, around: Surroundings) -> str | None:
    """The only one with GPUs, or the only one."""
    found = around.queue.partitions
    with_gpus = [item for item in found if item.gpus_per_node] or list(found)
    return with_gpus[0].name if len(with_gpus) == 1 else None


def _cpu_partitions(answers: Answers, around: Surroundings) -> list[Choice]:
    return [*_partitions(answers, around), Choice(NONE, f"the same, {answers.gpu_partition}")]


def _gpu_types(answers: Answers, around: Surroundings) -> list[Choice]:
    gpus = [Choice(name, gpu.name) for name, gpu in around.catalogue.gpus.items()]
    return [*gpus, Choice(CPU, "no GPU: tiny models on processes")]


def _gpu_type(answers: Answers, around: Surroundings) -> str | None:
    """By the type of the partition's generic resource, else by the GPUs of a machine that runs the jobs itself."""
    if answers.scheduler != "slurm":
        return around.gpu_type or (CPU if not around.gpus else None)
    partition = around.queue.partition(_first(answers.gpu_partition))
    kind = (partition.gres_type or "").lower() if partition else ""
    return next((name for name in around.catalogue.gpus if name == kind), None)


def _first(names: str | None) -> str | None:
    return names.split(",")[0].strip() if names else None


def _architecture(answers: Answers, around: Surroundings) -> str | None:
    if (answers.gpu_type or "").startswith("gb"):
        return GRACE
    if answers.scheduler != "slurm":
        return around.architecture
    partition = around.queue.partition(_first(answers.gpu_partition))
    return (partition.architecture if partition else None) or around.architecture


def _architectures(answers: Answers, around: Surroundings) -> list[Choice]:
    return [Choice("x86_64"), Choice("aarch64", "Grace, and other ARM")]


def _architecture_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    if (answers.gpu_type or "").startswith("gb") and value != GRACE:
        return f"{answers.gpu_type} has {GRACE} hosts"
    return None


def _gpus_per_node(answers: Answers, around: Surroundings) -> str | None:
    if answers.scheduler != "slurm":
        return str(around.gpus) if around.gpus else None
    partition = around.queue.partition(_first(answers.gpu_partition))
    counted = partition.gpus_per_node if partition else None
    gpu = around.catalogue.gpus.get(answers.gpu_type or "")
    count = counted or (gpu.gpus_per_node if gpu else None)
    return str(count) if count else None


def _gpus_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    if not value.isdecimal() or int(value) < 1:
        return f"'{value}' is not a number of GPUs"
    partition = around.queue.partition(_first(answers.gpu_partition)) if answers.scheduler == "slurm" else None
    if partition and partition.gpus_per_node and int(value) > partition.gpus_per_node:
        return f"the nodes of {partition.name} have {partition.gpus_per_node}"
    return None


def _gpu_requests(answers: Answers, around: Surroundings) -> list[Choice]:
    count = answers.gpus_per_node or "N"
    return [
        Choice("gpus-per-node", f"--gpus-per-node={count}"),
        Choice("gres", f"--gres=gpu:{count}"),
        Choice(NONE, "no flag: Slurm counts no GPUs here, and jobs get whole nodes"),
    ]


def _gpu_request(answers: Answers, around: Surroundings) -> str:
    partition = around.queue.partition(_first(answers.gpu_partition))
    return "gpus-per-node" if partition and partition.gpus_per_node else NONE


def _gpu_request_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    partition = around.queue.partition(_first(answers.gpu_partition))
    if value != NONE and partition and not partition.gpus_per_node:
        return f"the nodes of {partition.name} have no generic resource 'gpu': Slurm would reject every job"
    return None


def _fabrics(answers: Answers, around: Surroundings) -> list[Choice]:
    known = [Choice(name, fabric.title) for name, fabric in around.catalogue.fabrics.items()]
    return [Choice(NONE, "NCCL chooses"), *known]


def _workloads(answers: Answers, around: Surroundings) -> list[Choice]:
    found = around.catalogue.workloads
    names = workloads_for(answers.gpu_type, around)
    return [*(Choice(name, ", ".join(sizes_of(found[name]))) for name in names), Choice(ALL, "every one of these")]


def _environments(answers: Answers, around: Surroundings) -> list[Choice]:
    return [
        Choice("uv", "made by uv"),
        Choice("venv", "made by Python's venv and pip"),
        Choice("conda", "made by conda"),
        Choice(EXISTING, "a Python that has llmb and torch"),
    ]


def _environment_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    if value in ("uv", "conda") and value not in around.programs:
        return f"{value} is not on this machine"
    wanted = answers.node_architecture
    if value != EXISTING and wanted and wanted != around.architecture and answers.container_runtime in (None, NONE):
        return (
            f"this machine is {around.architecture} and the nodes are {wanted}: an environment made here does not run "
            "there; call this on such a node, or use a container"
        )
    return None


def _builds(answers: Answers, around: Surroundings) -> list[Choice]:
    own = [Choice(build.name, build.meaning) for build in torch_builds()]
    return [*own, Choice(EXISTING, "the one that the Python has from which the environment is made")]


def _build(answers: Answers, around: Surroundings) -> str:
    """The newest build that the driver here runs; that of pip's index without a driver."""
    if answers.gpu_type == CPU:
        return CPU
    runnable = [build.name for build in torch_builds() if around.driver and (build.least_driver or 0) <= around.driver]
    return runnable[0] if runnable else torch_builds()[0].name


def _build_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    names = [choice.value for choice in _builds(answers, around)]
    if value not in names and "://" not in value:
        return f"'{value}' is neither the address of an index nor one of: {', '.join(names)}"
    return None


def _runtimes(answers: Answers, around: Surroundings) -> list[Choice]:
    return [
        Choice(NONE, "no containers: jobs use the environment"),
        Choice("pyxis", "Slurm's plugin, with Enroot"),
        Choice("apptainer"),
    ]


def _has_container(answers: Answers, around: Surroundings) -> bool:
    return answers.container_runtime not in (None, NONE)


def _wheres(answers: Answers, around: Surroundings) -> list[Choice]:
    jobs = [Choice("job", "as Slurm jobs, in the background")] if uses_slurm(answers, around) else []
    return [Choice("here", "now, on this machine"), *jobs, Choice("no", "later, by llmb prepare")]


def _python_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    is_version = value.replace(".", "").isdecimal()
    if is_version and answers.environment in ("uv", "conda"):
        return None
    if shutil.which(absolute(value) if "/" in value else value) is None:
        return f"there is no program '{value}'"
    return None


def _size_problem(value: str, answers: Answers, around: Surroundings) -> str | None:
    found = around.catalogue.workloads
    sizes = {size for name in answers.workloads if name in found for size in found[name].sources}
    return None if value in sizes else f"'{value}' is not one of: {', '.join(sorted(sizes))}"


PATH = Question(
    name="path",
    text="Folder of the installation, on a file system that all nodes mount",
    check=lambda value, answers, around: path_problem(value),
)
QUESTIONS: tuple[Question, ...] = (
    Question(
        name="scheduler",
        text="What starts jobs",
        choices=_schedulers,
        assumed=lambda answers, around: "local" if around.no_slurm else "slurm",
        check=_scheduler_problem,
    ),
    Question(name="account", text="Slurm account", applies=uses_slurm, choices=_accounts, assumed=_account),
    Question(
        name="gpu_partition",
        text="Partition of the nodes that train",
        applies=uses_slurm,
        choices=_partitions,
        assumed=_gpu_partition,
        several=True,
    ),
    Question(
        name="cpu_partition",
        text="Partition for jobs that need no GPU",
        applies=uses_slurm,
        choices=_cpu_partitions,
        assumed=lambda answers, around: NONE,
        several=True,
    ),
    Question(name="gpu_type", text="GPU type", choices=_gpu_types, assumed=_gpu_type),
    Question(
        name="node_architecture",
        text="Architecture of the nodes",
        choices=_architectures,
        assumed=_architecture,
        is_asked=False,
        check=_architecture_problem,
    ),
    Question(
        name="gpus_per_node",
        text="GPUs of a node",
        applies=lambda answers, around: has_gpus(answers),
        assumed=_gpus_per_node,
        check=_gpus_problem,
    ),
    Question(
        name="gpu_request",
        text="How jobs ask Slurm for GPUs",
        applies=uses_slurm,
        choices=_gpu_requests,
        assumed=_gpu_request,
        check=_gpu_request_problem,
    ),
    Question(
        name="fabric",
        text="Network between nodes",
        applies=lambda answers, around: uses_slurm(answers, around) and has_gpus(answers),
        choices=_fabrics,
        assumed=lambda answers, around: NONE,
    ),
    Question(name="workloads", text="Workloads, with commas between them", choices=_workloads, several=True),
    Question(
        name="container_runtime",
        text="Containers",
        applies=uses_slurm,
        choices=_runtimes,
        assumed=lambda answers, around: NONE,
    ),
    Question(
        name="image",
        text="Image: a file, or a name in a registry",
        applies=_has_container,
        check=lambda value, answers, around: source_problem(value),
    ),
    Question(
        name="environment",
        text="Python environment",
        choices=_environments,
        assumed=lambda answers, around: "uv" if "uv" in around.programs else "venv",
        check=_environment_problem,
    ),
    Question(
        name="python",
        text="Python: a program, or for uv and conda a version",
        assumed=lambda answers, around: around.python,
        check=_python_problem,
    ),
    Question(
        name="torch",
        text="Build of PyTorch, or the address of an index",
        applies=lambda answers, around: makes_environment(answers),
        choices=_builds,
        closed=False,
        assumed=_build,
        check=_build_problem,
    ),
    Question(
        name="prepare",
        text="Prepare data and checkpoints of fine-tunings",
        applies=lambda answers, around: any(prepared_sizes(around.catalogue, answers)),
        choices=_wheres,
    ),
    Question(
        name="size",
        text="Model size to prepare",
        applies=lambda answers, around: answers.size is not None,
        is_asked=False,
        check=_size_problem,
    ),
)
"""Each after those that it depends on."""


def all_questions() -> Iterator[Question]:
    yield PATH
    yield from QUESTIONS
