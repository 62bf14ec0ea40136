# SPDX-License-Identifier: Apache-2.0
"""``llmb bench disk``."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmb.bench.cases import bytes_of
from llmb.bench.device_bench import recipe_of, recipe_text
from llmb.bench.disk import DiskJob, Prediction, prediction, rate, whole_blocks
from llmb.bench.disk_bench import (
    DEFAULT_BYTES,
    disk_file,
    measure_disk,
    ranks_of_a_node,
    recipe_checkpoint_bytes,
)
from llmb.bench.records import MeasurementFile
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.catalogue.records import Gpu, Recipe
from llmb.catalogue.resolve import Request
from llmb.cli.bench_jobs import save_and_show
from llmb.cli.options import Json, selection_options, takes
from llmb.cli.progress import CaseProgress
from llmb.cli.root import install_here, say
from llmb.errors import UsageError
from llmb.options.option import build, options_of
from llmb.report.bench_report import disk_document, disk_tables
from llmb.report.output import print_output
from llmb.site.machine import this_machine

NAMES = ("workload", "size", "scale", "gpu_type", "release")
RECIPE = selection_options([option for name, option in options_of(Request).items() if name in NAMES])


@takes(RECIPE)
def disk(
    selection: dict[str, Any],
    file_size: Annotated[
        str | None,
        typer.Option(
            "--file-size", help="Size of each rank's file, with a unit. Default: that of the recipe, else 1GiB."
        ),
    ] = None,
    path: Annotated[Path | None, typer.Option("--path", help="Folder. Default: the root of installation.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Processes at once. Default: the recipe's of one node, else 1."),
    ] = None,
    cache: Annotated[
        Literal["past", "through"],
        typer.Option(
            "--cache", help="Past the page cache of this machine, as far as the file system allows, or through it."
        ),
    ] = "past",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repetitions.")] = 1,
    json: Json = False,
) -> None:
    """Write and read at checkpoint sizes: as many files at once as a node has ranks, with fsync.

    With a recipe, the files have the size of a rank's part of its checkpoint, and the seconds of a save and a load are
    predicted. The space is checked before; the files have no names, so nothing is left, however it ends.

    Examples:

    - `llmb bench disk`

    - `llmb bench disk -w pretrain_llama3.1 -s 8b --scale 8 --gpu-type h100`

    - `llmb bench disk --path /scratch/checkpoints --file-size 8GiB --ranks 8 --repeat 3`
    """
    install, catalogue = install_here(), Catalogue()
    recipe = _recipe(catalogue, selection)
    gpu = catalogue.gpus.get(recipe.gpu_type) if recipe else None
    here = ranks or (ranks_of_a_node(recipe, gpu.gpus_per_node if gpu else None) if recipe else 1)
    size = DEFAULT_BYTES if recipe is None else -(-recipe_checkpoint_bytes(recipe) // recipe.layout.gpus)
    size = size if file_size is None else bytes_of(file_size)
    folder = (path or install).expanduser().absolute()
    job = DiskJob(
        folder=str(folder),
        size_bytes=whole_blocks(size) if cache == "past" else size,
        ranks=here,
        repeats=repeat,
        cache=cache,
    )
    measured = _measured(job, recipe)
    predicted = _predicted(recipe, gpu, measured) if recipe else None
    (kept,) = save_and_show(
        install,
        [measured],
        lambda: print_output(disk_document(measured, predicted) if json else disk_tables(measured, predicted, folder)),
    )
    say(f"saved to {kept}")


def _predicted(recipe: Recipe, gpu: Gpu | None, measured: MeasurementFile) -> Prediction:
    nodes = -(-recipe.layout.gpus // ranks_of_a_node(recipe, gpu.gpus_per_node if gpu else None))
    rows = measured.measurements
    return prediction(recipe_checkpoint_bytes(recipe), nodes, rate(rows, "write"), rate(rows, "read"))


def _measured(job: DiskJob, recipe: Recipe | None) -> MeasurementFile:
    """With progress; what is kept."""
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    with CaseProgress() as progress:
        timing = measure_disk(job, progress.case)
    return disk_file(job, timing, ("llmb", *sys.argv[1:]), measured_at, recipe_text(recipe) if recipe else None)


def _recipe(catalogue: Catalogue, selection: dict[str, Any]) -> Recipe | None:
    """None without a workload. Raises UsageError."""
    if not selection["workload"]:
        if named := [name for name in NAMES if selection[name]]:
            raise UsageError(f"--{named[0].replace('_', '-')} needs --workload", do="name the workload too")
        return None
    values = dict(selection)
    if not values["size"]:
        values["workload"], values["size"] = model_of(catalogue, values["workload"].lower(), None)
    return recipe_of(catalogue, build(Request, values), (), "cpu", this_machine())
