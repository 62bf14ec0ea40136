# SPDX-License-Identifier: Apache-2.0
"""The predicted step of a plan, or of each row of a file: interval, calibration and unvalidated aspects."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from llmb.base.errors import LlmbError, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.records import Gpu, Layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.schema import ExpectedError, RatesFile
from llmb.prediction.step_time import (
    BUBBLE,
    COMPUTED,
    TERMS,
    Rates,
    StepCache,
    computed_seconds,
    nominal_step,
    why_not_predicted,
)
from llmb.prediction.work import MeasuredMachine
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, PredictedStep, make_plan

CHECKED_GPU = "h100"
"""The only GPU type with published pre-training tables."""

LEAST_NVLINK_GB_S = 400
"""Slower than any NVLink between all GPUs of a node; PCI Express has 128."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured step of a plan. pp_stage: the stage of a rank that ran alone, so that ``seconds`` has no
    communication."""

    title: str
    plan: EnginePlan
    seconds: float
    pp_stage: int | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scales predictions by a measurement, or not at all.

    factor: multiplies predicted steps; computes: only their computation. machine: rates measured by kind. error: the
    name of an expected error in the catalogue.
    """

    text: str
    rates: Rates
    factor: float = 1.0
    computes: bool = False
    machine: MeasuredMachine | None = None
    error: str = "model"


@dataclass(frozen=True)
class Prediction:
    """Seconds by cause, which sum to the step."""

    plan: EnginePlan
    terms: Mapping[str, float]
    calibration: Calibration
    errors: Mapping[str, ExpectedError]
    """Expected errors by name: the fraction by which the step may be longer or shorter."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def error_pct(self) -> float:
        """The half-width of the 95 % interval: independent errors, added in quadrature."""
        return math.hypot(*(each.pct for each in self.errors.values()))

    @property
    def interval_s(self) -> tuple[float, float]:
        part = self.error_pct / 100
        return self.seconds / (1 + part), self.seconds * (1 + part)

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """Aspects of the plan that no published step validates."""
        return (*(_UNCHECKED[name] for name in self.errors if name in _UNCHECKED), SOFTWARE)


COMPUTING = {*(TERMS[name] for name in COMPUTED), BUBBLE, TERMS["tp_bf16"], TERMS["cp_attention"]}
"""Terms that a single rank calibrates; a bubble consists mostly of them."""
SOFTWARE = (
    "other software than the documents': with other versions of it, steps on H100 were up to 19 % longer; llmb's "
    "engine was measured on one GPU alone"
)
_UNCHECKED = {
    "bench": "rates from llmb bench: no published step comes from a node that was measured this way",
    "gpu": "this GPU type: rates are estimated from those of H100",
    "platform": "AMD's GPUs, and nodes in which NVLink does not connect all GPUs: rates are those of H100",
    "parts": "parts of the model that llmb's engine lacks: published steps took 33 % less to 101 % more than predicted",
    "experts": "experts: tokens are spread evenly, or as --imbalance states; messages do not overlap with computation",
    "adapters": "adapters",
}


def default_calibration(rates: RatesFile) -> Calibration:
    values = {name: rate.value for name, rate in rates.rates.items()}
    return Calibration("none: rates of published steps", values)


def calibrate(measured: MeasuredStep, plan: EnginePlan, gpu: Gpu, usual: Calibration) -> Calibration:
    """Return ``usual``, scaled by the ratio of a measured step to its prediction.

    Raises UsageError if the step was measured on another GPU type or in another dtype.
    """
    mine, other = plan.recipe, measured.plan.recipe
    for name, ours, theirs in (("GPU type", mine.gpu_type, other.gpu_type), ("dtype", mine.dtype, other.dtype)):
        if ours != theirs:
            raise UsageError(
                f"{measured.title} has {name} {theirs}, but the prediction is for {ours}",
                do="calibrate with a run of the same GPU type and dtype",
            )
    alone = measured.pp_stage
    if alone is None:
        expected = nominal_step(measured.plan, gpu, usual.rates).seconds(usual.rates)
    else:
        expected = computed_seconds(measured.plan, gpu, usual.rates, alone)
    same = (mine.workload, mine.size, mine.release) == (other.workload, other.size, other.release)
    factor = measured.seconds / expected
    what = "took" if alone is None else "computed for"
    off_pct = 100 * (factor * (gpu.relative_efficiency or 1.0) - 1)
    text = f"{measured.title} {what} {measured.seconds:.4g} s, {off_pct:+.1f} % from its prediction"
    # A rank alone measures the machine without communication.
    return replace(
        usual,
        text=text,
        factor=factor,
        computes=alone is not None,
        error="recipe" if same and alone is None else "node",
    )


def predict(
    plan: EnginePlan,
    gpu: Gpu,
    calibration: Calibration,
    errors: Mapping[str, ExpectedError],
    cache: StepCache | None = None,
) -> Prediction:
    """Predict the step of ``plan``. Raises UsageError if ``why_not_predicted`` gives a reason."""
    terms = nominal_step(plan, gpu, calibration.rates, cache, calibration.machine).terms(calibration.rates)
    scaled = COMPUTING if calibration.computes else terms
    factor = (
        calibration.factor / (gpu.relative_efficiency or 1.0) if calibration.error == "model" else calibration.factor
    )
    return Prediction(
        plan,
        {name: seconds * (factor if name in scaled else 1.0) for name, seconds in terms.items()},
        calibration,
        {name: errors[name] for name in _error_names(plan, gpu, calibration)},
    )


def unbalanced(plan: EnginePlan, imbalance: float | None) -> EnginePlan:
    """Return the plan in which every rank computes and exchanges the rows of experts of the fullest rank: ``imbalance``
    times the mean, as with that capacity factor. Raises UsageError if the ranks of ``plan`` cannot differ as much.
    """
    if imbalance is None:
        return plan
    if plan.recipe.model.moe is None or plan.recipe.layout.ep == 1:
        raise UsageError("--imbalance is for experts that are distributed over ranks", do="add --ep, or omit it")
    if plan.force_load_balancing or plan.capacity_factor is not None:
        raise UsageError(
            "--imbalance is for experts whose number of rows depends on the tokens, but all compute as many here",
            do="omit it, or add --capacity-factor 0",
        )
    if imbalance > plan.recipe.layout.ep:
        most = plan.recipe.layout.ep
        raise UsageError(f"--imbalance is {imbalance:g}, but one of {most} ranks has at most {most} times the mean")
    return plan.model_copy(update={"capacity_factor": imbalance})


def predicted_step(catalogue: Catalogue, plan: EnginePlan) -> PredictedStep | None:
    """Predict a step; None for CPUs, unknown GPUs, unsupported dtypes and a rank that runs alone."""
    gpu = catalogue.gpus.get(plan.recipe.gpu_type)
    if plan.device != "cuda" or gpu is None or plan.recipe.pretended_rank is not None or why_not_predicted(plan, gpu):
        return None
    found = predict(plan, gpu, default_calibration(catalogue.rates), catalogue.rates.errors)
    return PredictedStep(step_time_s=found.seconds, ci95_s=found.interval_s, breakdown_s=dict(found.terms))


def predicted_seconds(catalogue: Catalogue, plan: EnginePlan) -> float | None:
    found = predicted_step(catalogue, plan)
    return None if found is None else found.step_time_s


def _error_names(plan: EnginePlan, gpu: Gpu, calibration: Calibration) -> Sequence[str]:
    names = [calibration.error]
    # Measured rates do not cover the whole step, nor the model errors that rates fitted to published steps absorb.
    if calibration.error == "bench":
        names.append("model")
    if "model" in names and plan.recipe.gpu_type != CHECKED_GPU:
        joined = gpu.nvlink_domain_gpus >= gpu.gpus_per_node and gpu.nvlink_gb_s >= LEAST_NVLINK_GB_S
        names.append("gpu" if gpu.vendor == "nvidia" and joined else "platform")
    # A run of the same recipe has the same experts and adapters.
    if calibration.error != "recipe":
        model = plan.recipe.model
        parts = (("experts", model.moe), ("adapters", plan.lora), ("parts", model.other_parts))
        names += [name for name, has in parts if has is not None]
    return names


RECIPE = ("workload", "size", "dtype", "gpu_type", "scale", "release")
SIZES = tuple(name for name in Layout.model_fields if name in Overrides.model_fields)
COLUMNS = (*RECIPE, "gpus", *(name for name in SIZES if name != "sequence_parallel"))
"""A file may lack all but ``workload`` and ``size``, or leave them empty."""


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A line of the file, and its prediction or the reason for its absence."""

    line: int
    columns: Mapping[str, str]
    outcome: Prediction | LlmbError


def predict_rows(
    catalogue: Catalogue, rows: Sequence[Mapping[str, str]], calibration: Calibration
) -> Iterator[PredictedRow]:
    """Predict each row; one that fails yields its error. Raises UsageError for unknown columns."""
    if rows and (unknown := set(rows[0]) - set(COLUMNS)):
        raise UsageError(f"unknown columns: {', '.join(sorted(map(str, unknown)))}", choices=COLUMNS)

    @cache
    def plan_of(*recipe: str) -> EnginePlan:
        values: dict[str, Any] = {name: value for name, value in zip(RECIPE, recipe, strict=True) if value}
        if "scale" in values:
            values["scale"] = _whole("scale", values["scale"])
        if missing := [name for name in ("workload", "size") if name not in values]:
            raise UsageError(f"{missing[0]} is missing")
        return make_plan(resolve(catalogue, Request(**values)), Choices(), device="cuda", trains=False)

    caches: dict[tuple[object, ...], StepCache] = {}
    for line, row in enumerate(rows, start=2):
        try:
            recipe = tuple(row.get(name) or "" for name in RECIPE)
            plan = with_layout(plan_of(*recipe), _sizes(row))
            gpu, shared = catalogue.gpus[plan.recipe.gpu_type], caches.setdefault(recipe, StepCache())
            outcome: Prediction | LlmbError = predict(plan, gpu, calibration, catalogue.rates.errors, shared)
        except LlmbError as error:
            outcome = error
        yield PredictedRow(line, {name: text for name, text in row.items() if name in COLUMNS}, outcome)


def with_layout(plan: EnginePlan, changes: Mapping[str, int | None]) -> EnginePlan:
    """Return the plan with other sizes. Raises UsageError with all problems of the layout."""
    recipe = plan.recipe
    layout = recipe.layout.model_copy(update=dict(changes))
    model = (
        recipe.model
        if layout.layers == recipe.model.layers
        else recipe.model.model_copy(update={"layers": layout.layers})
    )
    if problems := check_layout(model, layout):
        raise UsageError("; ".join(problems))
    recipe = recipe.model_copy(update={"layout": layout, "model": model, "scale": layout.gpus})
    return plan.model_copy(update={"recipe": recipe})


def _sizes(row: Mapping[str, str]) -> dict[str, int | None]:
    return {name: _whole(name, row[name]) for name in COLUMNS[len(RECIPE) :] if row.get(name)}


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name} is '{text}'; it must be a whole number") from error
