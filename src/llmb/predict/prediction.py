# SPDX-License-Identifier: Apache-2.0
"""A predicted step, or one of each row of a file, with its interval, what it rests on, and what is not validated."""

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
from llmb.predict.step_time import (
    BUBBLE,
    COMPUTED,
    TERMS,
    Kept,
    Rates,
    computed_seconds,
    nominal_step,
    why_not_predicted,
)
from llmb.predict.work import MeasuredMachine
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, PredictedStep, make_plan

CHECKED_GPU = "h100"
"""The only type of which there are published tables of pre-training."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was measured: what was trained, and how long it took. pp_stage: of a rank that ran alone, whose
    seconds are of computing."""

    title: str
    plan: EnginePlan
    seconds: float
    pp_stage: int | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the user measured.

    factor: of predicted steps; computes: only of what ranks compute. machine: what was measured by kind. error: one of
    the catalogue's.
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
    """By which a step may be longer or shorter, by their names."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def error_pct(self) -> float:
        """Within which 95 % of steps are expected; causes are independent."""
        return math.hypot(*(each.pct for each in self.errors.values()))

    @property
    def interval_s(self) -> tuple[float, float]:
        part = self.error_pct / 100
        return self.seconds / (1 + part), self.seconds * (1 + part)

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """What no published step has checked."""
        return (*(_UNCHECKED[name] for name in self.errors if name in _UNCHECKED), SOFTWARE)


COMPUTING = {*(TERMS[name] for name in COMPUTED), BUBBLE, TERMS["tp_bf16"], TERMS["cp_attention"]}
"""Terms that a rank alone calibrates; a bubble is mostly of them."""
SOFTWARE = (
    "other software than the documents': with other versions of it, steps on H100 were up to 19 % longer; llmb's "
    "engine was measured on one GPU alone"
)
_UNCHECKED = {
    "bench": "rates from llmb bench: of no published step was the node measured like this",
    "gpu": "this GPU type: rates are estimated from those of H100",
    "experts": "experts: every one is taken to get as many tokens, and nothing to run beside their messages",
    "adapters": "adapters",
}


def default_calibration(rates: RatesFile) -> Calibration:
    values = {name: rate.value for name, rate in rates.rates.items()}
    return Calibration("none: rates of published steps", values)


def calibrate(measured: MeasuredStep, plan: EnginePlan, gpu: Gpu, usual: Calibration) -> Calibration:
    """From one step that was measured: all predictions are longer, or shorter, by the same part.

    Raises UsageError if it was measured on another type of GPU, or in another precision.
    """
    mine, other = plan.recipe, measured.plan.recipe
    for name, asked, found in (("GPU type", mine.gpu_type, other.gpu_type), ("dtype", mine.dtype, other.dtype)):
        if asked != found:
            raise UsageError(
                f"{measured.title} has {name} {found}, and the prediction is for {asked}",
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
    # A rank alone measures the machine, and no message.
    return replace(
        usual,
        text=text,
        factor=factor,
        computes=alone is not None,
        error="recipe" if same and alone is None else "node",
    )


def predict(
    plan: EnginePlan, gpu: Gpu, calibration: Calibration, errors: Mapping[str, ExpectedError], kept: Kept | None = None
) -> Prediction:
    """Raises UsageError for what is not predicted; see ``why_not_predicted``. kept: see ``nominal_step``."""
    terms = nominal_step(plan, gpu, calibration.rates, kept, calibration.machine).terms(calibration.rates)
    scaled = COMPUTING if calibration.computes else terms
    factor = (
        calibration.factor / (gpu.relative_efficiency or 1.0) if calibration.error == "model" else calibration.factor
    )
    return Prediction(
        plan,
        {name: seconds * (factor if name in scaled else 1.0) for name, seconds in terms.items()},
        calibration,
        {name: errors[name] for name in _error_names(plan, calibration)},
    )


def predicted_step(catalogue: Catalogue, plan: EnginePlan) -> PredictedStep | None:
    """None for CPUs, unknown GPUs and ways to compute, and for a rank that runs alone."""
    gpu = catalogue.gpus.get(plan.recipe.gpu_type)
    if plan.device != "cuda" or gpu is None or plan.recipe.pretended_rank is not None or why_not_predicted(plan, gpu):
        return None
    found = predict(plan, gpu, default_calibration(catalogue.rates), catalogue.rates.errors)
    return PredictedStep(step_time_s=found.seconds, ci95_s=found.interval_s, breakdown_s=dict(found.terms))


def predicted_seconds(catalogue: Catalogue, plan: EnginePlan) -> float | None:
    found = predicted_step(catalogue, plan)
    return None if found is None else found.step_time_s


def _error_names(plan: EnginePlan, calibration: Calibration) -> Sequence[str]:
    names = [calibration.error]
    # Rates of parts leave the rest of a step, and what the published steps' rates have made up for.
    if calibration.error == "bench":
        names.append("model")
    if "model" in names and plan.recipe.gpu_type != CHECKED_GPU:
        names.append("gpu")
    # A run of the same recipe has the same experts and adapters.
    if calibration.error != "recipe":
        names += [
            name for name, has in (("experts", plan.recipe.model.moe), ("adapters", plan.lora)) if has is not None
        ]
    return names


RECIPE = ("workload", "size", "dtype", "gpu_type", "scale", "release")
SIZES = tuple(name for name in Layout.model_fields if name in Overrides.model_fields)
COLUMNS = (*RECIPE, "gpus", *(name for name in SIZES if name != "sequence_parallel"))
"""A file may lack all but ``workload`` and ``size``, or leave them empty."""


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """What a line asks for, and what is predicted of it, or why nothing is."""

    line: int
    asked: Mapping[str, str]
    found: Prediction | LlmbError


def predict_rows(
    catalogue: Catalogue, rows: Sequence[Mapping[str, str]], calibration: Calibration
) -> Iterator[PredictedRow]:
    """One that cannot be predicted takes no other with it. Raises UsageError for columns that there are not."""
    if rows and (unknown := set(rows[0]) - set(COLUMNS)):
        raise UsageError(f"unknown columns: {', '.join(sorted(map(str, unknown)))}", choices=COLUMNS)

    @cache
    def plan_of(*recipe: str) -> EnginePlan:
        values: dict[str, Any] = {name: value for name, value in zip(RECIPE, recipe, strict=True) if value}
        if "scale" in values:
            values["scale"] = _whole("scale", values["scale"])
        if missing := [name for name in ("workload", "size") if name not in values]:
            raise UsageError(f"{missing[0]} is missing")
        return make_plan(resolve(catalogue, Request(**values)), Choices(), device="cuda")

    kept: dict[tuple[object, ...], Kept] = {}
    for line, row in enumerate(rows, start=2):
        try:
            recipe = tuple(row.get(name) or "" for name in RECIPE)
            plan = with_layout(plan_of(*recipe), _sizes(row))
            gpu, alike = catalogue.gpus[plan.recipe.gpu_type], kept.setdefault(recipe, Kept())
            found: Prediction | LlmbError = predict(plan, gpu, calibration, catalogue.rates.errors, alike)
        except LlmbError as error:
            found = error
        yield PredictedRow(line, {name: text for name, text in row.items() if name in COLUMNS}, found)


def with_layout(plan: EnginePlan, changes: Mapping[str, int | None]) -> EnginePlan:
    """The plan with other sizes. Raises UsageError with all that is wrong with them."""
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
