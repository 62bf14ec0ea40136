# SPDX-License-Identifier: Apache-2.0
"""``llmb predict``, ``llmb plan`` and ``llmb memory``: time, layouts and memory of a run before it starts."""

import csv
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmb.base.errors import UsageError
from llmb.base.input_files import read_text_file
from llmb.base.missing import Missing
from llmb.base.options import options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import CPU, ModelRequest, Overrides, Request, resolve
from llmb.cli.common import Json
from llmb.cli.progress import PhaseProgress
from llmb.cli.root import install_here, print_for_recipe, say
from llmb.cli.shared_options import (
    catalogue_for,
    flags_of,
    recipe_options,
    record_options,
    request_of,
    selection_options,
    takes,
)
from llmb.launch.programs.engine.program import count_ranks
from llmb.prediction.memory import estimate, memory_of, settle_sharding, why_not_estimated
from llmb.prediction.prediction import (
    BRIDGE,
    LLMB,
    Calibration,
    MeasuredStep,
    Prediction,
    calibrate,
    default_calibration,
    predict_rows,
    predicted_seconds,
    unbalanced,
    usual_software,
)
from llmb.prediction.prediction import predict as predict_plan
from llmb.prediction.scale import Scaling, Scenario, goodput, scale_up
from llmb.prediction.scale import what_if as scenarios
from llmb.prediction.search import Goal, plan_to_search, predict_recipe, remedies, search_for, with_recipe
from llmb.reports.output import print_json, print_output
from llmb.reports.predict_report import (
    TRILLION,
    LayoutPlan,
    RunMemory,
    RunPrediction,
    campaign_text,
    left_out_text,
    rows_csv,
    rows_document,
)
from llmb.reports.table import Shown
from llmb.runs.choices import Choices
from llmb.runs.folder import new_file
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import ranks_to_count

if TYPE_CHECKING:
    from llmb.runs.analyzed_run import RunSet

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
Hardware = Annotated[
    Path | None, typer.Option("--hardware", metavar="FILE", help="GPU types to add or replace, as in hardware.yaml.")
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="RUN|FILE",
        help="Calibrate with this run (same GPU type and dtype), or with measurements by 'llmb bench': a file, or a"
        " node's folder. 'predict' also accepts a trace of the same layout.",
    ),
]
Layouts = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="Predict each line of this CSV file (columns above).")
]
WORK = ("gbs", "seq_len", "layers")
"""Sizes that define the work of a step; all other sizes define the layout."""
WITH_DEFAULTS = ("recompute", "gradient_sync")
"""Options that a search of layouts varies unless they are set, although they have default values."""
DECISIVE = ("recompute", "dp_sharding", "fp8_recipe")
"""Options that the short help shows, because they affect time and memory most."""
BESIDE_FILE = ("file", "hardware", "json", "output_file", "output")
"""Options that can be combined with ``--file``, whose lines contain the values of the recipes."""
Software = Annotated[
    str | None,
    typer.Option(
        "--software",
        help="Software that determines overlap and fusion: 'documents' (NeMo), 'megatron-bridge', 'llmb', "
        "'torchtitan', or 'plain', which has neither. Default: 'llmb' with --communication, 'megatron-bridge' for its "
        "releases, else 'documents'.",
    ),
]
AtScales = Annotated[
    Scaling | None,
    typer.Option("--scaling", help="Also predict larger scales: 'weak' scales the batch as well; 'strong' keeps it."),
]
GpuMtbf = Annotated[
    float | None,
    typer.Option("--gpu-mtbf-h", metavar="HOURS", min=1, help="Mean hours between failures of a GPU; adds goodput."),
]
Imbalance = Annotated[
    float | None,
    typer.Option("--imbalance", min=1, help="Tokens on the most loaded expert rank, relative to the mean. Default: 1."),
]
SaveTime = Annotated[float, typer.Option("--save-s", min=0, help="With --gpu-mtbf-h: seconds to save a checkpoint.")]
RestartTime = Annotated[
    float, typer.Option("--restart-s", min=0, help="With --gpu-mtbf-h: seconds from a failure to the next step.")
]
Price = Annotated[
    float | None, typer.Option("--price", min=0, help="Price of a GPU-hour; adds the price of training on --tokens.")
]
Tokens = Annotated[
    float | None,
    typer.Option(
        "--tokens", metavar="N", min=1, help="Training tokens for which days and cost are predicted. Default: 1e12."
    ),
]
FindRuns = Callable[[str], "RunSet"]
"""A function that returns the ended runs that an id, label or path selects."""


def find_here(selector: str) -> "RunSet":
    from llmb.jobs.find_runs import find_ended_runs  # slow to load, seldom needed

    return find_ended_runs(selector, install_here(), say)


@app.command()
@takes(selection_options(options_of(ModelRequest).values()), record_options(Choices, DECISIVE))
def predict(
    values: dict[str, Any],
    choices: Choices,
    calibrate_with: Calibrate = None,
    hardware: Hardware = None,
    file: Layouts = None,
    software: Software = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also predict step times with slow links, a slow GPU, or twice the GPUs.")
    ] = False,
    scaling: AtScales = None,
    gpu_mtbf_h: GpuMtbf = None,
    save_s: SaveTime = 60.0,
    restart_s: RestartTime = 600.0,
    imbalance: Imbalance = None,
    tokens: Tokens = None,
    price: Price = None,
    json: Json = False,
    *,
    ctx: typer.Context,
) -> None:
    """Predict the time of a training step, broken down by cause, before anything is queued.

    The prediction is computed from the sizes of the model's parts, the layout, and the rates of GPUs and links; it
    takes milliseconds and needs no GPU. Rates were fitted to published step times on H100 and Blackwell. The interval
    covers the errors on held-out steps or, if there are none, assumed errors. Calibrating with a run of your own,
    ideally a small one of the same recipe, narrows the interval.

    The CSV file for `--file` has the columns workload, size, dtype, gpu_type, scale, release, gpus, tp, pp, vp, cp, ep,
    etp, mbs, gbs, seq_len, layers, first_stage_layers and last_stage_layers; all but the first two may be missing or
    empty.

    Examples:

    - `llmb predict -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100`

    - `llmb predict -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --tp 8 --pp 16 --vp 4`

    - `llmb predict -w pretrain_llama3.1 -s 8b --scale 512 --gpu-type h100 --calibrate latest --json`

    - `llmb predict -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --scaling strong --gpu-mtbf-h 50000`

    - `llmb predict --file layouts.csv > predicted.csv`

    - `llmb predict --model-config config.json --scale 64 --gpu-type h100 --tp 8`
    """
    if file is not None:
        flags = {item.name: item.opts[-1].removesuffix("_argument") for item in ctx.command.params}
        if asked := ", ".join(flags[name] for name in flags_of(ctx, ctx.params) if name not in BESIDE_FILE):
            raise UsageError(f"{asked} cannot be combined with --file", do=f"omit {asked}, or omit --file")
        _predict_file(Catalogue(hardware=hardware), file, json=json)
        return
    request, further = request_of(values), FurtherGpus(scaling, gpu_mtbf_h, save_s, restart_s, what_if, tokens, price)
    catalogue = catalogue_for(request, hardware)
    found = predict_with(catalogue, request, choices, further, Basis(calibrate_with, software), imbalance=imbalance)
    _print(found.prediction.plan.recipe, found, json=json)


@dataclass(frozen=True, slots=True)
class FurtherGpus:
    """Options for further predictions: other scales, slower hardware, goodput with failures, and the cost of training
    on ``tokens`` at the ``price`` of a GPU hour."""

    scaling: Scaling | None = None
    gpu_mtbf_h: float | None = None
    save_s: float = 60.0
    restart_s: float = 600.0
    what_if: bool = False
    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if inf in (self.gpu_mtbf_h, self.save_s, self.restart_s, self.tokens, self.price):
            raise UsageError("tokens, price, and the times of failures and checkpoints must be finite")


@dataclass(frozen=True, slots=True)
class Basis:
    """The run, trace or measurements that calibrate predictions, and the software that they assume."""

    selector: str | None = None
    software: str | None = None


def predict_with(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    further: FurtherGpus,
    basis: Basis,
    find: FindRuns = find_here,
    imbalance: float | None = None,
) -> RunPrediction:
    """Predict a recipe's step and memory, and what ``further`` requests."""
    plan = unbalanced(_plan(resolve(catalogue, request), choices, catalogue), imbalance)
    predicted = _predictor(catalogue, basis, plan, find)
    found = predicted(plan)
    return RunPrediction(
        found,
        memory_of(plan, as_published=found.calibration.software == BRIDGE),
        scale_up(plan, further.scaling, predicted) if further.scaling else None,
        goodput(plan.recipe.scale, further.gpu_mtbf_h, further.save_s, further.restart_s)
        if further.gpu_mtbf_h
        else None,
        imbalance,
        _scenarios(catalogue, basis, plan, find) if further.what_if else (),
        further.tokens or TRILLION,
        further.price,
    )


def _scenarios(catalogue: Catalogue, basis: Basis, plan: EnginePlan, find: FindRuns) -> list[Scenario]:
    calibration = _calibration(catalogue, basis, plan, find)
    return scenarios(plan, catalogue.gpus[plan.recipe.gpu_type], calibration, catalogue.rates.errors)


def _print(recipe: Recipe, found: Shown, *, json: bool) -> None:
    print_for_recipe(recipe, found.to_dict() if json else found.tables())


def _plan(recipe: Recipe, choices: Choices, catalogue: Catalogue) -> EnginePlan:
    _check_gpu(recipe, catalogue)
    return settle_sharding(make_plan(recipe, choices, device="cuda", trains=False), choices.parallelism)


def _check_gpu(recipe: Recipe, catalogue: Catalogue) -> None:
    if recipe.gpu_type not in catalogue.gpus:
        raise UsageError("only steps on GPUs can be predicted", choices=catalogue.gpus, do="pass one with --gpu-type")


def _predict_file(catalogue: Catalogue, path: Path, *, json: bool) -> None:
    try:
        reader = csv.DictReader(read_text_file(path).decode("utf-8-sig").splitlines(), strict=True)
        lines, columns = list(reader), reader.fieldnames or ()
    except (csv.Error, UnicodeDecodeError) as error:
        do = "save the table as CSV in UTF-8, with values that contain commas or quotes in quotes"
        raise UsageError(f"the file is not valid CSV: {error}", where=str(path), do=do) from error
    if repeated := {name for name in columns if columns.count(name) > 1}:
        what = f"several columns are called {', '.join(sorted(repeated))}"
        raise UsageError(what, where=str(path), do="rename or remove all but one of them")
    rows = predict_rows(catalogue, lines)
    if json:
        print_json(rows_document(rows))
    else:
        print_output(rows_csv(rows))


def _predictor(
    catalogue: Catalogue, basis: Basis, plan: EnginePlan, find: FindRuns, *, searches: bool = False
) -> Callable[[EnginePlan], Prediction]:
    """Return a function that predicts plans, calibrated by ``basis``; with ``searches``, not by a trace."""
    calibration, gpu = _calibration(catalogue, basis, plan, find, searches), catalogue.gpus[plan.recipe.gpu_type]
    return lambda one: predict_plan(one, gpu, calibration, catalogue.rates.errors)


def _calibration(
    catalogue: Catalogue, basis: Basis, plan: EnginePlan, find: FindRuns, searches: bool = False
) -> Calibration:
    selector = basis.selector
    # Only llmb's engine has other ways to communicate.
    own = LLMB if plan.communication != Choices().communication else usual_software(plan.recipe)
    usual = default_calibration(catalogue.rates, basis.software or own)
    if selector is None:
        return usual
    # Imported here, because loading them takes longer than a prediction should.
    from llmb.nodes.bench.calibration import calibrate_with_bench
    from llmb.nodes.bench.measurements import measurements_at

    if files := measurements_at(Path(selector).expanduser()):
        gpu = catalogue.gpus[plan.recipe.gpu_type]
        return calibrate_with_bench(files, plan, gpu, catalogue.gpus.values(), usual)
    if traces := _traces_at(Path(selector).expanduser()):
        if searches:
            do = "pass a run or measurements of 'llmb bench', or use 'llmb predict'"
            raise UsageError("a trace calibrates only the layout that it was recorded with", do=do)
        return _calibrate_with_trace(catalogue, traces, plan, usual)
    try:
        runs = find(selector).runs
    except UsageError as error:
        more = ("measurements of 'llmb bench'", *(() if searches else ("a trace",)))
        choices = (*error.choices, *more) if error.choices else ()
        raise UsageError(error.what, where=error.where, choices=choices, do=error.do) from error
    if not runs:
        raise UsageError(f"no run in '{selector}' has ended", do="see 'llmb runs'")
    run = runs[-1]
    if run.recipe is None or run.recipe.gpu_type not in catalogue.gpus:
        raise UsageError(f"run {run.id} has no known recipe on a GPU", do="calibrate with a run of llmb on GPUs")
    trained = run.record.plan if run.record else None
    trained = trained if isinstance(trained, EnginePlan) else make_plan(run.recipe, Choices(), device="cuda")
    alone = run.record.result.pretended if run.record and run.record.result else None
    times = alone.compute_time_s if alone else run.step_time_s
    if times is None or isinstance(times, Missing):
        raise UsageError(f"run {run.id} has no step time", do="calibrate with a successful run")
    measured = MeasuredStep(f"run {run.id}", trained, times.mean, alone.pp_stage if alone else None)
    return calibrate(measured, plan, catalogue.gpus[run.recipe.gpu_type], usual)


def _traces_at(path: Path) -> list[Path]:
    from llmb.readers.profiles import NSYS_FOLDER, TORCH_FOLDER
    from llmb.readers.profiles.trace_files import JSON_ENDS, REPORT_END, SQLITE_END, find_traces

    is_trace = path.is_file() and path.name.endswith((*JSON_ENDS, SQLITE_END, REPORT_END))
    is_folder = path.is_dir() and path.resolve().name in (TORCH_FOLDER, NSYS_FOLDER)
    return find_traces([path]) if is_trace or is_folder else []


def _calibrate_with_trace(
    catalogue: Catalogue, traces: Sequence[Path], plan: EnginePlan, usual: Calibration
) -> Calibration:
    from llmb.prediction.trace_calibration import calibrate_with_trace
    from llmb.readers.profiles.breakdown import summarize
    from llmb.readers.profiles.trace_files import read_traces
    from llmb.runs.folder import RunFolder
    from llmb.runs.record import read_record

    folder = RunFolder(traces[0].resolve().parents[1])
    trained = read_record(folder).plan if folder.record.is_file() else None
    recorded = trained if isinstance(trained, EnginePlan) else None
    gpu, types = catalogue.gpus[plan.recipe.gpu_type], catalogue.gpus.values()
    return calibrate_with_trace(summarize(read_traces(traces)), recorded, plan, types, gpu, usual)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options for the goal of a search for layouts, and for its results."""

    goal: Annotated[
        Goal, typer.Option("--goal", help="'step': the fastest step; 'token': the cheapest token, also on fewer GPUs.")
    ] = "step"
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of layouts to list.")] = 10
    price: Price = None
    tokens: Tokens = None
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write the layouts as a campaign for 'llmb bulk'."),
    ] = None
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="With --output: number of runs of each layout.")] = 3
    max_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--max-memory-gib",
            metavar="GIB",
            min=1,
            help="Maximum memory of a rank in GiB, if lower than the GPU's. Default: no further limit.",
        ),
    ] = None

    def __post_init__(self) -> None:
        FurtherGpus(tokens=self.tokens, price=self.price)  # raises UsageError unless both are finite


@app.command()
@takes(recipe_options(), record_options(Choices, DECISIVE), SearchOptions)
def plan(
    request: ModelRequest,
    choices: Choices,
    wanted: SearchOptions,
    calibrate_with: Calibrate = None,
    hardware: Hardware = None,
    software: Software = None,
    json: Json = False,
    *,
    ctx: typer.Context,
) -> None:
    """Find the fastest layouts of a recipe before anything is queued.

    All valid layouts are searched: tensor, pipeline, virtual, context and expert parallel sizes, micro-batches,
    recomputation and sharding. Sizes that are specified, --recompute and --dp-sharding apply to every layout. Layouts
    that do not fit in memory, as estimated with a margin, are omitted. The others are listed by predicted step time
    or, with --goal token, by GPU time per token, followed by the layout of the recipe, which is compared with the first
    term by term. Offloading to the CPU is not searched. To measure the layouts, run them as a campaign (--output).

    Examples:

    - `llmb plan -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100`

    - `llmb plan -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100 --tp 8 --max-memory-gib 70`

    - `llmb plan -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100 --top 5 -o layouts.txt`

    - `llmb plan -w pretrain_llama3.1 -s 8b --scale 64 --gpu-type h100 --goal token --price 2.5`

    - `llmb plan --model-config config.json --scale 64 --gpu-type h100`
    """
    if wanted.output is not None and request.model_config:
        raise UsageError("a campaign cannot contain a model from a file", do="omit --output, or --model-config")
    basis, explicit = Basis(calibrate_with, software), flags_of(ctx, ctx.params)
    with PhaseProgress("searching"):
        found = plan_with(catalogue_for(request, hardware), request, choices, wanted, basis, explicit=explicit)
    _print(found.recipe, found, json=json)
    if wanted.output is not None:  # last, so that the result is not lost if the file cannot be written
        with new_file(wanted.output) as partial:
            partial.write_text(campaign_text(found, wanted.repeats))
        say(f"wrote {wanted.output}; 'llmb bulk {wanted.output} --dry-run' shows its jobs")


def plan_with(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    wanted: SearchOptions,
    basis: Basis,
    find: FindRuns = find_here,
    on_message: Callable[[str], None] = say,
    *,
    explicit: Container[str],
) -> LayoutPlan:
    """Search the layouts of a recipe, with predictions calibrated by ``basis``. ``explicit`` are the options that are
    set; the others in ``WITH_DEFAULTS`` are searched.

    Raise UsageError for an invalid recipe or calibration, for options that the search does not support, and if no
    layout fits and the recipe's is invalid."""
    sizes, parallelism = request.overrides.explicit(), choices.parallelism
    for problem in parallelism.sync_problems():
        raise UsageError(problem)
    work = {name: sizes.pop(name) for name in WORK if name in sizes}
    recipe = resolve(catalogue, replace(request, overrides=Overrides(**work)), check=False)
    _check_gpu(recipe, catalogue)
    start = plan_to_search(recipe, choices)
    unsupported = "the search needs sequence parallelism (--no-sequence-parallel disables it)"
    if why := why_not_estimated(start) or ("sequence_parallel" in sizes and unsupported):
        raise UsageError(f"layouts cannot be compared: {why}", do="avoid the options in parentheses")
    ways = {"recompute": choices.recompute, **parallelism.model_dump(), "max_memory_gib": wanted.max_memory_gib}
    searched = {name for name in WITH_DEFAULTS if name not in explicit}
    constraints = {**sizes, **{name: ways[name] for name in ways if ways[name] is not None and name not in searched}}
    predicted = _predictor(catalogue, basis, start, find, searches=True)
    on_message(f"searching the layouts of {recipe.title()}, which can take minutes")
    own = predict_recipe(recipe, choices, predicted)
    found = with_recipe(search_for(wanted.goal, start, predicted, constraints), own, constraints)
    layouts = found.fitting[: wanted.top]
    plans = LayoutPlan(
        wanted.goal, recipe, constraints, layouts, own, found.searched, found.left_out, wanted.price, wanted.tokens
    )
    if not layouts and isinstance(own, Missing):
        what = f"no layout fits: {left_out_text(plans)}; the layout of the recipe is left out: {own.reason}"
        raise UsageError(what, do="change --scale, --gbs or limits such as --tp")
    return plans


@app.command()
@takes(recipe_options(), record_options(Choices, DECISIVE))
def memory(
    request: ModelRequest,
    choices: Choices,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Count the memory of only this rank.")] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Count one rank of every pipeline stage.")] = False,
    estimated: Annotated[bool, typer.Option("--estimate", help="Estimate the memory without counting it.")] = False,
    hardware: Hardware = None,
    json: Json = False,
) -> None:
    """Count the memory, FLOPs and collectives of a rank in a training step, before anything is queued.

    The engine runs a step on this machine's CPU with tensors that have no values, which takes a minute or more. By
    default, only the ranks that may need the most memory are counted. `--estimate` computes their memory from the sizes
    of the model's parts, which takes milliseconds and is accurate to within a few percent. If the layout does not fit,
    up to three changes that should make it fit are listed with their cost.

    Examples:

    - `llmb memory -w pretrain_llama3.1 -s 8b --scale 8 --gpu-type h100`

    - `llmb memory -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --all-stages --json`

    - `llmb memory -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --estimate --recompute selective`

    - `llmb memory -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100 --tp 8 --recompute selective`

    - `llmb memory --model-config config.json --scale 8 --gpu-type h100 --estimate`
    """
    catalogue = catalogue_for(request, hardware)
    with PhaseProgress("counting"):
        found = count_memory(catalogue, request, choices, say, rank=rank, all_stages=all_stages, estimated=estimated)
    _print(found.recipe, found, json=json)


def count_memory(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    on_message: Callable[[str], None],
    *,
    rank: int | None,
    all_stages: bool,
    estimated: bool,
) -> RunMemory:
    """Return the memory of ranks; raise UsageError for a wrong recipe or rank, and the errors of ``count_ranks``."""
    recipe = resolve(catalogue, request)
    plan = make_plan(recipe, choices, device="cpu" if recipe.gpu_type == CPU else "cuda", trains=False)
    plan = settle_sharding(plan, choices.parallelism)
    ranks = ranks_to_count(recipe.layout, rank, all_stages=all_stages)
    if not estimated and (problem := recipe.engine_problem):
        on_message(f"{problem.partition(':')[0]}: the memory is estimated")
        estimated = True
    use = estimate(plan, ranks) if estimated else count_ranks(plan, ranks, on_message)
    predicted = partial(predicted_seconds, catalogue, software=usual_software(recipe))
    found = remedies(plan, predicted) if use.fits is False else []
    return RunMemory(recipe, use, found)
