# SPDX-License-Identifier: Apache-2.0
"""Plans and batch scripts at the renderer's level, also of recipes that the engine cannot train."""

from pathlib import Path

from llmb.catalogue.job_defaults import find_fabric, job_defaults
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Window
from llmb.catalogue.resolve import Request, resolve
from llmb.launch.cluster_config import ClusterConfig
from llmb.launch.site import Site
from llmb.launch.slurm.options import SlurmOptions, job_flags, shell_gpus_per_node
from llmb.launch.slurm.render import render
from llmb.launch.slurm.script import BatchJob
from llmb.launch.slurm.submission import Order
from llmb.runs.folder import RunFolder, experiment_name, run_parent
from llmb.runs.plan import Plan

INSTALL = Path("/lustre/bench")
PYTHON = "/lustre/bench/venv/bin/python"
CATALOGUE = Catalogue()


def plan_of(request: Request) -> Plan:
    """Past the engine's own checks: a batch script says nothing of what is computed."""
    return Plan(
        recipe=resolve(CATALOGUE, request),
        device="cpu" if request.gpu_type == "cpu" else "cuda",
        steps=50,
        window=Window(first=35, last=44, rule="auto"),
        seed=1234,
        recompute="none",
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
    install: Path = INSTALL,
) -> Order:
    plan, shell = plan_of(request), shell or {}
    settings = ClusterConfig.model_validate(config or {})
    fabric = find_fabric(CATALOGUE, settings.fabric) if settings.fabric else None
    options = SlurmOptions(
        flags=job_flags(flags or {}, slurm_args, shell),
        variables=variables or {},
        gpus_per_node=shell_gpus_per_node(shell),
        start=start,
        python=PYTHON,
    )
    site = Site(install=install, config=settings, fabric=fabric, shell=shell)
    return Order(plan=plan, defaults=job_defaults(CATALOGUE, plan.recipe), options=options, site=site)


def folder_of(order: Order) -> RunFolder:
    name = experiment_name(order.plan)
    return RunFolder(run_parent(order.site.install, order.plan) / f"{name}_1700000000" / name)


def script_of(order: Order) -> str:
    return render(order.plan, order.defaults, order.options, order.site, folder_of(order))


def job_of(order: Order) -> BatchJob:
    return order.job(folder_of(order))
