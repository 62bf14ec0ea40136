# SPDX-License-Identifier: Apache-2.0
"""Plans and batch scripts at the renderer's level, also of recipes that the engine cannot train."""

from pathlib import Path

from llmb.catalogue.catalogue import Catalogue, find_fabric, job_defaults
from llmb.catalogue.records import Window
from llmb.catalogue.resolve import Request, resolve
from llmb.jobs.order import Order
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import JobSpec
from llmb.launch.scheduler_lookup import cluster_schema
from llmb.launch.scheduler_port import JobState
from llmb.launch.site.site import Site
from llmb.launch.slurm.client import controller_states
from llmb.launch.slurm.job_state import SlurmJob, with_meaning
from llmb.launch.slurm.request import job_flags, shell_gpus_per_node
from llmb.launch.slurm.script import batch_script, file_flags
from llmb.runs.choices import Choices, keeps_logits
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan

INSTALL = Path("/lustre/bench")
PYTHON = "/lustre/bench/venv/bin/python"
CATALOGUE = Catalogue()


def plan_of(request: Request) -> EnginePlan:
    """Past the engine's own checks: a batch script says nothing of what is computed."""
    recipe = resolve(CATALOGUE, request)
    return EnginePlan(
        recipe=recipe,
        device="cpu" if request.gpu_type == "cpu" else "cuda",
        steps=50,
        window=Window(first=35, last=44, rule="auto"),
        seed=1234,
        recompute="none",
        compiled=request.gpu_type != "cpu",
        keep_logits=keeps_logits(recipe),
        capacity_factor=recipe.capacity_factor,
        fp8_recipe=Choices().fp8_recipe_of(recipe),
    )


def order_of(
    request: Request,
    *,
    flags: dict[str, str | None] | None = None,
    slurm_args: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    shell: dict[str, str] | None = None,
    config: dict[str, object] | None = None,
    start: str | None = None,
    retries: int | None = None,
    install: Path = INSTALL,
) -> Order:
    plan, shell = plan_of(request), shell or {}
    settings = cluster_schema().model_validate(config or {})
    fabric = find_fabric(CATALOGUE, settings.fabric) if settings.fabric else None
    options = JobOptions(
        flags=job_flags(flags or {}, slurm_args, shell),
        variables=variables or {},
        gpus_per_node=shell_gpus_per_node(shell),
        start=start,
        retries=retries,
        python=PYTHON,
    )
    site = Site(install=install, config=settings, fabric=fabric, shell=shell)
    return Order(plan=plan, defaults=job_defaults(CATALOGUE, plan.recipe), options=options, site=site)


def folder_of(order: Order) -> RunFolder:
    parent, name = order.place()
    return RunFolder(parent / f"{name}_1700000000" / name)


def script_of(order: Order) -> str:
    folder = folder_of(order)
    return batch_script(order.spec(folder), folder)


def job_of(order: Order) -> JobSpec:
    """With all flags of its script, also those that name files."""
    folder = folder_of(order)
    spec = order.spec(folder)
    return spec.model_copy(update={"flags": {**spec.flags, **file_flags(folder)}})


def job_state(job_id: str) -> JobState:
    """What the controller says; unknown where it does not know the job."""
    return with_meaning(controller_states([job_id]).get(job_id, SlurmJob(job_id=job_id)))
