# SPDX-License-Identifier: Apache-2.0
"""A training at larger scales, with failures, and the energy it takes, on paper. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from llmb.catalogue.records import Gpu
from llmb.predict.prediction import Prediction
from llmb.predict.search import Predicted
from llmb.runs.plan import EnginePlan

MOST_GPUS = 131_072
PUBLISHED_GPUS = 2_304
"""The largest scale of which there is a published step."""
Scaling = Literal["weak", "strong"]
"""Weak: the batch grows with the GPUs; strong: it stays."""


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A scale: its step, its throughput per GPU as a part of that at the first scale, and the part of the step that
    grew most since then, or None at the first."""

    prediction: Prediction
    efficiency: float
    grew: tuple[str, float] | None

    @property
    def gpus(self) -> int:
        return self.prediction.plan.recipe.layout.gpus


@dataclass(frozen=True, slots=True)
class Curve:
    """Scales, doubling, and why there is none beyond the last."""

    scales: tuple[ScaledStep, ...]
    ends: str

    @property
    def goes_beyond(self) -> bool:
        """Whether there is no published step at its last scales."""
        return self.scales[-1].gpus > PUBLISHED_GPUS


def scale_up(plan: EnginePlan, scaling: Scaling, predicted: Predicted) -> Curve:
    """Doubles the data-parallel replicas until a limit is reached."""
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
    """As parts of the step."""
    shares = {name: seconds / now.seconds for name, seconds in now.terms.items()}
    grew = {name: share - first.terms.get(name, 0.0) / first.seconds for name, share in shares.items()}
    name = max(grew, key=grew.__getitem__)
    return (name, grew[name]) if grew[name] > 0 else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The part of the time that trains, if GPUs fail and checkpoints are saved at the best interval."""

    part: float
    interval_s: float
    between_failures_s: float


def goodput(gpus: int, gpu_mtbf_h: float, save_s: float, restart_s: float) -> Goodput:
    """gpu_mtbf_h: hours between two failures of one GPU, with what it depends on. save_s: training that a checkpoint
    costs; restart_s: from a failure to the next step.

    The interval is that of Young (1974); lost are saves, half an interval and a restart for each failure, as Daly
    (2006) has it to first order.
    """
    mean_s = gpu_mtbf_h * 3600 / gpus
    interval_s = sqrt(2 * save_s * mean_s)
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / mean_s if interval_s else restart_s / mean_s
    return Goodput(max(0.0, 1 - lost), interval_s, mean_s)


def joules_per_token(prediction: Prediction, gpu: Gpu) -> float | None:
    """At most: all GPUs at their power limit, and nothing but GPUs. None if the limit is not known."""
    layout = prediction.plan.recipe.layout
    if gpu.tdp_w is None:
        return None
    return gpu.tdp_w * layout.gpus * prediction.seconds / (layout.gbs * layout.seq_len)
