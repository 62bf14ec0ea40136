# SPDX-License-Identifier: Apache-2.0
"""``llmb launch``."""

import os
import sys
from typing import Annotated, Any

import typer

from llmb.campaigns.expansion import split_model, told
from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import find_workload, releases_of, sizes_of
from llmb.catalogue.variables import Reading, near_misses, read_variables
from llmb.cli.campaign_run import DryRun, Yes
from llmb.cli.framework_options import framework_options
from llmb.cli.job_options import converted, given_of, job_request, values_of
from llmb.cli.json_option import Json
from llmb.cli.options import recipe_options, takes
from llmb.cli.slurm_options import slurm_options
from llmb.cli.submit import queue_one
from llmb.cli.training_options import training_options
from llmb.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

OPTIONS = values_of(
    recipe_options, training_options, slurm_options, framework_options, without=("workload", "size"), plain=True
)


@app.command()
@takes(OPTIONS)
def launch(
    values: dict[str, Any],
    workload: Annotated[str, typer.Argument(help="What is trained; see 'llmb list'.")],
    ctx: typer.Context,
    size: Annotated[
        str | None,
        typer.Option("-s", "--size", "--model-size", help="Model size. Default: MODEL_SIZE, or the only one."),
    ] = None,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end and print the result.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Queue the run that environment variables describe, with the names that the source documents give them.

    JOB_TOTAL_GPUS, MODEL_SIZE, DTYPE, GPU_TYPE, MAX_STEPS, TP and the others: docs/reference/environment.md has all of
    them. A variable that does not apply to the workload, or has a bad value, is refused; one whose name is almost right
    is told of. Options of the command line come first, and cluster_config.yaml last.

    Examples:

    - `JOB_TOTAL_GPUS=8 MODEL_SIZE=8b DTYPE=bf16 llmb launch pretrain_llama3.1 --dry-run`

    - `ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 GPU_TYPE=h100 llmb launch finetune_llama4-maverick --yes`
    """
    catalogue = Catalogue()
    name, own_size = split_model(catalogue, workload)
    given = {**given_of(ctx, values), **({"size": size or own_size} if size or own_size else {})}
    for warning in near_misses(catalogue.variables, os.environ):
        sys.stderr.write(f"llmb: warning: {warning}\n")
    reading = read_variables(catalogue.variables, os.environ, name, given, framework=bool(values["framework"]))
    for note in reading.notes:
        sys.stderr.write(f"llmb: note: {note}\n")
    options = {**values, **_options_of(reading), **given, "workload": name}
    options["size"] = options.get("size") or _only_size(catalogue, name)
    if options["scale"] is None:
        raise UsageError("how many GPUs the job gets is not said", do="set JOB_TOTAL_GPUS, or give --scale")
    environ = {**os.environ, **({"LLMB_INSTALL": reading.install} if reading.install else {})}
    queue_one(job_request(options), environ, dry_run=dry_run, wait=wait, yes=yes, json=json)


def _options_of(reading: Reading) -> dict[str, Any]:
    """The options' values as the command line would have them. Raises UsageError with all that cannot be."""
    found, problems = {}, []
    for option, value in reading.options.items():
        try:
            found[option] = converted(option, (str(value).lower() if isinstance(value, bool) else str(value),))
        except UsageError as error:
            problems.append(f"{reading.origins[option]}: {told(error)}")
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UsageError(f"the environment asks for what cannot be done:\n{lines}", where="environment variables")
    return found


def _only_size(catalogue: Catalogue, name: str) -> str:
    """The size that the documents have, where it is one. Raises UsageError."""
    workload = find_workload(catalogue, name)
    sizes = [size for size in sizes_of(workload) if releases_of(workload, size)]
    if len(sizes) != 1:
        raise UsageError(f"which size of {name} is not said", choices=sizes, do="set MODEL_SIZE, or give --size")
    return sizes[0]
