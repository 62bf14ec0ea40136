# SPDX-License-Identifier: Apache-2.0
"""``llmb bench``: the speed of each part of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from llmb.base.errors import EnvironmentProblem, UsageError, unknown
from llmb.base.options import build
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request
from llmb.cli.bench_jobs import OF_SHAPES, collectives, command_line, gpus, save_and_show
from llmb.cli.common import CommandGroup, Json
from llmb.cli.progress import CaseProgress
from llmb.cli.root import install_here, print_unspecified, say
from llmb.cli.shared_options import selection_options, takes
from llmb.launch.site.site import this_machine
from llmb.nodes.bench.device_bench import (
    DEFAULT_MODEL,
    BenchSettings,
    DeviceChoice,
    TimedCase,
    attention_cases,
    bytes_of,
    device_here,
    gemm_cases,
    launch_cases,
    measure,
    memory_cases,
    parse_dtypes,
    raise_if_incomplete,
    recipe_of,
    recipe_text,
    transfer_cases,
)
from llmb.nodes.bench.measurements import BENCHMARKS, bench_folder, read_measurements
from llmb.nodes.bench.protocol import ProductDtype
from llmb.readers.samples.host import Device
from llmb.reports.bench_report import history_document, history_tables, measurement_document, measurement_tables
from llmb.reports.output import print_line, print_output

SECONDS = 5.0
app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)
SHAPES = selection_options(OF_SHAPES)
"""The options of a recipe that determine its shapes; all of them are optional."""
Dtypes = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Dtype: bf16, fp16, fp32 or fp8 (gemm only), or several (bf16,fp8). Default: recipe's."
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds", min=0, help="Also repeat one large case for this many seconds; the last third counts. 0: off."
    ),
]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", help="Size of a copy, such as 64MiB. Repeatable. Default: several sizes.")
]


@dataclass(frozen=True, slots=True)
class Measuring:
    """Options of the commands that measure one device: all measuring commands except ``collectives`` and ``gpus``."""

    repeat: Annotated[
        int | None, typer.Option("--repeat", min=1, help="Repetitions per case. Default: 3 (long) to 200 (short).")
    ] = None
    json: Json = False

    def run(self, device: Device, cases: Sequence[TimedCase], title: str, recipe: Recipe | None = None) -> None:
        """Measure, save and print; then fail if cases ran out of memory, or if nothing was measured."""
        install, settings = install_here(), BenchSettings(device, self.repeat, command_line())
        with CaseProgress() as progress:
            measured = measure(Catalogue(), cases, settings, progress.case, recipe)
        (path,) = save_and_show(
            install,
            [measured],
            lambda: print_output(measurement_document(measured) if self.json else measurement_tables(measured, title)),
        )
        say(f"saved to {path}")
        raise_if_incomplete(measured)

    def recipe(self, device: Device, shapes: dict[str, Any], dtypes: Sequence[ProductDtype]) -> Recipe:
        """Return the requested or default recipe; without --json, print its name. Raise UsageError if it is invalid."""
        catalogue, values, by_default = Catalogue(), dict(shapes), not shapes["workload"]
        if by_default and values["size"]:
            raise UsageError("--size requires --workload", do="add --workload; see 'llmb list'")
        model = DEFAULT_MODEL[device]
        if not by_default:
            model = model_of(catalogue, values["workload"].lower(), values["size"] and values["size"].lower())
        values["workload"], values["size"] = model
        recipe = recipe_of(catalogue, build(Request, values), dtypes, device, this_machine())
        if not self.json:
            print_line(f"shapes of {recipe_text(recipe)}{' (the default; see -w and -s)' if by_default else ''}")
            print_unspecified([] if by_default else [one for one in recipe.unspecified if one.name != "dtype"])
        return recipe


@dataclass(frozen=True, slots=True)
class OneDevice:
    choice: Annotated[
        DeviceChoice, typer.Option("--device", help="Device to measure; 'auto': the first visible GPU, else the CPU.")
    ] = "auto"

    @property
    def device(self) -> Device:
        return device_here(self.choice, this_machine())


@app.callback()
def bench() -> None:
    """Measure the speed of each part of this machine.

    Example:

    - `llmb bench gemm`
    """


@app.command()
@takes(SHAPES, OneDevice, Measuring)
def gemm(
    shapes: dict[str, Any], one: OneDevice, measuring: Measuring, dtype: Dtypes = None, seconds: Seconds = SECONDS
) -> None:
    """Measure the matrix products of one micro-batch of a recipe, forward and for both gradients, on one device.

    A square product shows the highest rate of the device. The product with the most FLOPs is also repeated for a few
    seconds, at the clock rate that power and temperature then allow.

    Examples:

    - `llmb bench gemm`

    - `llmb bench gemm -w pretrain_llama3.1 -s 8b --dtype bf16,fp8 --seconds 30`

    - `llmb bench gemm -w pretrain_llama3.1 -s 405b --gpu-type h100 --json`
    """
    device, dtypes = one.device, parse_dtypes(dtype)
    recipe = measuring.recipe(device, shapes, dtypes)
    cases = gemm_cases(recipe, dtypes or parse_dtypes(recipe.dtype), device, seconds)
    measuring.run(device, cases, f"Matrix products of {recipe.model_name}", recipe)


@app.command()
@takes(SHAPES, OneDevice, Measuring)
def attention(
    shapes: dict[str, Any], one: OneDevice, measuring: Measuring, dtype: Dtypes = None, seconds: Seconds = SECONDS
) -> None:
    """Measure the attention of a recipe, forward and backward, with the backend that the engine chooses for it.

    Examples:

    - `llmb bench attention`

    - `llmb bench attention -w pretrain_llama3.1 -s 70b --seq-len 4096`
    """
    device, dtypes = one.device, parse_dtypes(dtype)
    if "fp8" in dtypes:
        raise UsageError("attention is not computed in fp8", do="pass --dtype bf16, as fp8 recipes use for attention")
    recipe = measuring.recipe(device, shapes, dtypes)
    measuring.run(device, list(attention_cases(recipe, dtypes, seconds)), f"Attention of {recipe.model_name}", recipe)


@app.command()
@takes(OneDevice, Measuring)
def memory(one: OneDevice, measuring: Measuring, size: Sizes = None, seconds: Seconds = SECONDS) -> None:
    """Measure copies within the memory of the GPU or the host; bytes read and bytes written both count.

    Examples:

    - `llmb bench memory`

    - `llmb bench memory --device cpu --size 1GiB --seconds 0`
    """
    device = one.device
    measuring.run(device, list(memory_cases(device, _bytes(size), seconds)), "Copies within memory")


@app.command()
@takes(Measuring)
def transfer(measuring: Measuring, size: Sizes = None) -> None:
    """Measure copies from the host to the GPU and back, from pinned and from pageable memory.

    Examples:

    - `llmb bench transfer`

    - `llmb bench transfer --size 256MiB --repeat 50`
    """
    device = device_here("auto", this_machine())
    if device == "cpu":
        do = "use 'llmb bench memory' to measure copies within the host's memory"
        raise EnvironmentProblem("transfers need a GPU, but this machine has no visible one", do=do)
    measuring.run(device, list(transfer_cases(_bytes(size))), "Copies between host and GPU")


@app.command()
@takes(OneDevice, Measuring)
def launch(one: OneDevice, measuring: Measuring) -> None:
    """Measure the launch time of a minimal operation: alone, in a queue, and in a CUDA graph.

    Examples:

    - `llmb bench launch`

    - `llmb bench launch --device cpu --repeat 20`
    """
    device = one.device
    measuring.run(device, list(launch_cases(device)), "Starting work")


app.command("collectives")(collectives)
app.command("gpus")(gpus)


@app.command("list")
def list_(
    node: Annotated[str | None, typer.Option("--node", help="List only the measurements of this node.")] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="List only this benchmark, such as gemm or memory.")
    ] = None,
    json: Json = False,
) -> None:
    """List the measurements of each node, with the change of each case since its previous measurement.

    Examples:

    - `llmb bench list`

    - `llmb bench list --node node-17 --benchmark gemm`
    """
    if benchmark and benchmark not in BENCHMARKS:
        raise unknown("benchmark", benchmark, BENCHMARKS)
    install = install_here()
    kept = read_measurements(install, node)
    print_output(history_document(kept, benchmark) if json else history_tables(kept, benchmark, bench_folder(install)))


def _bytes(sizes: Sequence[str] | None) -> tuple[int, ...]:
    return tuple(bytes_of(size) for size in sizes or ())
