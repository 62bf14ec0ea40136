# SPDX-License-Identifier: Apache-2.0
"""``llmb bench checkpoint``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.bench.checkpoint_bench import TrialRequest, check_trial, raise_if_different, run_trial, trial_file
from llmb.bench.records import MeasurementFile
from llmb.catalogue.resolve import Request
from llmb.cli.bench_jobs import command_line, save_and_show
from llmb.cli.common import Force, Json
from llmb.cli.options import recipe_options, takes, value_options
from llmb.cli.progress import RunProgress
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.jobs.local_run import LocalRun
from llmb.options.option import Option, build, options_of
from llmb.programs.engine.memory_check import check_memory
from llmb.report.bench_report import measurement_document, trial_tables
from llmb.report.output import print_output
from llmb.report.plan_report import start_lines
from llmb.runs.choices import Choices
from llmb.runs.profiling import Profiling

STEPS = 5
SET_HERE = frozenset(
    [
        *("window", "label", "save_checkpoint", "checkpoint_interval", "checkpoint_dir", "load_checkpoint"),
        *("no_verify_checkpoint", "no_resources", "resource_interval_s"),
        *options_of(Profiling),
    ]
)
"""Options of ``llmb run`` that this command has no use for, or decides itself."""
SAID_HERE: Mapping[str, Mapping[str, Any]] = {"steps": {"help": f"Steps before the checkpoint. Default: {STEPS}."}}
OF_RUNS: dict[str, Option] = {
    name: replace(option, **SAID_HERE.get(name, {}))
    for name, option in options_of(Choices).items()
    if name not in SET_HERE
}


@takes(recipe_options(), value_options(OF_RUNS.values()))
def checkpoint(
    request: Request,
    values: dict[str, Any],
    path: Annotated[
        Path, typer.Option("--path", metavar="FOLDER", help="Folder on the file system to measure; it has to exist.")
    ],
    after: Annotated[
        int, typer.Option("--after", min=1, help="Steps after the checkpoint, which the resumed run repeats.")
    ] = STEPS,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the checkpoint in the end.")] = False,
    nodes: Annotated[int | None, typer.Option("--nodes", hidden=True)] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Train, save, kill, resume: whether the training goes on as it was, and how fast it is saved and loaded.

    Trains on this machine, saves a checkpoint in a new folder below --path, trains on, and kills all ranks. A second
    run with the same layout resumes from the checkpoint and repeats the steps: on a CPU, losses and gradient norms
    have to be equal to the bit. Reports seconds and GB/s of each rank for saving and for loading; before loading, the
    files are taken out of the page cache, and the result says if that was not possible.

    Takes the options of 'llmb run' for recipe, layout and training. Nothing but the new folder is changed below
    --path, and it is removed in the end.

    Exit codes: 0 the steps are equal, 4 they differ, or a run failed.

    Examples:

    - `llmb bench checkpoint -w pretrain_llama3.1 -s tiny --path /scratch`

    - `llmb bench checkpoint -w pretrain_llama3.1 -s 8b --scale 8 --path /lustre/me --steps 3 --after 3 --json`
    """
    if nodes is not None:
        raise _needs_two_jobs(request, path, after)
    install = install_here()
    wanted = TrialRequest(
        request=request,
        choices=build(Choices, values),
        before=values["steps"] or STEPS,
        after=after,
        place=path.absolute(),
        install=install,
        keep=keep,
        command=command_line(),
    )
    local = check_trial(wanted)
    check_memory(local.plan, say, force=force)
    _say_before(local, wanted)
    with RunProgress(wanted.before + after) as progress:
        trial = run_trial(wanted, local, progress.step, say)
    measured = trial_file(trial)
    assert measured.checkpoint is not None
    (kept,) = save_and_show(install, [measured], lambda: _show(measured, json=json))
    say(f"saved to {kept}")
    raise_if_different(measured.checkpoint)


def _say_before(local: LocalRun, wanted: TrialRequest) -> None:
    counted = local.plan.model_copy(update={"steps": wanted.before + wanted.after})
    for line in (*start_lines(counted), *local.beside()):
        say(line)


def _show(measured: MeasurementFile, *, json: bool) -> None:
    print_output(measurement_document(measured) if json else trial_tables(measured))


def _needs_two_jobs(request: Request, path: Path, after: int) -> UsageError:
    recipe = f"-w {request.workload} -s {request.size}"
    first = f"llmb submit {recipe} --checkpoint-dir {path} --checkpoint-interval 20 --steps {40 + after}"
    second = f"llmb submit {recipe} --load-checkpoint CHECKPOINT --no-verify-checkpoint --steps {after}"
    return UsageError(
        "this measures on this machine; between nodes it is two jobs",
        do=f"'{first}', then 'llmb jobs cancel' once a checkpoint is there; then '{second}': 'llmb result' shows "
        "seconds and GB/s of both, and each run's metrics.jsonl the losses",
    )
