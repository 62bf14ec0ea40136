# SPDX-License-Identifier: Apache-2.0
"""The resources that a recipe requests from a scheduler."""

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Fabric, Recipe, Record
from llmb.errors import unknown


class JobVariable(Record):
    """An environment variable of a recipe's or a fabric's jobs, and who sets it."""

    name: str
    value: str
    source: str


class JobDefaults(Record):
    """Default resources of a recipe's job; the site and the user can override them."""

    time_limit_min: int
    time_limit_source: str
    gpus_per_node: int | None
    """None on a CPU: any number of processes fits a node."""
    nvlink_domain_nodes: int
    """Number of nodes whose GPUs NVLink connects."""
    variables: tuple[JobVariable, ...]
    vboost: int | None
    """What the published jobs asked for, on nodes that allow it; None for nothing."""
    vboost_source: str | None


def job_defaults(catalogue: Catalogue, recipe: Recipe) -> JobDefaults:
    """The catalogue's time limit and variables for ``recipe``, and the placement of its GPUs on nodes."""
    jobs = catalogue.workloads[recipe.workload].jobs
    limit = next(entry for entry in jobs.time_limits if entry.holds_for(recipe))
    variables = {
        name: JobVariable(name=name, value=value, source=entry.source)
        for entry in jobs.variables
        if entry.holds_for(recipe)
        for name, value in entry.variables.items()
    }
    gpu = catalogue.gpus.get(recipe.gpu_type)
    vboost = next((entry for entry in jobs.vboost if gpu and entry.holds_for(recipe)), None)
    return JobDefaults(
        time_limit_min=limit.minutes,
        time_limit_source=limit.source,
        gpus_per_node=gpu.gpus_per_node if gpu else None,
        nvlink_domain_nodes=gpu.nvlink_domain_gpus // gpu.gpus_per_node if gpu else 1,
        variables=tuple(variables.values()),
        vboost=vboost.level if vboost else None,
        vboost_source=vboost.source if vboost else None,
    )


def find_fabric(catalogue: Catalogue, name: str) -> Fabric:
    if name not in catalogue.fabrics:
        raise unknown("fabric", name, catalogue.fabrics, do="see 'fabric' in cluster_config.yaml")
    return catalogue.fabrics[name]
