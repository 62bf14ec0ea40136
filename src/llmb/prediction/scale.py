# SPDX-License-Identifier: Apache-2.0
"""Predicted training at larger scales or on slower hardware: step time, goodput, energy and cost. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import sqrt
from typing import Literal

from llmb.catalogue.records import Gpu
from llmb.catalogue.schema import ExpectedError
from llmb.catalogue.throughput import SECONDS_PER_DAY
from llmb.prediction.prediction import Calibration, Prediction, predict
from llmb.prediction.search import Predicted
from llmb.prediction.step_time import CHIP
from llmb.runs.plan import EnginePlan

MOST_GPUS = 131_072
PUBLISHED_GPUS = 2_304
"""The largest scale with a published step."""
Scaling = Literal["weak", "strong"]
"""Weak: the batch grows with the GPUs; strong: it stays the same."""


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """One scale of a curve."""

    prediction: Prediction
    efficiency: float
    """Throughput per GPU relative to the first scale."""
    grew: tuple[str, float] | None
    """The term whose share of the step grew most, and by which fraction of the step; None if none grew."""

    @property
    def gpus(self) -> int:
        return self.prediction.plan.recipe.layout.gpus


@dataclass(frozen=True, slots=True)
class Curve:
    """Predicted steps at doubling scales. ends: the reason why the last scale is the largest."""

    scales: tuple[ScaledStep, ...]
    ends: str

    @property
    def goes_beyond(self) -> bool:
        """Return whether the largest scale exceeds that of every published step."""
        return self.scales[-1].gpus > PUBLISHED_GPUS


def scale_up(plan: EnginePlan, scaling: Scaling, predicted: Predicted) -> Curve:
    """Predict the plan's step, and steps with repeatedly doubled data-parallel replicas."""
    found: list[ScaledStep] = []
    first = predicted(plan)
    for each in _doubled(plan, scaling):
        prediction = predicted(each)
        found.append(ScaledStep(prediction, _per_gpu(prediction) / _per_gpu(first), _grew(first, prediction)))
    last = found[-1].prediction.plan.recipe.layout
    if 2 * last.gpus > MOST_GPUS:
        return Curve(tuple(found), f"more than {MOST_GPUS:,} GPUs are not predicted")
    micro_batches = f"{last.ga} micro-batches of {last.mbs}" if last.ga > 1 else f"one micro-batch of {last.mbs}"
    return Curve(
        tuple(found), f"batch size: {last.gbs} sequences leave a replica {micro_batches} at {last.gpus:,} GPUs"
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A change of the hardware or of the number of GPUs, and the predicted step."""

    change: str
    step_time_s: float
    longer_pct: float
    """Increase of the step time in percent."""


SLOW_GPU = 1.1
"""Factor by which the work of a slow GPU takes longer; all other GPUs wait for it."""


def what_if(
    plan: EnginePlan, gpu: Gpu, calibration: Calibration, errors: Mapping[str, ExpectedError]
) -> list[Scenario]:
    """Predict scenarios: slower NVLink, a slow GPU and, if they apply, a slower network and twice the GPUs."""
    usual = predict(plan, gpu, calibration, errors).seconds
    slow_links = calibration
    if machine := calibration.machine:
        links = {kind: rate / 2 for kind, rate in machine.links.items()}
        exchanges = {key: seconds * (2 if key[1] == 1 else 1) for key, seconds in machine.exchanges.items()}
        slow_links = replace(calibration, machine=replace(machine, links=links, exchanges=exchanges))
    slow = {name: SLOW_GPU * rate if name in CHIP else rate for name, rate in calibration.rates.items()}
    half_nvlink = gpu.model_copy(update={"nvlink_gb_s": gpu.nvlink_gb_s / 2})
    cases = [
        ("NVLink at half its rate", plan, half_nvlink, slow_links),
        (f"one GPU {100 * (SLOW_GPU - 1):.0f} % slower", plan, gpu, replace(calibration, rates=slow)),
    ]
    if gpu.network_gb_s and plan.recipe.layout.gpus > gpu.nvlink_domain_gpus:
        half_network = gpu.model_copy(update={"network_gb_s": gpu.network_gb_s / 2})
        cases.append(("network at half its rate", plan, half_network, calibration))
    twice = next(islice(_doubled(plan, "strong"), 1, None), None)
    if twice is not None and (gpu.network_gb_s or twice.recipe.layout.gpus <= gpu.nvlink_domain_gpus):
        cases.append(("twice the GPUs, the same batch", twice, gpu, calibration))
    found = [(change, predict(each, on, by, errors).seconds) for change, each, on, by in cases]
    return [Scenario(change, seconds, 100 * (seconds / usual - 1)) for change, seconds in found]


def _doubled(plan: EnginePlan, scaling: Scaling) -> Iterator[EnginePlan]:
    layout = plan.recipe.layout
    while layout.gpus <= MOST_GPUS:
        fewest = layout.pp if layout.pp > 1 else 1
        if layout.ga < fewest or layout.gbs % (layout.mbs * layout.dp) or (layout.vp > 1 and layout.ga % layout.pp):
            return
        yield plan.model_copy(
            update={"recipe": plan.recipe.model_copy(update={"layout": layout, "scale": layout.gpus})}
        )
        batch = layout.gbs * (2 if scaling == "weak" else 1)
        layout = layout.model_copy(update={"gpus": 2 * layout.gpus, "gbs": batch})


def _per_gpu(prediction: Prediction) -> float:
    layout = prediction.plan.recipe.layout
    return layout.gbs / prediction.seconds / layout.gpus


def _grew(first: Prediction, now: Prediction) -> tuple[str, float] | None:
    shares = {name: seconds / now.seconds for name, seconds in now.terms.items()}
    grew = {name: share - first.terms.get(name, 0.0) / first.seconds for name, share in shares.items()}
    name = max(grew, key=grew.__getitem__)
    return (name, grew[name]) if grew[name] > 0 else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput at the optimal checkpoint interval. part: the fraction of time spent on steps that are not lost."""

    part: float
    interval_s: float
    between_failures_s: float


def goodput(gpus: int, gpu_mtbf_h: float, save_s: float, restart_s: float) -> Goodput:
    """Return the goodput at the optimal checkpoint interval (Young, 1974). ``gpu_mtbf_h``: hours between failures of
    one GPU."""
    mean_s = gpu_mtbf_h * 3600 / gpus
    interval_s = sqrt(2 * save_s * mean_s)
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / mean_s if interval_s else restart_s / mean_s
    return Goodput(max(0.0, 1 - lost), interval_s, mean_s)


def joules_per_token(prediction: Prediction) -> float | None:
    """Return the energy per token at the GPUs' power limit, in joules; None if the limit is unknown."""
    layout, tdp_w = prediction.plan.recipe.layout, prediction.gpu.tdp_w
    return None if tdp_w is None else tdp_w * layout.gpus * prediction.seconds / (layout.gbs * layout.seq_len)


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """The cost of training on ``tokens`` tokens."""

    tokens: float
    days: float
    gpu_hours: float
    energy_mwh_at_most: float | None
    """Energy of the GPUs at their power limit; None if the limit is unknown."""
    price: float | None
    """None if the price of a GPU hour is unknown."""


J_PER_MWH = 3.6e9


def training_cost(prediction: Prediction, tokens: float, gpu_hour_price: float | None = None) -> TrainingCost:
    """Return the cost of training on ``tokens`` at the predicted step time."""
    layout, joules = prediction.plan.recipe.layout, joules_per_token(prediction)
    days = tokens / (layout.gbs * layout.seq_len) * prediction.seconds / SECONDS_PER_DAY
    hours = 24 * days * layout.gpus
    energy = None if joules is None else joules * tokens / J_PER_MWH
    return TrainingCost(tokens, days, hours, energy, None if gpu_hour_price is None else gpu_hour_price * hours)
