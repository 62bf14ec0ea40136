# SPDX-License-Identifier: Apache-2.0
"""Options for Slurm jobs on the command line and in the shell, and the resulting flags of sbatch. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated

from llmb.base.errors import UsageError, itemized
from llmb.base.options import NONE_WORDS, Form, Option, convert, limit_problems, options_of, pattern
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.launch.jobspec.job_options import CpuBinding, Flags, JobOptions, NumaBinding, StartMode, Vboost
from llmb.launch.jobspec.spec import JobSpec, Placement, parse_variables
from llmb.launch.slurm.offer import site_partition
from llmb.launch.slurm.script import tasks_of
from llmb.launch.slurm.settings import (
    GPU_FLAGS,
    NO_FLAG,
    PER_GPU,
    TIME,
    GpuRequest,
    SlurmSettings,
    duration,
    flag_problems,
    minutes,
    on_top,
    parse_additional,
    parse_flags,
    requested_flags,
)

ADDITIONAL = "ADDITIONAL_SLURM_PARAMS"
COUNTED = ("SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE")
"""Variables in which words such as ``null`` mean that Slurm does not manage GPUs, so jobs must not request GPUs."""
DURATION = Form(
    lambda text: text == "" or TIME.fullmatch(text.upper()), "a time such as 30, 00:30:00 or 1-12:00:00", any_case=True
)
_option = partial(Option, panel="Slurm")


class SlurmChoices(Record):
    """The Slurm options of commands that queue jobs. For an option that is None, variables of the shell apply, then
    settings. Some of these variables would override the batch script, because sbatch reads them. Their values are
    therefore written into the script, and the variables are hidden from sbatch."""

    account: Annotated[
        str | None,
        _option(
            basic=True,
            flags=("-A", "--account"),
            help="Slurm account. Default: from the settings, else Slurm's default.",
            set_by=("SBATCH_ACCOUNT", "SLURM_ACCOUNT"),
        ),
    ] = None
    partition: Annotated[
        str | None,
        _option(
            basic=True,
            flags=("-p", "--partition"),
            help="Partition, or several separated by commas. Default: from the settings, else Slurm's default.",
            set_by=("SBATCH_PARTITION", "SLURM_PARTITION"),
        ),
    ] = None
    qos: Annotated[str | None, _option(help="Slurm quality of service.", set_by=("SBATCH_QOS",))] = None
    time_limit: Annotated[
        str | None,
        _option(
            basic=True,
            help="Time limit as minutes, hh:mm:ss or d-hh:mm:ss. Default: as in the settings, else the recipe's.",
            form=DURATION,
            set_by=("TIME_LIMIT", "SBATCH_TIMELIMIT"),
        ),
    ] = None
    nodes: Annotated[
        int | None, _option(flags=("-N", "--nodes"), help="Number of nodes, instead of --scale.", minimum=1)
    ] = None
    gpus_per_node: Annotated[
        int | None,
        _option(
            help="GPUs per node (on CPUs: processes). Default: as in cluster_config.yaml, else the GPU type's.",
            minimum=1,
            set_by=("GPUS_PER_NODE", "SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE"),
        ),
    ] = None
    gpu_request: Annotated[
        GpuRequest | None, _option(help="sbatch flag that requests GPUs, or none. Default: as in the settings.")
    ] = None
    gres: Annotated[
        str | None, _option(help="Generic resources per node, such as nvme:1; GPUs are added as set by --gpu-request.")
    ] = None
    nodelist: Annotated[
        str | None, _option(help="Nodes that the job must include, such as node[1-4].", set_by=("SBATCH_NODELIST",))
    ] = None
    exclude: Annotated[
        str | None,
        _option(
            help="Nodes to avoid, such as node[1-4]; @FILE: nodes listed in a file; unfit: nodes that failed the last "
            "check or pairwise measurement, or were at fault in runs since then.",
            set_by=("SBATCH_EXCLUDE",),
        ),
    ] = None
    constraint: Annotated[str | None, _option(help="Features that nodes need.", set_by=("SBATCH_CONSTRAINT",))] = None
    reservation: Annotated[str | None, _option(help="Slurm reservation.", set_by=("SBATCH_RESERVATION",))] = None
    nice: Annotated[int | None, _option(help="Amount by which the job's priority is lowered.")] = None
    segment: Annotated[
        int | None,
        _option(
            help="Nodes per NVLink domain (sbatch --segment). Default if a domain spans nodes: the largest divisor of"
            " the job's number of nodes that fits in the domain."
        ),
    ] = None
    dependency: Annotated[str | None, _option(help="Condition on other jobs, such as afterok:1234.")] = None
    retries: Annotated[
        int | None,
        _option(
            help="Maximum number of restarts, from the last checkpoint if there is one, after preemption, loss of a"
            " node or another infrastructure failure. Default: as in cluster_config.yaml, else 0.",
            minimum=0,
        ),
    ] = None
    signal_before: Annotated[
        int | None, _option(help="End the workers this many seconds before the time limit. Default: off.", minimum=1)
    ] = None
    slurm_arg: Annotated[
        tuple[str, ...],
        _option(help="Another sbatch flag; 'KEY=' removes a flag. Repeatable.", metavar="KEY[=VALUE]", repeatable=True),
    ] = ()
    env: Annotated[
        tuple[str, ...], _option(help="Worker environment variable. Repeatable.", metavar="NAME=VALUE", repeatable=True)
    ] = ()
    start: Annotated[
        StartMode | None,
        _option(
            help="Launcher of workers. torchrun: one task per node, which starts a worker per GPU; task-per-gpu: Slurm"
            " starts every worker. Default: from the settings, else torchrun; megatron_bridge always uses"
            " task-per-gpu."
        ),
    ] = None
    vboost: Annotated[
        str | None,
        _option(
            help="Level for nvidia-smi boost-slider on every node while the workers train; recipe: the level of the"
            " published jobs, if the node allows it. Default: from the settings.",
            metavar="recipe|0-4",
            form=Form(pattern(r"recipe|[0-4]"), "recipe, or a level from 0 (none) to 4", any_case=True),
        ),
    ] = None
    cpu_binding: Annotated[
        str | None,
        _option(
            help="CPU cores per worker: a number, none, or 'cores' (equal shares). Default: from settings, else none.",
            metavar="none|cores|N",
            form=Form(pattern(r"none|cores|\d{1,4}"), "none, cores or a number", any_case=True),
        ),
    ] = None
    numa_binding: Annotated[
        NumaBinding | None,
        _option(
            help="NUMA binding. local: restrict workers to the cores and memory of their GPUs' NUMA nodes; auto: bind"
            " them to these cores and prefer this memory where possible, if a node has several GPU workers and"
            " --cpu-binding is none. Default: from the settings, else auto."
        ),
    ] = None

    def flags(self) -> dict[str, str | None]:
        """Return the flags of sbatch that the options set, by sbatch's names."""
        chosen = self.model_dump(include=set(FLAG_NAMES), exclude_none=True)
        flags: dict[str, str | None] = {FLAG_NAMES[name]: str(value) for name, value in chosen.items()}
        if self.signal_before:
            flags["signal"] = f"B:USR1@{self.signal_before}"
        return flags


FLAG_NAMES: Mapping[str, str] = {
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "time_limit": "time",
    "gres": "gres",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "constraint": "constraint",
    "reservation": "reservation",
    "nice": "nice",
    "segment": "segment",
    "dependency": "dependency",
}
"""The long names of sbatch's flags, by option."""


def slurm_options(chosen: SlurmChoices, environ: Mapping[str, str], python: str) -> JobOptions:
    """Return the job's options, which override variables of the shell; raise UsageError if one of these is invalid."""
    if problems := list(limit_problems(chosen)):
        raise UsageError("\n".join(problems))
    return JobOptions(
        flags=job_flags(chosen.flags(), chosen.slurm_arg, environ),
        variables=parse_variables(chosen.env),
        nodes=chosen.nodes,
        gpus_per_node=chosen.gpus_per_node or shell_gpus_per_node(environ),
        gpu_request=chosen.gpu_request,
        vboost=_vboost(chosen.vboost),
        cpu_binding=_cpu_binding(chosen.cpu_binding),
        numa_binding=chosen.numa_binding,
        start=chosen.start,
        retries=chosen.retries,
        python=python,
    )


def _vboost(text: str | None) -> Vboost | None:
    if text is None:
        return None
    word = str(convert(options_of(SlurmChoices)["vboost"], "--vboost", (text,)))
    return int(word) if word.isdecimal() else "recipe"


def _cpu_binding(text: str | None) -> CpuBinding | None:
    """Convert the value of --cpu-binding, in which 0 also means none; raise UsageError if it is invalid."""
    if text is None:
        return None
    word = str(convert(options_of(SlurmChoices)["cpu_binding"], "--cpu-binding", (text,)))
    if word == "cores":
        return "cores"
    return int(word) if word.strip("0").isdecimal() else "none"


def job_flags(job: Flags, others: Sequence[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the flags set by the shell's variables, overridden by options and ``--slurm-arg``. Raises UsageError if a
    flag is invalid, or an option and --slurm-arg set it to different values."""
    rest = parse_flags(others, "--slurm-arg")
    twice = [name for name in rest if name in job and rest[name] != job[name]]
    if twice:
        raise UsageError(f"an option and --slurm-arg both set {', '.join(twice)}", do="set each flag only once")
    additional = parse_additional(environ.get(ADDITIONAL, ""))
    flags = on_top(shell_flags(environ), additional, {**rest, **job})
    if problems := list(flag_problems(flags)):
        do = "correct or remove the options or variables that set them"
        raise UsageError(f"these flags of sbatch cannot be used:{itemized(problems)}", do=do)
    return flags


def shell_flags(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the flags that variables of the shell set, except ``ADDITIONAL``; their values are not checked."""
    flags: dict[str, str | None] = {}
    if _is_none(next((name for name in COUNTED if environ.get(name)), None), environ):
        flags.update(dict.fromkeys(GPU_FLAGS, NO_FLAG))
    for name, flag in FLAG_NAMES.items():
        variable = variable_of(name, environ)
        if variable is not None:
            flags[flag] = environ[variable]
    return flags


def shell_gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs per node that the shell sets, if any; raise UsageError if it is invalid."""
    variable = variable_of("gpus_per_node", environ)
    if variable is None or _is_none(variable, environ):
        return None
    # In a job that requested a GPU type, Slurm sets the variable to a value such as 'h100:8'.
    text = environ[variable]
    count = text if "," in text else text.rpartition(":")[2]
    number: int = convert(options_of(SlurmChoices)["gpus_per_node"], variable, (count,))
    return number


def _is_none(variable: str | None, environ: Mapping[str, str]) -> bool:
    return variable in COUNTED and environ[variable].strip().lower() in NONE_WORDS


def variable_of(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the first variable, if any, that corresponds to the option ``name`` and is set."""
    return next((variable for variable in options_of(SlurmChoices)[name].set_by if environ.get(variable)), None)


def gpu_request(settings: SlurmSettings, placement: Placement, chosen: Flags) -> Flags:
    """Return the flags that request GPUs; raise UsageError if ``chosen`` requests too few for the processes."""
    chosen_flags = {name: chosen[name] for name in GPU_FLAGS if name in chosen}
    requested = requested_flags(chosen_flags)
    counts = [count for name, value in requested.items() for count in _gpus(name, value or "")]
    processes = placement.processes_per_node
    if counts and min(counts) < processes:
        flags = " ".join(f"{name}={value}" for name, value in requested.items())
        do = "request more GPUs, or fewer processes per node: a smaller --gpus-per-node (or --ranks)"
        raise UsageError(f"{flags} requests fewer than the job's {processes} GPUs per node", do=do)
    if counts or NO_FLAG in chosen_flags.values():
        return requested
    default = _default(settings, placement.processes_per_node)
    return {**requested, **default, **_both(requested.get("gres"), default.get("gres"))}


def _default(settings: SlurmSettings, count: int) -> Flags:
    if settings.gpu_request == "none":
        return {}
    kind = f"{settings.gres_type}:" if settings.gres_type else ""
    if settings.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _both(other: str | None, gpus: str | None) -> Flags:
    return {"gres": f"{other},{gpus}"} if other and gpus else {}


def _gpus(name: str, value: str) -> list[int]:
    """Return the numbers of GPUs in the value of a flag, such as ``h100:8``, or ``gpu:h100:8,nvme`` for ``gres``."""
    items = value.split(",") if name == "gres" else [f"gpu:{value}"]
    parts = [item.split("(")[0].split(":") for item in items]
    return [int(last) if (last := part[-1]).isdecimal() else 1 for part in parts if part[0] == "gpu"]


def completed_spec(spec: JobSpec, options: JobOptions, settings: SlurmSettings) -> JobSpec:
    """Return the specification with all flags, in the script's order; raise UsageError if flags are invalid."""
    base = {"account": settings.account, "partition": site_partition(settings, spec.gpu_type if spec.gpus else CPU)}
    flags_of_site = {name: value for name, value in settings.flags.items() if spec.gpus or name not in PER_GPU}
    site = {**{name: value for name, value in base.items() if value}, **flags_of_site}
    problems = [*flag_problems(requested_flags(on_top(site, options.flags)))]
    chosen = on_top(dict(_defaults(spec)), site, options.flags)
    if chosen.get("dependency"):
        # Otherwise, a job waits forever if its dependency can never be satisfied.
        chosen = on_top({"kill-on-invalid-dep": "yes"}, chosen)
    if problems:
        raise UsageError(f"this job cannot be requested:{itemized(problems)}", do="correct the options or settings")
    asking = settings.within(chosen.get("partition"))
    if options.gpu_request:
        asking = asking.model_copy(update={"gpu_request": options.gpu_request})
    flags: Flags = {
        "nodes": str(spec.placement.nodes),
        "ntasks-per-node": str(tasks_of(spec)),
        **(gpu_request(asking, spec.placement, chosen) if spec.gpus else {}),
        **requested_flags({name: value for name, value in chosen.items() if not (spec.gpus and name in GPU_FLAGS)}),
    }
    return spec.model_copy(
        update={
            "flags": dict(flags),
            "step_flags": settings.srun_flags,
            "excluded_nodes": flags.get("exclude"),
            "time_limit_min": minutes(flags.get("time") or ""),
        }
    )


def _defaults(spec: JobSpec) -> Iterator[tuple[str, str | None]]:
    placement = spec.placement
    yield "job-name", spec.name
    if spec.time_limit_min is not None:
        yield "time", duration(round(spec.time_limit_min))
    if spec.node:
        yield "nodelist", spec.node
        yield "exclusive", None
        yield "mem", "0"
    elif spec.cpus:
        yield "cpus-per-task", str(spec.cpus)
    elif not spec.gpus:
        yield "cpus-per-task", str(placement.processes_per_node // tasks_of(spec))
    elif placement.whole_nodes:
        yield "exclusive", None
        yield "mem", "0"
        if spec.nvlink_domain_nodes > 1:
            yield "segment", str(segment(placement.nodes, spec.nvlink_domain_nodes))
    if spec.start == "rounds":
        yield "no-kill", None
    yield ("requeue" if spec.retries else "no-requeue"), None


def segment(nodes: int, domain_nodes: int) -> int:
    """Return the number of a job's nodes per NVLink domain: the largest divisor of ``nodes`` that a domain can hold."""
    return max(size for size in range(1, domain_nodes + 1) if nodes % size == 0)
