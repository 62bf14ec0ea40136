# SPDX-License-Identifier: Apache-2.0
"""The predicted step of a plan, or of each row of a file: interval, calibration and unvalidated aspects."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from llmb.base.errors import LlmbError, UsageError
from llmb.catalogue.bridge_figures import PREFIX
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.records import Dtype, Gpu, Layout, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.schema import ExpectedError, FittedRate, RatesFile
from llmb.prediction.memory import settle_sharding
from llmb.prediction.step_time import (
    BUBBLE,
    CHIP,
    COMPUTED,
    TERMS,
    Rates,
    StepCache,
    computed_seconds,
    nominal_step,
    why_not_predicted,
)
from llmb.prediction.work import MeasuredMachine
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.experiment import ENGINE
from llmb.runs.plan import EnginePlan, PredictedStep, make_plan

CHECKED_GPU = "h100"
"""The GPU type of the published steps behind the errors ``model`` and ``release``."""
BLACKWELL = ("b200", "gb200", "b300", "gb300")
TRIED_GPUS = (CHECKED_GPU, "h200", *BLACKWELL)
"""GPU types on which models with experts, adapters, llmb's engine or torchtitan were timed."""
CHECKED_SEQ_LEN, CHECKED_CP, CHECKED_GPUS = 8192, 2, 2304
"""The largest sequence length, context parallelism and number of GPUs of published steps."""
LEAST_NVLINK_GB_S = 400
"""A rate between PCI Express's 128 GB/s and the lowest of NVLink between all GPUs of a node."""
DOCUMENTS, LLMB, BRIDGE = "documents", "llmb", "megatron-bridge"
TORCHTITAN = "torchtitan"
SOFTWARE_OF_PROGRAMS = {
    ENGINE: LLMB,
    "reference_suite": DOCUMENTS,
    "nemo1": DOCUMENTS,
    "nemo2": DOCUMENTS,
    "megatron_bridge": BRIDGE,
    "megatron": BRIDGE,
}
"""The software of runs by their program, or the format of their log; others are predicted like torchtitan."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured step of a plan. pp_stage: the stage of a rank that ran alone, without communication; else None."""

    title: str
    plan: EnginePlan
    seconds: float
    pp_stage: int | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The rates of predictions, and the measurement that scales them, if any."""

    text: str
    rates: Rates
    software: str = DOCUMENTS
    """Program whose overlap and fusion ``rates`` assume."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors by predicted term; 1 for other terms."""
    machine: MeasuredMachine | None = None
    error: str = "model"
    """``recipe`` replaces all expected errors, ``node`` the case's; ``bench`` and ``trace`` add errors; ``model``
    changes none."""
    fits: Sequence[Mapping[str, FittedRate]] = ()
    """Uncertainty of fitted rates, one mapping per fit."""


@dataclass(frozen=True, slots=True)
class BeyondNvlink:
    """Messages of TP or EP that cross a network."""

    group: Literal["TP", "EP"]
    gpus: int
    """Number of consecutive GPUs that exchange them."""
    nvlink_domain_gpus: int
    added_s: float
    """Seconds by which a step would be shorter if these GPUs were in one NVLink domain."""

    @property
    def text(self) -> str:
        domains = -(-self.gpus // self.nvlink_domain_gpus)
        return f"{self.group} over {self.gpus} GPUs spans {domains} NVLink domains of {self.nvlink_domain_gpus}"


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a plan. terms: seconds by cause, which sum to the step."""

    plan: EnginePlan
    gpu: Gpu
    terms: Mapping[str, float]
    calibration: Calibration
    errors: Mapping[str, ExpectedError]
    """Expected errors by name."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def error_pct(self) -> float:
        """Half the width of the 95 % interval, in percent of the step."""
        low, high = self.interval_s
        return 100 * (high - low) / 2 / self.seconds

    @property
    def interval_s(self) -> tuple[float, float]:
        return interval_s(self.seconds, self.errors.values())

    @cached_property
    def beyond_nvlink(self) -> tuple[BeyondNvlink, ...]:
        """Groups of TP and EP with more GPUs than an NVLink domain has."""
        layout, domain = self.plan.recipe.layout, self.gpu.nvlink_domain_gpus
        groups: dict[Literal["TP", "EP"], tuple[int, set[str]]] = {
            "TP": (layout.tp, {"tp"}),
            "EP": (layout.etp * layout.ep, {"ep", "etp"}),
        }
        return tuple(
            BeyondNvlink(
                name,
                gpus,
                domain,
                self.seconds - sum(predicted_terms(self.plan, self.gpu, self.calibration, joined).values()),
            )
            for name, (gpus, joined) in groups.items()
            if gpus > domain
        )

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """Descriptions of the errors that are assumed, because no published step measures them."""
        return tuple(each.text for each in self.errors.values() if each.rows is None)


def interval_s(seconds: float, errors: Iterable[ExpectedError]) -> tuple[float, float]:
    """Return the 95 % interval of a predicted step. Errors are independent: their logarithms add in quadrature."""
    shorter, longer = (math.hypot(*side) for side in zip(*(each.log_errors for each in errors), strict=True))
    return seconds * math.exp(-shorter), seconds * math.exp(longer)


COMPUTING = {*(TERMS[name] for name in COMPUTED), BUBBLE}
"""Terms that a rank alone calibrates, and the bubble, which consists mostly of them."""


def rates_of(rates: RatesFile, software: str = DOCUMENTS) -> Rates:
    """Return the rates of work and links, and of overlap in ``software``. Raises UsageError for unknown software."""
    if software not in rates.software:
        raise UsageError(f"unknown software '{software}'", choices=rates.software)
    values = {name: rate.value for name, rate in (rates.rates | rates.links).items()}
    own = rates.software[software].model_dump(exclude={"source", "unfused"}, exclude_none=True)
    values |= {name: float(value) for name, value in own.items()}
    values["memory"] *= rates.software[software].unfused
    return values


def default_calibration(rates: RatesFile, software: str = DOCUMENTS) -> Calibration:
    values, fitted = rates_of(rates, software), rates_of(rates, BRIDGE)
    own = {name for name, value in values.items() if value != fitted[name]}
    fits = [{name: rate for name, rate in fit.items() if name not in own} for fit in rates.fits.values()]
    return Calibration("none: rates of published steps", values, software, fits=fits)


def chip_rates(rates: Rates, efficiency: float | None) -> Rates:
    """Return the rates, with ``CHIP``'s divided by a GPU's ``efficiency`` relative to an H100, by default 1."""
    return {name: rate / (efficiency or 1.0) if name in CHIP else rate for name, rate in rates.items()}


def calibrate(measured: MeasuredStep, plan: EnginePlan, gpu: Gpu, usual: Calibration) -> Calibration:
    """Return ``usual`` scaled by a measured step; raise UsageError for another GPU type or dtype, or without a
    prediction."""
    mine, other = plan.recipe, measured.plan.recipe
    for name, ours, theirs in (("GPU type", mine.gpu_type, other.gpu_type), ("dtype", mine.dtype, other.dtype)):
        if ours != theirs:
            raise UsageError(
                f"{measured.title} has {name} {theirs}, but the prediction is for {ours}",
                do="calibrate with a run of the same GPU type and dtype",
            )
    alone, rates = measured.pp_stage, chip_rates(usual.rates, gpu.relative_efficiency)
    if alone is None:
        expected = nominal_step(measured.plan, gpu, rates).seconds(rates)
    else:
        expected = computed_seconds(measured.plan, gpu, rates, alone)
    same = (mine.workload, mine.size, mine.release) == (other.workload, other.size, other.release)
    factor = measured.seconds / expected
    what = "took" if alone is None else "computed for"
    text = f"{measured.title} {what} {measured.seconds:.4g} s, {100 * (factor - 1):+.1f} % from its prediction"
    # A rank alone measures the machine without communication.
    return replace(
        usual,
        text=text,
        factors=dict.fromkeys({*TERMS.values(), BUBBLE} if alone is None else COMPUTING, factor),
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
    expected = {name: errors[name] for name in error_names(plan, gpu, calibration)}
    return Prediction(plan, gpu, predicted_terms(plan, gpu, calibration, cache=cache), calibration, expected)


def predicted_terms(
    plan: EnginePlan, gpu: Gpu, calibration: Calibration, joined: Container[str] = (), cache: StepCache | None = None
) -> dict[str, float]:
    # Measured rates are already those of the chip.
    rates = calibration.rates if calibration.machine else chip_rates(calibration.rates, gpu.relative_efficiency)
    terms = nominal_step(plan, gpu, rates, cache, calibration.machine, joined).terms(rates)
    return {name: seconds * calibration.factors.get(name, 1.0) for name, seconds in terms.items()}


def unbalanced(plan: EnginePlan, imbalance: float | None) -> EnginePlan:
    """Return the plan with every rank's experts loaded ``imbalance`` times the mean; raise UsageError if that is
    impossible."""
    if imbalance is None:
        return plan
    if plan.recipe.model.moe is None or plan.recipe.layout.ep == 1:
        do = "use a model with experts and an --ep above 1, or omit --imbalance"
        raise UsageError("--imbalance is for experts that are distributed over ranks", do=do)
    if plan.force_load_balancing or plan.capacity_factor is not None:
        raise UsageError(
            "--imbalance is for experts with different loads; here every expert computes the same number of rows",
            do="pass --capacity-factor 0 without --force-load-balancing, or omit --imbalance",
        )
    if imbalance > plan.recipe.layout.ep:
        most = plan.recipe.layout.ep
        what = (
            f"--imbalance is {imbalance:g}, but one of {most} ranks has at most {most} times the mean number of tokens"
        )
        raise UsageError(what, do=f"pass a value from 1 to {most}")
    return plan.model_copy(update={"capacity_factor": imbalance})


def usual_software(recipe: Recipe) -> str:
    """Return the software of a recipe: Megatron-Bridge for its releases, else that of the reference documents."""
    return BRIDGE if recipe.release is not None and recipe.release.startswith(PREFIX) else DOCUMENTS


def predicted_step(catalogue: Catalogue, plan: EnginePlan, software: str) -> PredictedStep | None:
    """Predict a plan's step in ``software``; None if it cannot be predicted."""
    gpu = catalogue.gpus.get(plan.recipe.gpu_type)
    if plan.device != "cuda" or gpu is None or plan.recipe.pretended_rank is not None or why_not_predicted(plan, gpu):
        return None
    found = predict(plan, gpu, default_calibration(catalogue.rates, software), catalogue.rates.errors)
    return PredictedStep(step_time_s=found.seconds, ci95_s=found.interval_s, breakdown_s=dict(found.terms))


def predicted_seconds(catalogue: Catalogue, plan: EnginePlan, software: str) -> float | None:
    found = predicted_step(catalogue, plan, software)
    return None if found is None else found.step_time_s


def error_names(plan: EnginePlan, gpu: Gpu, calibration: Calibration) -> list[str]:
    """Return the names of the expected errors: of the case or calibration, an untried GPU type, and aspects."""
    if calibration.error == "recipe":  # the calibration run has all aspects of the plan
        return ["recipe"]
    names = [calibration.error] if calibration.error == "node" else [error_case(plan, gpu, calibration.software)]
    if calibration.error in ("bench", "trace"):
        names.append(calibration.error)
    aspects = list(_aspects(plan, gpu))
    elsewhere = gpu.gpu_type not in TRIED_GPUS and not {"gpu", "platform"} & {*names, *aspects}
    if elsewhere and calibration.error in ("model", "trace"):
        names.append("gpu")
    return [*names, *aspects]


def error_case(plan: EnginePlan, gpu: Gpu, software: str) -> str:
    """Return the name of the expected error for this software, model and GPU type."""
    by_nvidia = software in (DOCUMENTS, BRIDGE)
    if not by_nvidia:
        return LLMB if software == LLMB else "engines"
    if plan.recipe.model.moe is not None:
        return "experts"
    if plan.lora is not None:
        return "adapters"
    if gpu.gpu_type != CHECKED_GPU:
        return "blackwell" if gpu.gpu_type in BLACKWELL else "gpu"
    return "model" if software == DOCUMENTS else "release"


def _aspects(plan: EnginePlan, gpu: Gpu) -> Iterator[str]:
    layout = plan.recipe.layout
    joined = gpu.nvlink_domain_gpus >= gpu.gpus_per_node and gpu.nvlink_gb_s >= LEAST_NVLINK_GB_S
    found = {
        "platform": gpu.vendor != "nvidia" or not joined,
        "tp_network": layout.tp > gpu.nvlink_domain_gpus,
        "hardware": gpu.is_foreign,
        "sharding": plan.parallelism.dp_sharding == "full",
        "recompute": plan.recompute != "none",
        "length": layout.seq_len > CHECKED_SEQ_LEN,
        "context": layout.cp > CHECKED_CP,
        "scale": layout.gpus > CHECKED_GPUS,
        "routing": plan.capacity_factor is not None and plan.capacity_factor > 1,
        "nvfp4": plan.recipe.dtype is Dtype.NVFP4,
    }
    return (name for name, applies in found.items() if applies)


RECIPE = ("workload", "size", "dtype", "gpu_type", "scale", "release")
SIZES = tuple(name for name in Layout.model_fields if name in Overrides.model_fields)
COLUMNS = (*RECIPE, "gpus", *(name for name in SIZES if name != "sequence_parallel"))
"""Columns of a file to predict; all except ``workload`` and ``size`` may be missing or empty."""


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A line of a file to predict, and its prediction or the error that prevented it."""

    line: int
    columns: Mapping[str, str]
    outcome: Prediction | LlmbError


def predict_rows(catalogue: Catalogue, rows: Sequence[Mapping[str, str]]) -> Iterator[PredictedRow]:
    """Predict each row; yield the error of a row that fails. Raises UsageError for unknown columns."""
    if rows and (unknown := set(rows[0]) - {*COLUMNS, None}):
        raise UsageError(f"unknown columns: {', '.join(sorted(map(str, unknown)))}", choices=COLUMNS)

    @cache
    def plan_of(*recipe: str) -> EnginePlan:
        values: dict[str, Any] = {name: value for name, value in zip(RECIPE, recipe, strict=True) if value}
        if "scale" in values:
            values["scale"] = _whole("scale", values["scale"])
        if missing := [name for name in ("workload", "size") if name not in values]:
            raise UsageError(f"column {missing[0]} is missing or empty")
        return make_plan(resolve(catalogue, Request(**values)), Choices(), device="cuda", trains=False)

    caches: dict[tuple[object, ...], StepCache] = {}
    for line, row in enumerate(rows, start=2):
        try:
            if None in row:
                raise UsageError("the line has more values than there are columns")
            recipe = tuple(row.get(name) or "" for name in RECIPE)
            plan = settle_sharding(with_layout(plan_of(*recipe), _sizes(row)), Parallelism())
            if plan.recipe.gpu_type not in catalogue.gpus:
                raise UsageError(f"only steps on GPUs can be predicted, but gpu_type is {plan.recipe.gpu_type}")
            calibration = default_calibration(catalogue.rates, usual_software(plan.recipe))
            gpu, shared = catalogue.gpus[plan.recipe.gpu_type], caches.setdefault(recipe, StepCache())
            outcome: Prediction | LlmbError = predict(plan, gpu, calibration, catalogue.rates.errors, shared)
        except LlmbError as error:
            outcome = error
        yield PredictedRow(line, {name: text for name, text in row.items() if name in COLUMNS}, outcome)


def with_layout(plan: EnginePlan, changes: Mapping[str, int | None]) -> EnginePlan:
    """Return the plan with ``changes`` to its layout; raise UsageError with all problems if the result is invalid."""
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
