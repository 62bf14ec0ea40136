# SPDX-License-Identifier: Apache-2.0
"""Specifies the job of a run on this machine."""

import sys
from collections.abc import Mapping
from pathlib import Path

from llmb.launch.jobspec.job_options import Binding, FrameworkOptions
from llmb.launch.jobspec.spec import JobSpec, Placement, layered
from llmb.launch.programs.port import ProgramRequest, find_program
from llmb.launch.site.site import Site
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.record import ENGINE, LOCAL


def local_spec(
    plan: EnginePlan,
    install: Path,
    environ: Mapping[str, str],
    folder: RunFolder,
    framework: FrameworkOptions | None = None,
) -> JobSpec:
    """Return the specification of a job that runs ``plan`` on this machine in ``folder``, which need not exist."""
    options = framework or FrameworkOptions()
    program = find_program(options.framework or ENGINE)
    site = Site(install=install, shell=environ)
    request = ProgramRequest(
        choices=Choices(), options=options, site=site, variables=frozenset(environ), gpus_per_node=plan.processes
    )
    work = program.work(plan, request, folder)
    return JobSpec(
        scheduler=LOCAL,
        program=program.name,
        title=f"{plan.recipe.title()}, by llmb{work.title}",
        name=folder.name,
        placement=Placement(1, plan.processes, whole_nodes=False),
        gpus=plan.device == "cuda",
        binding=Binding(),
        time_limit_min=None,
        start="torchrun",
        variables=layered([work.variables], {}, ()),
        python=sys.executable,
        work=work.command,
        log=folder.log.name,
    )
