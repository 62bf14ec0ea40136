# SPDX-License-Identifier: Apache-2.0
"""The flags of a job: what follows from its specification, below the site's and the user's own. Pure."""

from collections.abc import Iterator

from llmb.catalogue.resolve import CPU
from llmb.errors import UsageError
from llmb.jobspec.options import Flags, JobOptions
from llmb.jobspec.spec import JobSpec
from llmb.schedulers.slurm.asked import array_indices
from llmb.schedulers.slurm.flags import GPU_FLAGS, asked, duration, flag_problems, minutes, on_top
from llmb.schedulers.slurm.gpu_request import gpu_request
from llmb.schedulers.slurm.partitions import site_partition
from llmb.schedulers.slurm.settings import SlurmSettings
from llmb.schedulers.slurm.steps import tasks_of


def completed_spec(spec: JobSpec, options: JobOptions, settings: SlurmSettings) -> JobSpec:
    """All flags in the order of the script, and the fields of the specification that they set. Raises UsageError."""
    own = {"account": settings.account, "partition": site_partition(settings, spec.gpu_type if spec.gpus else CPU)}
    site = {**{name: value for name, value in own.items() if value}, **settings.flags}
    chosen = on_top(dict(_defaults(spec)), site, options.flags)
    if chosen.get("dependency"):
        # Otherwise a job whose dependency can never be satisfied waits forever.
        chosen = on_top({"kill-on-invalid-dep": "yes"}, chosen)
    problems = list(flag_problems(asked(chosen)))
    if problems:
        raise UsageError("this job cannot be asked for:\n" + "\n".join(f"  - {problem}" for problem in problems))
    asking = settings.within(chosen.get("partition"))
    if options.gpu_request:
        asking = asking.model_copy(update={"gpu_request": options.gpu_request})
    flags: Flags = {
        "nodes": str(spec.placement.nodes),
        "ntasks-per-node": str(tasks_of(spec)),
        **(gpu_request(asking, spec.placement, chosen) if spec.gpus else {}),
        **asked({name: value for name, value in chosen.items() if not (spec.gpus and name in GPU_FLAGS)}),
    }
    array = flags.get("array")
    return spec.model_copy(
        update={
            "flags": dict(flags),
            "step_flags": settings.srun_flags,
            "array": tuple(array_indices(array)) if array else (),
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
    yield ("requeue" if spec.retries else "no-requeue"), None


def segment(nodes: int, domain_nodes: int) -> int:
    """Nodes that have to lie in one NVLink domain: the largest divisor of ``nodes`` that fits one."""
    return max(size for size in range(1, domain_nodes + 1) if nodes % size == 0)
