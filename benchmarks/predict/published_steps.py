# SPDX-License-Identifier: Apache-2.0
"""The published steps that predictions are fitted to and compared with, and the fit."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import lsq_linear

from benchmarks.published_layouts import published_recipes
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Gpu
from llmb.catalogue.resolve import Overrides, Request, find_model, resolve
from llmb.catalogue.schema import StepRate
from llmb.prediction.prediction import Prediction, default_calibration, predict
from llmb.prediction.step_time import NominalStep, Rates, nominal_step, priced
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan

GPU_TYPE = "h100"
"""Of all published tables of pre-training."""
OTHER_STEPS = Path(__file__).with_name("other_steps.csv")
"""Dense models in FP8 with one scale per tensor, by the version of the container: NeMo at 070a0bb,
docs/source/performance/performance_summary.md; Megatron-Bridge at 0a25f91, docs/performance-summary-archive.md.
dp_sharding: full where the summary says FSDP."""
LAYOUT = ("gbs", "mbs", "seq_len", "tp", "pp", "cp", "vp")
SPREAD, SCATTER = 0.02, 0.01
"""Relative deviations of published steps: what all of a family share, as the same configuration in two releases differs
by 2.9 % on average, which is the difference of two; and of each."""
SLIP = ("405b", Dtype.FP8, "24.11", 2304)
"""Fitted to by nothing, and predicted like the others: 9 % slower than on half of its GPUs, where all other doublings
cost at most 3 %."""
OTHER_GPU = "gb200"
"""The one other type of a published step that tells its layout and trains no experts: LoRA of Llama 3 70b."""
EFFICIENCY, ADAPTERS = 0.15, 0.1
"""Relative deviations, assumed: of steps on another type of GPU from what an H100 attains of its nominal figures; and
of one with adapters from its prediction, of which none is known on an H100. Chosen when ``OTHER_STEPS`` were known."""
PASSES = 4
"""Fits, each with features at the rates of the one before; they change no more after three."""


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A row of a published table."""

    plan: EnginePlan
    seconds: float

    @property
    def size(self) -> str:
        return self.plan.recipe.size

    @property
    def gpus(self) -> int:
        return self.plan.recipe.scale

    @property
    def dtype(self) -> Dtype:
        return self.plan.recipe.dtype

    @property
    def recipe(self) -> tuple[str, Dtype, str | None]:
        """Rows of one recipe differ in scale alone, or in depth."""
        return self.size, self.dtype, self.plan.recipe.release

    @property
    def family(self) -> tuple[object, ...]:
        """Rows of one family differ in data-parallel replicas alone: they are hardly independent."""
        layout = self.plan.recipe.layout
        return (*self.recipe, layout.layers, layout.tp, layout.pp, layout.cp)

    @property
    def is_slip(self) -> bool:
        return (*self.recipe, self.gpus) == SLIP


def published_steps(catalogue: Catalogue) -> list[PublishedStep]:
    """The rows of tables, without examples in the text of documents."""
    found = []
    for recipe in published_recipes(catalogue):
        times = [each.step_time_s for each in recipe.expectations if each.kind == "table" and each.step_time_s]
        if recipe.gpu_type == GPU_TYPE and recipe.task == "pretrain" and times:
            found.append(PublishedStep(make_plan(recipe, Choices(), device="cuda"), times[0]))
    return found


def fit_efficiency(catalogue: Catalogue) -> float:
    """What ``OTHER_GPU`` attains of its nominal figures, as a part of what an H100 attains: the most likely value."""
    (recipe,) = (
        each
        for each in published_recipes(catalogue)
        if each.gpu_type == OTHER_GPU and any(one.step_time_s for one in each.expectations)
    )
    rates = {name: rate.value for name, rate in catalogue.rates.rates.items()}
    gpu, plan = catalogue.gpus[OTHER_GPU], make_plan(recipe, Choices(), device="cuda")
    published = float(np.mean([one.step_time_s for one in recipe.expectations if one.step_time_s]))
    longer = published / nominal_step(plan, gpu, rates).seconds(rates)
    certainty = np.array([1 / EFFICIENCY**2, 1 / ADAPTERS**2])
    return 1 / float(np.average([1.0, longer], weights=certainty))


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A step that another publication measured, and its prediction, to which nothing of it is fitted."""

    source: str
    seconds: float
    predicted: Prediction

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the published step."""
        return self.predicted.seconds / self.seconds - 1

    @property
    def is_within(self) -> bool:
        """Whether the published step is in the interval of the prediction."""
        low, high = self.predicted.interval_s
        return low <= self.seconds <= high


def other_steps(catalogue: Catalogue) -> list[OtherStep]:
    with OTHER_STEPS.open(newline="") as file:
        return [_other_step(catalogue, row) for row in csv.DictReader(file)]


def _other_step(catalogue: Catalogue, row: Mapping[str, str]) -> OtherStep:
    gpus, sizes = int(row["gpus"]), {name: int(row[name]) for name in LAYOUT}
    model = find_model(catalogue, row["workload"], row["size"])
    request = Request(
        workload=row["workload"],
        size=row["size"],
        dtype=Dtype.FP8,
        gpu_type=row["gpu_type"],
        scale=gpus,
        overrides=Overrides(**sizes, layers=model.layers),
    )
    choices = Choices(parallelism=Parallelism(dp_sharding=row["dp_sharding"] or None))
    plan = make_plan(resolve(catalogue, request), choices, device="cuda")
    seconds = sizes["gbs"] * sizes["seq_len"] / gpus / float(row["tokens_per_s_per_gpu"])
    rates, gpu = catalogue.rates, catalogue.gpus[row["gpu_type"]]
    return OtherStep(row["source"], seconds, predict(plan, gpu, default_calibration(rates), rates.errors))


def means(rates: Mapping[str, StepRate]) -> Rates:
    """What was known before any published step."""
    return {name: rate.prior.mean if rate.prior else rate.value for name, rate in rates.items()}


def fit(steps: Sequence[PublishedStep], gpu: Gpu, rates: Mapping[str, StepRate]) -> Rates:
    """The most likely rates, if priors and published steps are normally distributed.

    A step is linear in its rates, but for the choice of the slowest rank and what exceeds a window.
    """
    found = means(rates)
    free = {name: rate.prior for name, rate in rates.items() if rate.prior}
    families: dict[object, list[PublishedStep]] = {}
    for step in steps:
        if not step.is_slip:
            families.setdefault(step.family, []).append(step)
    certainty = np.diag([1 / prior.deviation for prior in free.values()])
    for _ in range(PASSES):
        rows, aims = [certainty], [certainty @ np.array([prior.mean for prior in free.values()])]
        for family in families.values():
            features = [_features(nominal_step(step.plan, gpu, found)) for step in family]
            wanted = np.array([[of.get(name, 0.0) for name in free] for of in features])
            assumed = [{name: each for name, each in of.items() if name not in free} for of in features]
            seconds = np.array([step.seconds for step in family])
            covariance = SPREAD**2 + SCATTER**2 * np.eye(len(family))
            whitened = np.linalg.cholesky(np.linalg.inv(covariance)).T
            rows.append(whitened @ (wanted / seconds[:, None]))
            aims.append(whitened @ (1 - np.array([priced(each, found) for each in assumed]) / seconds))
        solved = lsq_linear(np.concatenate(rows), np.concatenate(aims), bounds=(0, np.inf)).x
        values = dict(zip(free, map(float, solved), strict=True))
        found = {name: values.get(name, rate.value) for name, rate in rates.items()}
    return found


def _features(nominal: NominalStep) -> dict[str, float]:
    """What a step is linear in."""
    features = dict(nominal.busy)
    for name, amount in nominal.bubble.items():
        features[name] = features.get(name, 0.0) + amount
    return features


@dataclass(frozen=True, slots=True)
class Compared:
    """A published step, and its prediction by rates that were fitted without it."""

    step: PublishedStep
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the published step."""
        return self.predicted_s / self.step.seconds - 1


def compare(steps: Iterable[PublishedStep], gpu: Gpu, rates: Rates) -> list[Compared]:
    return [Compared(each, nominal_step(each.plan, gpu, rates).seconds(rates)) for each in steps]


def held_out_models(steps: Sequence[PublishedStep], gpu: Gpu, rates: Mapping[str, StepRate]) -> Iterator[Compared]:
    """Each model by a fit to the others; both documents of 405b are of one."""
    for size in dict.fromkeys(step.size for step in steps):
        found = fit([each for each in steps if each.size != size], gpu, rates)
        yield from compare([each for each in steps if each.size == size], gpu, found)


def from_one_node(steps: Sequence[PublishedStep], gpu: Gpu, rates: Mapping[str, StepRate]) -> Iterator[Compared]:
    """All others by a fit to what ran on one node, which is two steps."""
    node = [each for each in steps if each.gpus <= gpu.gpus_per_node]
    yield from compare([each for each in steps if each not in node], gpu, fit(node, gpu, rates))


def from_smallest_run(steps: Sequence[PublishedStep], gpu: Gpu, rates: Mapping[str, StepRate]) -> Iterator[Compared]:
    """Each recipe by its own smallest run, and a fit to the recipes of other models."""
    predicted = {(each.step.recipe, each.step.gpus): each.predicted_s for each in held_out_models(steps, gpu, rates)}
    for recipe in dict.fromkeys(step.recipe for step in steps):
        first, *others = sorted((each for each in steps if each.recipe == recipe), key=lambda each: each.gpus)
        factor = first.seconds / predicted[recipe, first.gpus]
        yield from (Compared(each, predicted[recipe, each.gpus] * factor) for each in others)


def held_out_scales(steps: Sequence[PublishedStep], gpu: Gpu, rates: Mapping[str, StepRate]) -> Iterator[Compared]:
    """The largest scale of each model and dtype, by its next smaller one and a fit to all smaller ones."""
    groups = {key: [each for each in steps if (each.size, each.dtype) == key] for key in _models(steps)}
    largest = {key: max(group, key=lambda each: each.gpus) for key, group in groups.items()}
    rest = [each for each in steps if each not in largest.values()]
    found = fit(rest, gpu, rates)
    for key, step in largest.items():
        before = max((each for each in groups[key] if each is not step), key=lambda each: each.gpus)
        (known,), (asked,) = compare([before], gpu, found), compare([step], gpu, found)
        yield Compared(step, asked.predicted_s * before.seconds / known.predicted_s)


def _models(steps: Iterable[PublishedStep]) -> dict[tuple[str, Dtype], None]:
    return dict.fromkeys((each.size, each.dtype) for each in steps)
