# SPDX-License-Identifier: Apache-2.0
"""``llmb run``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request
from llmb.cli.install import install_here
from llmb.cli.json_option import Json
from llmb.cli.messages import say
from llmb.cli.options import record_options, takes
from llmb.cli.progress import RunProgress
from llmb.cli.result import print_result
from llmb.jobs.local_run import local_spec, run_here
from llmb.programs.engine.here import check_here
from llmb.programs.engine.nsys import with_profiler
from llmb.report.output import print_json, print_table
from llmb.report.run_report import plan_document, plan_table
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.checkpoint_scales import scale_warnings
from llmb.runs.choices import Choices
from llmb.runs.claim import create_run_folder
from llmb.runs.device import Device
from llmb.runs.disk_space import check_space
from llmb.runs.folder import RunFolder, experiment_name, run_parent
from llmb.runs.plan import EnginePlan, make_plan
from llmb.schedulers.local.command import local_command, local_variables
from llmb.site.machine import check_machine, recipe_for, this_machine

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(record_options(Request), record_options(Choices))
def run(
    request: Request,
    choices: Choices,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the command, run nothing.")] = False,
    json: Json = False,
) -> None:
    """Train on this machine, now, with a progress bar, and print the result.

    Results are saved below $LLMB_INSTALL (default ~/.llmb): the log, every step in metrics.jsonl, and run.json with
    the complete settings of the run.

    Examples:

    - `llmb run -w pretrain_llama3.1 -s tiny`

    - `llmb run -w pretrain_nemotron4 -s tiny --scale 2 --steps 20 --json`

    - `llmb run -w pretrain_llama3.1 -s 8b --scale 1 --gpu-type h100 --dry-run`

    - `llmb run -w pretrain_llama3.1 -s tiny --save-checkpoint`

    - `llmb run -w pretrain_llama3.1 -s tiny --profile`
    """
    catalogue, machine = Catalogue(), this_machine()
    recipe = recipe_for(catalogue, request, machine)
    checkpoint = read_checkpoint(Path(choices.load_checkpoint)) if choices.load_checkpoint else None
    device: Device = "cpu" if recipe.gpu_type == CPU else "cuda"
    open_plan = make_plan(recipe, choices, device=device, checkpoint=checkpoint)
    plan = with_profiler(open_plan)
    install = install_here()
    if dry_run:
        _print_plan(plan, install, machine.cores, json=json)
        return
    for warning in scale_warnings(plan):
        say(f"warning: {warning}")
    check_machine(plan, machine)
    check_here(open_plan)
    check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else run_parent(install, plan))
    if plan.profile and plan.profile.reason:
        say(plan.profile.reason)
    _run(plan, create_run_folder(install, plan), install, machine.cores, json=json)


def _print_plan(plan: EnginePlan, install: Path, cores: int, *, json: bool) -> None:
    folder = RunFolder(run_parent(install, plan) / "SECONDS" / experiment_name(plan))
    spec = local_spec(plan, install, os.environ, folder)
    command, variables = local_command(spec, folder), local_variables(spec, cores, os.environ)
    if json:
        print_json(plan_document(plan, command, variables))
    else:
        print_table(plan_table(plan, command, variables))


def _run(plan: EnginePlan, folder: RunFolder, install: Path, cores: int, *, json: bool) -> None:
    spec = local_spec(plan, install, os.environ, folder)
    variables = local_variables(spec, cores, os.environ)
    with RunProgress(plan.steps, plan.first_step) as progress:
        result = run_here(plan, spec, folder, install, variables, progress.step, say)
    print_result(folder, plan, result, json=json)
