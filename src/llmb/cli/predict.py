# SPDX-License-Identifier: Apache-2.0
"""``llmb predict``."""

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.cli.common import Json
from llmb.cli.options import record_options, request_of, selection_options, takes
from llmb.cli.root import install_here, print_unspecified, say
from llmb.errors import UsageError
from llmb.input_files import read_text_file
from llmb.missing import Missing
from llmb.options.option import options_of
from llmb.predict.memory import estimate, why_not_estimated, with_whole_parameters
from llmb.predict.prediction import Calibration, Measured, calibrate, default_calibration
from llmb.predict.prediction import predict as predict_plan
from llmb.predict.rows import predict_rows
from llmb.report.output import print_json, print_tables, print_text
from llmb.report.predict_report import Foreseen, predict_document, predict_tables, rows_csv, rows_document
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
Hardware = Annotated[
    Path | None,
    typer.Option("--hardware", metavar="FILE", help="GPU types that the catalogue lacks, in the form of its own file."),
]


Calibrate = Annotated[
    str | None, typer.Option("--calibrate", metavar="RUN", help="A run of yours, of the same GPU type and dtype.")
]


@app.command()
@takes(selection_options(options_of(Request).values()), record_options(Choices))
def predict(
    values: dict[str, Any],
    choices: Choices,
    calibrate_with: Calibrate = None,
    hardware: Hardware = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A CSV file with a recipe and sizes in each line; prints one."),
    ] = None,
    json: Json = False,
) -> None:
    """How long a training step will take, and why, before anything is queued.

    From the sizes of the model's parts, the layout, and the rates that GPUs and links attain, in milliseconds and
    without a GPU. Rates were fitted to published steps on H100; the interval says how far off held-out ones were. A
    run of your own makes it narrower, best a small one of the same recipe.

    A file has the columns workload, size, dtype, gpu_type, scale, release, gpus, tp, pp, vp, cp, ep, etp, mbs, gbs,
    seq_len, layers, first_stage_layers and last_stage_layers, of which all but the first two may be missing or empty.

    Examples:

    - `llmb predict -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100`

    - `llmb predict -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --tp 8 --pp 16 --vp 4`

    - `llmb predict -w pretrain_llama3.1 -s 8b --scale 512 --gpu-type h100 --calibrate latest --json`

    - `llmb predict --file layouts.csv > predicted.csv`
    """
    catalogue = Catalogue(hardware=hardware)
    if file is not None:
        given = {**values, "calibrate": calibrate_with}
        if asked := [name for name, value in given.items() if value not in (None, False)]:
            what = f"--{asked[0].replace('_', '-')} and --file exclude each other"
            raise UsageError(what, do="leave one of them out")
        _predict_file(catalogue, file, json=json)
        return
    request = request_of(values)
    plan = _plan(resolve(catalogue, request), choices, catalogue)
    calibration = _calibration(catalogue, calibrate_with, plan)
    gpu = catalogue.gpus[plan.recipe.gpu_type]
    found = predict_plan(plan, gpu, calibration, catalogue.rates.errors)
    reason = why_not_estimated(plan)
    foreseen = Foreseen(found, Missing(reason) if reason else estimate(plan))
    if json:
        print_json(predict_document(foreseen))
    else:
        print_unspecified(plan.recipe.unspecified)
        print_tables(predict_tables(foreseen))


def _plan(recipe: Recipe, choices: Choices, catalogue: Catalogue) -> EnginePlan:
    if recipe.gpu_type not in catalogue.gpus:
        raise UsageError("nothing is predicted of a CPU", choices=catalogue.gpus, do="give a GPU type with --gpu-type")
    plan = make_plan(recipe, choices, device="cuda")
    return plan if choices.parallelism.dp_sharding else with_whole_parameters(plan)


def _predict_file(catalogue: Catalogue, path: Path, *, json: bool) -> None:
    try:
        lines = list(csv.DictReader(read_text_file(path).decode().splitlines(), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"not a CSV file: {error}", where=str(path)) from error
    rows = predict_rows(catalogue, lines, default_calibration(catalogue.rates))
    if json:
        print_json(rows_document(rows))
    else:
        print_text(rows_csv(rows))


def _calibration(catalogue: Catalogue, selector: str | None, plan: EnginePlan) -> Calibration:
    usual = default_calibration(catalogue.rates)
    if selector is None:
        return usual
    from llmb.analysis.find_runs import find_runs  # takes longer to load than a prediction may take

    run = find_runs(selector, install_here(), say).runs[-1]
    if run.recipe is None or run.step_time_s is None or run.recipe.gpu_type not in catalogue.gpus:
        raise UsageError(f"run {run.id} is of no known recipe on a GPU", do="calibrate with a run of llmb on GPUs")
    trained = run.record.plan if run.record else None
    known = trained if isinstance(trained, EnginePlan) else make_plan(run.recipe, Choices(), device="cuda")
    measured = Measured(f"run {run.id}", known, run.step_time_s.mean)
    return calibrate(measured, plan, catalogue.gpus[run.recipe.gpu_type], usual)
