# SPDX-License-Identifier: Apache-2.0
"""``llmb run``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request
from llmb.cli.json_option import Json
from llmb.cli.options import record_options, takes
from llmb.cli.progress import RunProgress
from llmb.cli.result import print_result
from llmb.launch.command import local_command, local_variables
from llmb.launch.local_run import run_here
from llmb.launch.machine import check_machine, recipe_for, this_machine
from llmb.launch.nsys import with_profiler
from llmb.report.output import print_json, print_table
from llmb.report.run_report import plan_document, plan_table
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.choices import Choices
from llmb.runs.device import Device
from llmb.runs.disk_space import check_space
from llmb.runs.folder import RunFolder, create_run_folder, experiment_name, install_root, run_parent
from llmb.runs.plan import Plan, make_plan

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

    Results are kept below $LLMB_INSTALL (default ~/.llmb): the log, every step in metrics.jsonl, and run.json with
    everything that decided the run.

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
    plan = make_plan(recipe, with_profiler(choices, device), device=device, checkpoint=checkpoint)
    variables = local_variables(plan, machine.cores, os.environ)
    install = install_root(os.environ, Path.cwd())
    if dry_run:
        _print_plan(plan, install, variables, json=json)
    else:
        check_machine(plan, machine)
        check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else run_parent(install, plan))
        _run(plan, create_run_folder(install, plan), variables, json=json)


def _print_plan(plan: Plan, install: Path, variables: dict[str, str], *, json: bool) -> None:
    command = local_command(plan, RunFolder(run_parent(install, plan) / "SECONDS" / experiment_name(plan)))
    if json:
        print_json(plan_document(plan, command, variables))
    else:
        print_table(plan_table(plan, command, variables))


def _run(plan: Plan, folder: RunFolder, variables: dict[str, str], *, json: bool) -> None:
    with RunProgress(plan.steps, plan.first_step) as progress:
        result = run_here(plan, folder, variables, progress.step)
    print_result(folder, plan, result, json=json)
