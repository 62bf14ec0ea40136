# SPDX-License-Identifier: Apache-2.0
"""``llmb run``."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request
from llmb.catalogue.unspecified import OPEN_CHOICES
from llmb.cli.common import is_verbose
from llmb.cli.json_option import Json
from llmb.cli.messages import print_unspecified, say
from llmb.cli.options import recipe_options, record_options, takes
from llmb.cli.progress import RunProgress
from llmb.cli.result import print_result
from llmb.jobs.local_run import local_spec, run_here
from llmb.options.option import arguments_of
from llmb.programs.engine.here import check_here
from llmb.programs.engine.nsys import with_profiler
from llmb.report.output import print_json, print_table, print_text
from llmb.report.run_report import plan_document, plan_table, start_lines
from llmb.report.table import plain_lines
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.choices import Choices
from llmb.runs.device import Device
from llmb.runs.disk_space import check_space
from llmb.runs.folder import RunFolder, create_run_folder, experiment_name, install_root, run_parent
from llmb.runs.plan import EnginePlan, make_plan
from llmb.schedulers.local.command import local_command, local_variables
from llmb.site.machine import check_machine, recipe_for, this_machine

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(recipe_options(), record_options(Choices))
def run(
    request: Request,
    choices: Choices,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the command, run nothing.")] = False,
    json: Json = False,
    *,
    ctx: typer.Context,
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
    install = install_root(os.environ, Path.cwd())
    if dry_run:
        _print_plan(plan, install, machine.cores, _same_run(request, choices, plan), json=json)
        return
    check_machine(plan, machine)
    check_here(open_plan)
    check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else run_parent(install, plan))
    if plan.profile and plan.profile.reason:
        say(plan.profile.reason)
    if is_verbose(ctx):
        for line in plain_lines(plan_table(plan, (), {})):
            sys.stderr.write(f"{line}\n")
    _run(plan, create_run_folder(install, plan), install, machine.cores, json=json)


def _same_run(request: Request, choices: Choices, plan: EnginePlan) -> str:
    """A command that leaves nothing open, for the shell."""
    pinned = replace(request, **{name: getattr(plan.recipe, name) for name in OPEN_CHOICES})
    return shlex.join(["llmb", "run", *arguments_of(pinned), *arguments_of(choices)])


def _print_plan(plan: EnginePlan, install: Path, cores: int, same: str, *, json: bool) -> None:
    folder = RunFolder(run_parent(install, plan) / "SECONDS" / experiment_name(plan))
    spec = local_spec(plan, install, os.environ, folder)
    command, variables = local_command(spec, folder), local_variables(spec, cores, os.environ)
    if json:
        print_json(plan_document(plan, same, command, variables))
    else:
        print_unspecified(plan.recipe.unspecified)
        print_table(plan_table(plan, command, variables))
        print_text(f"\nThe same run, with everything specified:\n{same}\n")


def _run(plan: EnginePlan, folder: RunFolder, install: Path, cores: int, *, json: bool) -> None:
    for line in start_lines(plan):
        say(line)
    spec = local_spec(plan, install, os.environ, folder)
    variables = local_variables(spec, cores, os.environ)
    with RunProgress(plan.steps, plan.first_step) as progress:
        result = run_here(plan, spec, folder, install, variables, progress.step, say)
    print_result(folder, plan, result, json=json)
