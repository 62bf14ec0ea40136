# SPDX-License-Identifier: Apache-2.0
"""The published steps that predictions are fitted to and compared with, and the fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

from benchmarks.published_layouts import published_recipes
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Gpu
from llmb.catalogue.schema import Prior, RatesFile
from llmb.prediction.prediction import rates_of
from llmb.prediction.step_time import NominalStep, Rates, nominal_step, priced
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

GPU_TYPE = "h100"
"""Of all published tables of pre-training."""
SPREAD, SCATTER = 0.02, 0.01
"""Relative deviations of published steps: what all of a family share, as the same configuration in two releases differs
by 2.9 % on average, which is the difference of two; and of each."""
SLIP = ("405b", Dtype.FP8, "24.11", 2304)
"""Fitted to by nothing, and predicted like the others: 9 % slower than on half of its GPUs, where all other doublings
cost at most 3 %."""
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


def means(file: RatesFile) -> Rates:
    """What was known before any published step."""
    return {**rates_of(file), **{name: prior.mean for name, prior in priors(file).items()}}


def fit(steps: Sequence[PublishedStep], gpu: Gpu, file: RatesFile) -> Rates:
    """The most likely rates, if priors and published steps are normally distributed.

    A step is linear in its rates, but for the choice of the slowest rank and what exceeds a window.
    """
    found = dict(means(file))
    for _ in range(PASSES):
        rows, aims = equations(steps, gpu, file, found)
        solved = lsq_linear(rows, aims, bounds=(0, np.inf)).x
        found |= dict(zip(priors(file), map(float, solved), strict=True))
    return found


def priors(file: RatesFile) -> dict[str, Prior]:
    return {name: rate.prior for name, rate in file.rates.items() if rate.prior}


def equations(steps: Sequence[PublishedStep], gpu: Gpu, file: RatesFile, found: Rates) -> tuple[np.ndarray, np.ndarray]:
    """What the fitted rates solve, in standard deviations: their priors, and the steps with features at ``found``."""
    free = priors(file)
    families: dict[object, list[PublishedStep]] = {}
    for step in steps:
        if not step.is_slip:
            families.setdefault(step.family, []).append(step)
    certainty = np.diag([1 / prior.deviation for prior in free.values()])
    rows, aims = [certainty], [certainty @ np.array([prior.mean for prior in free.values()])]
    for family in families.values():
        features = [features_of(nominal_step(step.plan, gpu, found)) for step in family]
        wanted = np.array([[of.get(name, 0.0) for name in free] for of in features])
        assumed = [{name: each for name, each in of.items() if name not in free} for of in features]
        seconds = np.array([step.seconds for step in family])
        covariance = SPREAD**2 + SCATTER**2 * np.eye(len(family))
        whitened = np.linalg.cholesky(np.linalg.inv(covariance)).T
        rows.append(whitened @ (wanted / seconds[:, None]))
        aims.append(whitened @ (1 - np.array([priced(each, found) for each in assumed]) / seconds))
    return np.concatenate(rows), np.concatenate(aims)


def features_of(nominal: NominalStep) -> dict[str, float]:
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


def held_out_models(steps: Sequence[PublishedStep], gpu: Gpu, rates: RatesFile) -> Iterator[Compared]:
    """Each model by a fit to the others; both documents of 405b are of one."""
    for size in dict.fromkeys(step.size for step in steps):
        found = fit([each for each in steps if each.size != size], gpu, rates)
        yield from compare([each for each in steps if each.size == size], gpu, found)


def from_one_node(steps: Sequence[PublishedStep], gpu: Gpu, rates: RatesFile) -> Iterator[Compared]:
    """All others by a fit to what ran on one node, which is two steps."""
    node = [each for each in steps if each.gpus <= gpu.gpus_per_node]
    yield from compare([each for each in steps if each not in node], gpu, fit(node, gpu, rates))


def from_smallest_run(steps: Sequence[PublishedStep], gpu: Gpu, rates: RatesFile) -> Iterator[Compared]:
    """Each recipe by its own smallest run, and a fit to the recipes of other models."""
    predicted = {(each.step.recipe, each.step.gpus): each.predicted_s for each in held_out_models(steps, gpu, rates)}
    for recipe in dict.fromkeys(step.recipe for step in steps):
        first, *others = sorted((each for each in steps if each.recipe == recipe), key=lambda each: each.gpus)
        factor = first.seconds / predicted[recipe, first.gpus]
        yield from (Compared(each, predicted[recipe, each.gpus] * factor) for each in others)


def held_out_scales(steps: Sequence[PublishedStep], gpu: Gpu, rates: RatesFile) -> Iterator[Compared]:
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
