# SPDX-License-Identifier: Apache-2.0
"""``llmb run``."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request
from llmb.cli.options import (
    CheckpointDir,
    CheckpointInterval,
    DpShardingOption,
    DpShardSize,
    GradReduceDtypeOption,
    Json,
    LoadCheckpoint,
    PipelineScheduleOption,
    SaveCheckpoint,
    takes_recipe,
)
from llmb.cli.progress import RunProgress
from llmb.launch.command import local_command, local_variables
from llmb.launch.local_run import raise_unless_successful, run_here
from llmb.launch.machine import check_machine, recipe_for, this_machine
from llmb.report.output import print_json, print_table
from llmb.report.run_report import plan_document, plan_table, run_document, run_table
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.folder import RunFolder, create_run_folder, experiment_name, install_root, run_parent
from llmb.runs.parallelism import Parallelism
from llmb.runs.plan import DEFAULT_STALL_LIMIT_S, Plan, make_plan
from llmb.runs.space import check_space

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

TRAINING = "Training"
DEFAULT_STEPS = 50


@app.command()
@takes_recipe
def run(
    request: Request,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", help="Training steps. Default: 50; 1 with --load-checkpoint.", rich_help_panel=TRAINING
        ),
    ] = None,
    window: Annotated[
        str, typer.Option("--window", help="Steps to take statistics over: auto, last, all or A-B.")
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of initial values and data. Default: 1234.", rich_help_panel=TRAINING),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.", rich_help_panel=TRAINING)] = None,
    warmup_steps: Annotated[
        int | None, typer.Option("--warmup-steps", help="Warm-up of the learning rate.", rich_help_panel=TRAINING)
    ] = None,
    document_tokens: Annotated[
        int | None,
        typer.Option(
            "--document-tokens",
            help="Pack sequences from documents of N tokens on average. Default: as the recipe; LoRA packs.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    grad_reduce_dtype: GradReduceDtypeOption = None,
    recompute: Annotated[
        Literal["none", "selective", "full"],
        typer.Option("--recompute", help="Activation checkpointing.", rich_help_panel=TRAINING),
    ] = "none",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile the model's blocks with torch.compile.", rich_help_panel=TRAINING),
    ] = False,
    force_load_balancing: Annotated[
        bool,
        typer.Option(
            "--force-load-balancing",
            help="Give every expert as many tokens as any other, whatever the router says.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    dp_sharding: DpShardingOption = "full",
    dp_shard_size: DpShardSize = None,
    pipeline_schedule: PipelineScheduleOption = None,
    save_checkpoint: SaveCheckpoint = False,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_dir: CheckpointDir = None,
    load_checkpoint: LoadCheckpoint = None,
    stall_limit: Annotated[
        int,
        typer.Option(
            "--stall-limit",
            help="Seconds within which a run without progress is ended; 4 times as many before the first step, 12"
            " times while saving. 0: never.",
            rich_help_panel=TRAINING,
        ),
    ] = DEFAULT_STALL_LIMIT_S,
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
    """
    catalogue, machine = Catalogue(), this_machine()
    recipe = recipe_for(catalogue, request, machine)
    checkpoint = read_checkpoint(load_checkpoint) if load_checkpoint else None
    if steps is None:
        steps = 1 if checkpoint else DEFAULT_STEPS
    plan = make_plan(
        recipe,
        device="cpu" if recipe.gpu_type == CPU else "cuda",
        steps=steps,
        window=window,
        seed=seed,
        recompute=recompute,
        compiled=compiled,
        force_load_balancing=force_load_balancing,
        parallelism=Parallelism(
            dp_sharding=dp_sharding, dp_shard_size=dp_shard_size, pipeline_schedule=pipeline_schedule
        ),
        peak_lr=lr,
        warmup_steps=warmup_steps,
        grad_reduce_dtype=grad_reduce_dtype,
        document_tokens=document_tokens,
        save_checkpoint=save_checkpoint,
        checkpoint_interval=checkpoint_interval,
        checkpoint_dir=str(checkpoint_dir.absolute()) if checkpoint_dir else None,
        checkpoint=checkpoint,
        stall_limit_s=stall_limit,
    )
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
    if json:
        print_json(run_document(folder, plan, result))
    elif result.status == "success":
        print_table(run_table(plan, result))
        sys.stderr.write(f"kept in {folder.path}\n")
    raise_unless_successful(folder, result)
