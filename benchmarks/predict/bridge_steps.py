# SPDX-License-Identifier: Apache-2.0
"""The steps of NVIDIA's other software and of other engines: what of predictions is fitted to them, and how far the
predictions of those that were left out are from them."""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.predict.published_steps import PASSES, PublishedStep, features_of, fit
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Gpu
from llmb.catalogue.resolve import Overrides, Request, find_model, resolve
from llmb.catalogue.schema import ExpectedError, RatesFile
from llmb.prediction.prediction import chip_rates, default_calibration, error_case, error_names, interval_s, rates_of
from llmb.prediction.step_time import NominalStep, Rates, nominal_step, priced
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan

OTHER_STEPS = Path(__file__).with_name("other_steps.csv")
"""Steps that no figure of the catalogue has. Of NVIDIA: dense models in FP8 with one scale per tensor, by the version
of the container; NeMo at 070a0bb, docs/source/performance/performance_summary.md, and Megatron-Bridge at 0a25f91,
docs/performance-summary-archive.md. Of torchtitan at b5bcd76: benchmarks/llama3_h100_202412_torchtitan.md,
asyncTP_llama3_h100_2025-06_torchtitan.md and llama3-8b_h200_202506_trainy-whitefiber.md. dp_sharding: full for FSDP."""
FITTED = ("mb-25.09", "mb-26.04", "mb-26.04.01")
"""Releases to whose steps rates are fitted; nothing is fitted to later ones."""
BRIDGE = "megatron-bridge"
SCALINGS = {"fp8-cs": "current-all"}
"""Recipes of FP8 by their names in tables: Megatron-Bridge's scripts keep no layer in bf16."""
RATES: Mapping[str, tuple[float, float]] = {
    "experts": (1.2, 0.15),
    "routed": (2.0, 1.0),
    "moe_layer_s": (4e-4, 0.7),
    "ep": (0.5, 0.4),
    "ep_hidden": (0.5, 0.5),
    "mxfp8": (1.65, 0.1),
    "nvfp4": (2.0, 0.2),
}
"""Rates that only these steps show, with the most likely value before they were looked at and its deviation in
logarithms."""
CHIPS: Mapping[str, tuple[str, ...]] = {"blackwell": ("b200", "gb200"), "blackwell ultra": ("b300", "gb300")}
EFFICIENCY = (0.84, 0.1)
"""Of a chip relative to an H100, before these steps: one fine-tuning on GB200."""
NO_ROWS = np.empty(0)
SPREAD, SPREAD_OF_EXPERTS = 0.05, 0.15
"""Relative deviations of steps from their predictions."""


@dataclass(frozen=True)
class OtherStep:
    """A step, its source, and the software that trained it."""

    source: str
    software: str
    gpu: Gpu
    plan: EnginePlan
    seconds: float

    @property
    def size(self) -> str:
        return self.plan.recipe.size

    @property
    def has_experts(self) -> bool:
        return self.plan.recipe.model.moe is not None

    @cached_property
    def case(self) -> str:
        return error_case(self.plan, self.gpu, self.software)

    @property
    def configuration(self) -> tuple[object, ...]:
        """Equal in releases that trained the same."""
        recipe = self.plan.recipe
        return recipe.workload, recipe.size, recipe.dtype, self.gpu.gpu_type, recipe.layout


def bridge_steps(catalogue: Catalogue) -> Iterator[OtherStep]:
    """Yield the rows of Megatron-Bridge's tables with a described model and a possible layout."""
    for model, row in catalogue.bridge.named:
        release = f"mb-{row.release}"
        impossible = any(
            (row.release, row.line, row.dtype) == (e.release, e.line, e.dtype) for e in catalogue.bridge.file.errata
        )
        if impossible or model.workload in catalogue.undescribed:
            continue
        request = Request(
            workload=model.workload,
            size=model.size,
            dtype=catalogue.bridge.file.dtypes[row.dtype],
            gpu_type=row.gpu,
            scale=row.gpus,
            release=release,
            overrides=Overrides(**row.sizes),
        )
        choices = Choices(
            fp8_recipe=SCALINGS.get(row.dtype), parallelism=Parallelism(dp_sharding="full" if row.fsdp else "optimizer")
        )
        plan = make_plan(resolve(catalogue, request), choices, device="cuda", trains=False)
        if "tokendrop" in row.notes:
            plan = plan.model_copy(update={"capacity_factor": 1.0})
        yield OtherStep(release, BRIDGE, catalogue.gpus[row.gpu], plan, row.step_time_s)


def listed_steps(catalogue: Catalogue) -> Iterator[OtherStep]:
    with OTHER_STEPS.open(newline="") as file:
        for row in csv.DictReader(file):
            yield _listed_step(catalogue, row)


LAYOUT = ("gbs", "mbs", "seq_len", "tp", "pp", "cp", "vp")


def _listed_step(catalogue: Catalogue, row: Mapping[str, str]) -> OtherStep:
    gpus, sizes = int(row["gpus"]), {name: int(row[name]) for name in LAYOUT}
    layers = find_model(catalogue, row["workload"], row["size"]).layers
    request = Request(
        workload=row["workload"],
        size=row["size"],
        dtype=Dtype(row["dtype"]),
        gpu_type=row["gpu_type"],
        scale=gpus,
        overrides=Overrides(**sizes, layers=layers),
    )
    choices = Choices(
        fp8_recipe="current-all" if row["dtype"] == "fp8" else None,
        recompute=row["recompute"] or "none",
        parallelism=Parallelism(dp_sharding=row["dp_sharding"] or "optimizer"),
    )
    gpu = catalogue.gpus[row["gpu_type"]]
    if row["memory_tb_s"]:
        gpu = gpu.model_copy(update={"memory_bandwidth_tb_s": float(row["memory_tb_s"])})
    plan = make_plan(resolve(catalogue, request), choices, device="cuda")
    seconds = sizes["gbs"] * sizes["seq_len"] / gpus / float(row["tokens_per_s_per_gpu"])
    return OtherStep(row["source"], row["software"], gpu, plan, seconds)


@dataclass(frozen=True, slots=True)
class BridgeFit:
    """The rates of NVIDIA's other software, and the efficiency of chips."""

    rates: Rates
    efficiency: Mapping[str, float]
    rows: np.ndarray
    """The change of all errors with each rate's logarithm, and that of each chip's efficiency."""

    def rates_on(self, gpu_type: str) -> Rates:
        return chip_rates(self.rates, self.efficiency.get(gpu_type))

    def nominal(self, step: OtherStep) -> NominalStep:
        return nominal_step(step.plan, step.gpu, self.rates_on(step.gpu.gpu_type))

    def seconds(self, step: OtherStep) -> float:
        return self.nominal(step).seconds(self.rates_on(step.gpu.gpu_type))


def fit_bridge(steps: Sequence[OtherStep], base: Rates) -> BridgeFit:
    """Return the most likely rates beside ``base``, those of dense models on H100; errors that are much larger than
    others count less.

    A step is linear in its rates, but for the choice of the slowest rank and what exceeds the work that hides it.
    """
    repeats = Counter(each.configuration for each in steps)
    weights = np.array([
        1 / math.sqrt(repeats[each.configuration]) / (SPREAD_OF_EXPERTS if each.has_experts else SPREAD)
        for each in steps
    ])  # fmt: skip
    measured = np.log([each.seconds for each in steps])
    deviations = np.zeros(len(RATES) + len(CHIPS))
    for _ in range(PASSES):
        features = [features_of(found_at(deviations, base).nominal(each)) for each in steps]

        def errors(deviations: np.ndarray, features: Sequence[Mapping[str, float]] = features) -> np.ndarray:
            found = found_at(deviations, base)
            rates = {gpu: found.rates_on(gpu) for gpu in {each.gpu.gpu_type for each in steps}}
            pairs = zip(steps, features, strict=True)
            predicted = np.log([priced(amounts, rates[each.gpu.gpu_type]) for each, amounts in pairs])
            return np.concatenate([deviations, weights * (predicted - measured)])

        solved = least_squares(errors, deviations, loss="soft_l1")
        deviations = solved.x
    scales = np.array([deviation for _, deviation in (*RATES.values(), *(EFFICIENCY for _ in CHIPS))])
    return found_at(deviations, base, solved.jac / scales)


def found_at(deviations: np.ndarray, base: Rates, rows: np.ndarray = NO_ROWS) -> BridgeFit:
    """Return the rates at deviations from their priors."""
    names = [*RATES, *CHIPS]
    priors = [*RATES.values(), *(EFFICIENCY for _ in CHIPS)]
    pairs = zip(names, priors, deviations, strict=True)
    found = {name: mean * math.exp(deviation * by) for name, (mean, deviation), by in pairs}
    efficiency = {gpu: found[chip] for chip, gpus in CHIPS.items() for gpu in gpus}
    limited = {name: min(1.0, found[name]) if name.startswith("ep") else found[name] for name in RATES}
    return BridgeFit({**base, **limited}, efficiency, rows)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step, and its prediction by rates that were fitted without its model and its release."""

    step: OtherStep
    predicted_s: float
    errors: tuple[ExpectedError, ...]

    @property
    def is_within(self) -> bool:
        """Whether the step is in the interval of its prediction."""
        low, high = interval_s(self.predicted_s, self.errors)
        return low <= self.step.seconds <= high

    @property
    def ratio(self) -> float:
        """The step relative to its prediction."""
        return self.step.seconds / self.predicted_s


def left_out(
    documents: Sequence[PublishedStep], steps: Sequence[OtherStep], gpu: Gpu, file: RatesFile
) -> Iterator[LeftOut]:
    """Yield all steps, each predicted without its model and its release."""
    for size in dict.fromkeys(each.size for each in steps):
        base = fit([each for each in documents if each.size != size], gpu, file)
        base = {**rates_of(file, BRIDGE), **{name: base[name] for name in file.rates if name not in RATES}}
        fits: dict[str | None, BridgeFit] = {}
        for each in steps:
            if each.size == size:
                release = each.source if each.source in FITTED else None
                if release not in fits:
                    known = [
                        one for one in steps if one.size != size and one.source in FITTED and one.source != release
                    ]
                    fits[release] = fit_bridge(known, base)
                names = error_names(each.plan, each.gpu, default_calibration(file, each.software))
                predicted = with_software(fits[release], file, each.software).seconds(each)
                yield LeftOut(each, predicted, tuple(file.errors[name] for name in names))


def with_software(found: BridgeFit, file: RatesFile, software: str) -> BridgeFit:
    """Return the rates of work as fitted, and what other software hides."""
    if software == BRIDGE:
        return found
    own, usual = rates_of(file, software), rates_of(file, BRIDGE)
    changed = {name: rate for name, rate in own.items() if rate != usual[name]}
    return replace(found, rates={**found.rates, **changed})
