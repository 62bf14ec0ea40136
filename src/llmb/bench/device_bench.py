# SPDX-License-Identifier: Apache-2.0
"""One call of ``llmb bench``: whose shapes, on what device, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import llmb
from llmb.bench.cases import TimedCase, meaning
from llmb.bench.jobs import CaseList, ProductDtype
from llmb.bench.measure import OnProgress, run_measurements
from llmb.bench.records import Measurement, MeasurementFile, NotMeasured
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Dtype, Recipe, gpu_type_of
from llmb.catalogue.resolve import CPU, Request, find_workload, gpu_types_of, resolve
from llmb.errors import EnvironmentProblem, RunFailed, UsageError, unknown
from llmb.runs.host import Device, host_name
from llmb.runs.record import now
from llmb.site.machine import Machine

DeviceChoice = Literal["auto", "cpu", "cuda"]
DEFAULT_MODEL: dict[Device, tuple[str, str]] = {
    "cpu": ("pretrain_llama3.1", "tiny"),
    "cuda": ("pretrain_llama3.1", "8b"),
}
BURST_S, MOST_REPEATS = 0.25, 200
"""A burst of one case ends after this time or so many repetitions, but not before the minimum number of them."""

SMALLER_SHAPE = "choose a smaller shape, such as with --mbs, --seq-len or a larger --tp"
SMALLER = {
    **dict.fromkeys(("memory", "transfer"), "choose a smaller --size"),
    "collectives": "choose a smaller --max-size, or fewer --ranks",
}
"""What to do if memory ran out, where sizes are not those of a recipe."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How to measure; ``repeats`` is None for as many as fit in a short time."""

    device: Device
    repeats: int | None
    command: tuple[str, ...]


def device_here(choice: DeviceChoice, machine: Machine) -> Device:
    """The GPU if there is one. Raises EnvironmentProblem if one was asked for and is not here."""
    if choice == "auto":
        return "cuda" if machine.gpu_names else "cpu"
    if choice == "cuda" and not machine.gpu_names:
        raise EnvironmentProblem("this machine has no GPU that nvidia-smi shows", do="choose --device cpu")
    return choice


def dtypes_asked(text: str | None) -> tuple[ProductDtype, ...]:
    """Dtypes of a list with commas; empty if none is specified. Raises UsageError for an unknown or a duplicate one."""
    if text is None:
        return ()
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in get_args(ProductDtype):
            raise unknown("dtype", name, get_args(ProductDtype))
    if len(set(names)) < len(names):
        raise UsageError(f"--dtype is '{text}'; it must be names separated by commas, each of them once")
    return tuple(name for name in get_args(ProductDtype) if name in names)


def recipe_of(
    catalogue: Catalogue, request: Request, dtypes: Sequence[ProductDtype], device: Device, machine: Machine
) -> Recipe:
    """The recipe whose shapes are measured. Its GPU type is this machine's unless the request has one.

    The shapes do not depend on the dtype, so the first one that is a recipe's decides.
    """
    dtype = next((name for name in dtypes if name in set(Dtype)), None)
    gpu_type, found = request.gpu_type, {}
    if gpu_type is None and device == "cuda":
        gpu_type = gpu_type_of(machine.gpu_names[0], catalogue.gpus.values())
    elif gpu_type is None and CPU in gpu_types_of(find_workload(catalogue, request.workload), request.size):
        gpu_type = CPU
    if gpu_type != request.gpu_type:
        found = {"gpu_type": "detected"}
    return resolve(catalogue, replace(request, gpu_type=gpu_type, dtype=dtype), found)


def measure(
    catalogue: Catalogue,
    asked: Sequence[TimedCase],
    settings: BenchSettings,
    on_progress: OnProgress,
    recipe: Recipe | None = None,
) -> MeasurementFile:
    """Raises what ``run_measurements`` raises."""
    measured_at = now()
    timings = run_measurements(_job(asked, settings), on_progress)
    device, on_gpu = timings.device, settings.device == "cuda"
    gpu = catalogue.gpus.get(gpu_type_of(device.device, catalogue.gpus.values()) or "") if on_gpu else None
    node = host_name()
    rows = [
        meaning(one, timing, device, node, gpu, on_gpu=on_gpu)
        for one, timing in zip(asked, timings.timings, strict=True)
    ]
    versions = device.model_dump(include={"python", "torch", "cuda", "cudnn", "nccl", "driver"})
    return MeasurementFile(
        node=node,
        measured_at=measured_at,
        command=settings.command,
        software={"llmb": llmb.__version__, **versions},
        measurements=tuple(row for row in rows if isinstance(row, Measurement)),
        not_measured=tuple(row for row in rows if isinstance(row, NotMeasured)),
        recipe=recipe and recipe_text(recipe),
    )


def _job(asked: Sequence[TimedCase], settings: BenchSettings) -> CaseList:
    cases, repeats = tuple(one.case for one in asked), settings.repeats
    if repeats is None:
        return CaseList(device=settings.device, cases=cases, most_repeats=MOST_REPEATS, enough_s=BURST_S)
    return CaseList(device=settings.device, cases=cases, least_repeats=repeats, most_repeats=repeats)


def recipe_text(recipe: Recipe) -> str:
    """The recipe, and what of its layout decides the shapes."""
    layout = recipe.layout
    names = ("tp", "cp", "ep", "etp")
    shards = [f"{name.upper()} {size}" for name in names if (size := getattr(layout, name)) > 1]
    return ", ".join([recipe.title(), f"MBS {layout.mbs}", f"sequence length {layout.seq_len}", *shards])


def raise_if_missing(measured: MeasurementFile) -> None:
    """Raises RunFailed if memory ran out, naming the shapes, or if nothing could be measured."""
    memory = [row for row in measured.not_measured if row.out_of_memory]
    if memory:
        raise RunFailed(
            f"out of memory: {'; '.join(map(_named, memory))}",
            where=memory[0].reason,
            do=SMALLER.get(memory[0].benchmark, SMALLER_SHAPE),
        )
    if not measured.measurements:
        reasons = dict.fromkeys(row.reason for row in measured.not_measured)
        raise RunFailed("nothing could be measured", where="; ".join(reasons) or None)


def _named(row: NotMeasured) -> str:
    size = None if row.size_bytes is None else f"{row.size_bytes:,} bytes"
    return " ".join(filter(None, (row.case, row.shape, row.dtype, size)))
