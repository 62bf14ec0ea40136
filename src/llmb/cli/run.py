# SPDX-License-Identifier: Apache-2.0
"""``llmb run``."""

import os
import shlex
import sys
from dataclasses import replace
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request
from llmb.catalogue.unspecified import OPEN_CHOICES
from llmb.cli.common import is_verbose
from llmb.cli.json_option import Json
from llmb.cli.messages import print_unspecified, say
from llmb.cli.options import recipe_options, record_options, takes
from llmb.cli.progress import RunProgress
from llmb.cli.repeated_run import print_order, requests_of, run_several
from llmb.cli.result import print_result
from llmb.cli.root import install_here
from llmb.errors import UsageError
from llmb.jobs.local_run import LocalRun, plan_here
from llmb.options.option import arguments_of
from llmb.report.output import print_json, print_table, print_text
from llmb.report.plan_report import plan_document, plan_table, start_lines
from llmb.report.table import plain_lines
from llmb.runs.checkpoint_scales import scale_warnings
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(recipe_options(), record_options(Choices))
def run(
    request: Request,
    choices: Choices,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the command, run nothing.")] = False,
    repeats: Annotated[
        int,
        typer.Option("-r", "--repeats", min=1, help="Runs of each recipe.", rich_help_panel="Selection"),
    ] = 1,
    start_new: Annotated[bool, typer.Option("--new", help="Run again what --label would leave out.")] = False,
    json: Json = False,
    *,
    ctx: typer.Context,
) -> None:
    """Train on this machine, now, with a progress bar, and print the result.

    `--repeats`, and sizes or dtypes with commas between them, are run in turn; with `--label` the same command runs
    what is missing.

    Results are saved below $LLMB_INSTALL (default ~/.llmb): the log, every step in metrics.jsonl, and run.json with
    the complete settings of the run.

    Examples:

    - `llmb run -w pretrain_llama3.1 -s tiny`

    - `llmb run -w pretrain_nemotron4 -s tiny --scale 2 --steps 20 --json`

    - `llmb run -w pretrain_llama3.1 -s 8b --scale 1 --gpu-type h100 --dry-run`

    - `llmb run -w pretrain_llama3.1 -s tiny --save-checkpoint`

    - `llmb run -w pretrain_llama3.1 -s tiny --profile`

    - `llmb run -w pretrain_llama3.1 -s tiny --dtype fp32,bf16 --repeats 5 --label before`
    """
    if start_new and choices.label is None:
        raise UsageError("--new has no effect without --label: every run is new", do="leave it out, or add --label")
    catalogue, install, requests = Catalogue(), install_here(), requests_of(request)
    if len(requests) * repeats > 1:
        locals_ = [plan_here(catalogue, one, choices, os.environ, install) for one in requests]
        if dry_run:
            print_order(locals_, repeats, json=json)
        else:
            run_several(locals_, repeats, start_new=start_new, json=json)
        return
    local = plan_here(catalogue, request, choices, os.environ, install)
    if dry_run:
        if local.missing:
            say(f"warning: {local.missing.warning}")
        _print_plan(local, _same_run(request, choices, local.plan), json=json)
        return
    _run_one(local, ctx, json=json)


def _run_one(local: LocalRun, ctx: typer.Context, *, json: bool) -> None:
    plan = local.plan
    local.check()
    for line in start_lines(plan):
        say(line)
    for warning in scale_warnings(plan):
        say(f"warning: {warning}")
    for line in local.beside():
        say(line)
    if plan.profile and plan.profile.reason:
        say(plan.profile.reason)
    if is_verbose(ctx):
        for line in plain_lines(plan_table(plan, (), {})):
            sys.stderr.write(f"{line}\n")
    with RunProgress(plan.steps, plan.first_step) as progress:
        folder, result = local.start(progress.step, say)
    print_result(folder, plan, result, local.label, json=json)


def _same_run(request: Request, choices: Choices, plan: EnginePlan) -> str:
    """A command that leaves nothing open, for the shell."""
    pinned = replace(request, **{name: getattr(plan.recipe, name) for name in OPEN_CHOICES})
    return shlex.join(["llmb", "run", *arguments_of(pinned), *arguments_of(choices)])


def _print_plan(local: LocalRun, same: str, *, json: bool) -> None:
    plan, (command, variables) = local.plan, local.sample()
    if json:
        print_json(plan_document(plan, same, command, variables))
    else:
        print_unspecified(plan.recipe.unspecified)
        print_table(plan_table(plan, command, variables))
        print_text(f"\nThe same run, with everything specified:\n{same}\n")
