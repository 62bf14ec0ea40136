# SPDX-License-Identifier: Apache-2.0
"""The flags of a job: what follows from its specification, below the site's and the user's own. Pure."""

from collections.abc import Iterator

from llmb.catalogue.resolve import CPU
from llmb.errors import UsageError, itemized
from llmb.jobspec.options import Flags, JobOptions
from llmb.jobspec.spec import JobSpec, Placement
from llmb.schedulers.slurm.flags import (
    GPU_FLAGS,
    LEFT_OUT,
    PER_GPU,
    duration,
    flag_problems,
    minutes,
    on_top,
    requested_flags,
)
from llmb.schedulers.slurm.offer import site_partition
from llmb.schedulers.slurm.script import tasks_of
from llmb.schedulers.slurm.settings import SlurmSettings


def gpu_request(settings: SlurmSettings, placement: Placement, chosen: Flags) -> Flags:
    """The GPU flags of a job with ``chosen`` flags. Raises UsageError for fewer GPUs than the job has processes."""
    own = {name: chosen[name] for name in GPU_FLAGS if name in chosen}
    given = requested_flags(own)
    counts = [count for name, value in given.items() for count in _gpus(name, value or "")]
    wanted = placement.processes_per_node
    if counts and min(counts) < wanted:
        flags = " ".join(f"{name}={value}" for name, value in given.items())
        do = "request more GPUs, or give a smaller --gpus-per-node"
        raise UsageError(f"{flags} is less than the job's {wanted} GPUs per node", do=do)
    if counts or LEFT_OUT in own.values():
        return given
    default = _default(settings, placement.processes_per_node)
    return {**given, **default, **_both(given.get("gres"), default.get("gres"))}


def _default(settings: SlurmSettings, count: int) -> Flags:
    if settings.gpu_request == "none":
        return {}
    kind = f"{settings.gres_type}:" if settings.gres_type else ""
    if settings.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _both(other: str | None, gpus: str | None) -> Flags:
    """Generic resources besides GPUs, and the GPUs."""
    return {"gres": f"{other},{gpus}"} if other and gpus else {}


def _gpus(name: str, value: str) -> list[int]:
    """The numbers of GPUs in a flag's value, such as ``h100:8`` or, of ``gres``, ``gpu:h100:8,nvme``."""
    items = value.split(",") if name == "gres" else [f"gpu:{value}"]
    parts = [item.split("(")[0].split(":") for item in items]
    return [int(last) if (last := part[-1]).isdecimal() else 1 for part in parts if part[0] == "gpu"]


def completed_spec(spec: JobSpec, options: JobOptions, settings: SlurmSettings) -> JobSpec:
    """All flags in the order of the script, and the fields of the specification that they set. Raises UsageError."""
    own = {"account": settings.account, "partition": site_partition(settings, spec.gpu_type if spec.gpus else CPU)}
    flags_of_site = {name: value for name, value in settings.flags.items() if spec.gpus or name not in PER_GPU}
    site = {**{name: value for name, value in own.items() if value}, **flags_of_site}
    problems = [*flag_problems(requested_flags(on_top(site, options.flags)))]
    chosen = on_top(dict(_defaults(spec)), site, options.flags)
    if chosen.get("dependency"):
        # Otherwise a job whose dependency can never be satisfied waits forever.
        chosen = on_top({"kill-on-invalid-dep": "yes"}, chosen)
    if problems:
        raise UsageError(f"this job cannot be requested:{itemized(problems)}")
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
    """Nodes that have to lie in one NVLink domain: the largest divisor of ``nodes`` that fits one."""
    return max(size for size in range(1, domain_nodes + 1) if nodes % size == 0)
