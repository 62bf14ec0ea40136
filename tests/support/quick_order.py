# SPDX-License-Identifier: Apache-2.0
"""Jobs that go the whole way through Slurm, with a line of shell in place of the workers."""

from dataclasses import dataclass, replace
from pathlib import Path

from fake_steps import step_of

from llmb.catalogue.catalogue import Catalogue, job_defaults
from llmb.jobs.order import Order
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import RUN_FOLDER, JobSpec
from llmb.launch.site.site import Site
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.steps import Step, step_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickOrder(Order):
    """``shell`` runs in place of the workers; it finds the run folder in $0 and ten steps' lines in $1."""

    shell: str
    steps_file: str

    def spec(self, folder: RunFolder) -> JobSpec:
        work = ("sh", "-c", self.shell, RUN_FOLDER, self.steps_file)
        return Order.spec(self, folder).model_copy(update={"work": work})


def quick_order(template: Order, shell: str, folder: Path, **changes: object) -> QuickOrder:
    """``changes`` are those of JobOptions."""
    steps_file = folder / "ten_steps.jsonl"
    steps_file.write_text("".join(f"{step_to_json(step(number))}\n" for number in range(10)))
    return QuickOrder(
        plan=template.plan,
        defaults=template.defaults,
        options=replace(template.options, start="task-per-gpu", **changes),
        site=template.site,
        shell=shell,
        steps_file=str(steps_file),
    )


def step(number: int, step_time_s: float = 0.05) -> Step:
    """Ten of them take less time than a job of one command: their sum must not exceed what passed by the clock."""
    return step_of(number, step_time_s, tokens=8)


def spec_of(plan: Plan, install: Path) -> JobSpec:
    """What a submission of ``plan`` writes, on a cluster without settings."""
    defaults = job_defaults(Catalogue(), plan.recipe)
    return Order(plan=plan, defaults=defaults, options=JobOptions(), site=Site(install=install)).sample()
