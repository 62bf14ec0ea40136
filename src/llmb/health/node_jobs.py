# SPDX-License-Identifier: Apache-2.0
"""A check of several nodes: a job for each of them, so that none waits for another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmb.errors import UsageError
from llmb.health.kept_checks import CheckFolder
from llmb.jobspec.arguments import PYTHON
from llmb.jobspec.options import JobOptions
from llmb.jobspec.placement import Placement
from llmb.jobspec.spec import JobSpec
from llmb.jobspec.variables import VariableLayer, layered
from llmb.runs.folder import CLUSTER_CONFIG, cannot_write, write_atomically
from llmb.schedulers.port import AskedJob, NodeState, Scheduler
from llmb.site.site import Site

PROGRAM = "doctor"
OF_RUNS = frozenset(["nodelist", "exclude", "array", "dependency", "segment", "signal", "begin", "requeue"])
"""Flags that a shell may have set for training jobs, and that a check decides itself or has no use for."""
MOST_REJECTED = 3
"""Nodes in a row, from the first on, after which a rejection is taken for one of all jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """How nodes are asked for."""

    scheduler: Scheduler
    site: Site
    options: JobOptions
    time_limit_min: int

    def spec(self, folder: CheckFolder, node: str, state: NodeState) -> JobSpec:
        """Raises UsageError if the job is not possible."""
        site, config, own = self.site, self.site.config, folder.job(node)
        variables = {"LLMB_INSTALL": str(site.install), "PYTHONUNBUFFERED": "1"}
        given = [VariableLayer(CLUSTER_CONFIG, config.environment), VariableLayer("doctor", variables)]
        spec = JobSpec(
            scheduler=self.scheduler.name,
            program=PROGRAM,
            title=f"check of {node} by llmb doctor",
            name="llmb-doctor",
            placement=Placement(1, state.gpus or 1, whole_nodes=True),
            gpus=bool(state.gpus),
            node=node,
            time_limit_min=self.time_limit_min,
            start="once",
            variables=layered((), site.shell, given),
            modules=config.modules,
            profiles=config.profiles,
            prolog=config.prolog,
            python=config.python or self.options.python,
            work=(PYTHON, "-P", "-m", "llmb.health.node_task", str(folder.path), node),
            log=own.log.name,
        )
        flags = {name: value for name, value in self.options.flags.items() if name not in OF_RUNS}
        done = self.scheduler.completed(spec, replace(self.options, flags=flags), site)
        if "partition" in flags or not state.partitions or done.flags.get("partition") in state.partitions:
            return done
        elsewhere = {**flags, "partition": state.partitions[0]}
        return self.scheduler.completed(spec, replace(self.options, flags=elsewhere), site)

    def script(self, folder: CheckFolder, node: str, state: NodeState) -> str:
        """Raises UsageError if the job is not possible."""
        return self.scheduler.script(self.spec(folder, node, state), folder.job(node))

    def submit(self, folder: CheckFolder, node: str, state: NodeState, environ: Mapping[str, str]) -> AskedJob:
        """Raises UsageError if the job is rejected, InfrastructureError if the scheduler does not answer."""
        spec, base = self.spec(folder, node, state), folder.job(node)
        script = self.scheduler.script(spec, base)
        try:
            base.path.mkdir(parents=True)
            write_atomically(base.batch_script, script)
        except OSError as error:
            raise cannot_write(base.path, error) from error
        submitted = self.scheduler.submit(spec, base, environ, again=False)
        return AskedJob(key=node, job_id=submitted.ids[None], base=base, array_index=None, live=True)


def submit_checks(
    order: CheckOrder,
    folder: CheckFolder,
    states: Mapping[str, NodeState],
    environ: Mapping[str, str],
    jobs: dict[str, AskedJob],
    on_node: Callable[[int], None],
) -> dict[str, str]:
    """Adds the job of each node to ``jobs``, which is complete whatever ends this; returns why others were rejected.

    Raises UsageError if none is accepted, and InfrastructureError.
    """
    rejected: dict[str, str] = {}
    for number, (node, state) in enumerate(states.items()):
        on_node(number)
        try:
            jobs[node] = order.submit(folder, node, state, environ)
        except UsageError as error:
            rejected[node] = error.what
            if not jobs and len(rejected) == min(MOST_REJECTED, len(states)):
                raise
    return rejected


def cancel_all(scheduler: Scheduler, jobs: Sequence[AskedJob]) -> None:
    """With one call for all. Raises what the scheduler raises."""
    if jobs:
        scheduler.cancel(jobs)
