# SPDX-License-Identifier: Apache-2.0
"""``llmb launch``."""

import os
import sys
from typing import Annotated, Any

import typer

from llmb.campaigns.job_request import job_options, job_request
from llmb.catalogue.load import Catalogue
from llmb.cli.campaign_options import DryRun, Yes
from llmb.cli.excluded import with_excluded
from llmb.cli.json_option import Json
from llmb.cli.options import given_of, takes, value_options
from llmb.cli.submit import submit_one
from llmb.reference_suite.variables import documented_variables, near_misses, read_launch

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

OPTIONS = value_options(
    (option for name, option in job_options().items() if name not in ("workload", "size")), envvar=False
)


@app.command()
@takes(OPTIONS)
def launch(
    values: dict[str, Any],
    workload: Annotated[str, typer.Argument(help="Workload; see 'llmb list'.")],
    ctx: typer.Context,
    size: Annotated[
        str | None,
        typer.Option("-s", "--model-size", "--size", help="Model size. Default: MODEL_SIZE, or the only one."),
    ] = None,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end and print the result.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Queue the run that the environment variables of the reference documents describe.

    JOB_TOTAL_GPUS, MODEL_SIZE, DTYPE, GPU_TYPE, MAX_STEPS, TP and the others: `llmb docs environment` lists all.
    A variable that is invalid or does not apply to the workload is an error, and a misspelled name is reported.
    Options of the command line override variables, and variables override cluster_config.yaml.

    Examples:

    - `JOB_TOTAL_GPUS=8 MODEL_SIZE=8b DTYPE=bf16 llmb launch pretrain_llama3.1 --dry-run`

    - `ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 GPU_TYPE=h100 llmb launch finetune_llama4-maverick --yes`
    """
    catalogue = Catalogue()
    for warning in near_misses(documented_variables(), os.environ):
        sys.stderr.write(f"llmb: warning: {warning}\n")
    given = with_excluded(given_of(ctx, values))
    given |= {"size": size} if size else {}
    wanted = read_launch(catalogue, job_options(), os.environ, workload, values, given)
    for note in wanted.notes:
        sys.stderr.write(f"llmb: note: {note}\n")
    submit_one(job_request(wanted.values, os.environ), dry_run=dry_run, wait=wait, yes=yes, json=json)
