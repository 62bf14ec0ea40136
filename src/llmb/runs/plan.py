# SPDX-License-Identifier: Apache-2.0
"""A plan: a recipe and everything else that decides a run."""

from collections.abc import Iterator
from typing import Literal

from llmb.catalogue.records import Dtype, Recipe, Record, Window
from llmb.errors import UsageError
from llmb.metrics.window import resolve_window

Device = Literal["cpu", "cuda"]
RECOMPUTE = ("none", "selective", "full")
MISSING = {"ep": "expert", "etp": "expert tensor"}


class Plan(Record):
    """What a worker needs to know. Together with the software and the machine it decides every number of a run."""

    recipe: Recipe
    device: Device
    steps: int
    window: Window
    seed: int
    recompute: Literal["none", "selective", "full"]


def make_plan(
    recipe: Recipe,
    *,
    device: Device,
    steps: int,
    window: str = "auto",
    seed: int = 1234,
    recompute: Literal["none", "selective", "full"] = "none",
    peak_lr: float | None = None,
    warmup_steps: int | None = None,
) -> Plan:
    """Checks that the engine can train ``recipe`` this way.

    Raises UsageError with all reasons why it cannot.
    """
    problems = list(_problems(recipe, steps, peak_lr, warmup_steps))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UsageError(f"this run cannot be planned:\n{lines}", do="see 'llmb run --help'")
    changes = {"peak_lr": peak_lr, "warmup_steps": warmup_steps}
    training = recipe.training.model_copy(update={k: v for k, v in changes.items() if v is not None})
    return Plan(
        recipe=recipe.model_copy(update={"training": training}),
        device=device,
        steps=steps,
        window=resolve_window(window, steps),
        seed=seed,
        recompute=recompute,
    )


def _problems(recipe: Recipe, steps: int, peak_lr: float | None, warmup_steps: int | None) -> Iterator[str]:
    if steps < 1:
        yield f"--steps is {steps}; it must be at least 1"
    if peak_lr is not None and not peak_lr > 0:
        yield f"--lr is {peak_lr}; it must be above 0"
    if warmup_steps is not None and warmup_steps < 0:
        yield f"--warmup-steps is {warmup_steps}; it must not be negative"
    for name, parallel in MISSING.items():
        size = getattr(recipe.layout, name)
        if size > 1:
            yield f"the engine has no {parallel} parallelism yet; this layout has {name.upper()} {size}"
    if recipe.task == "lora":
        yield "the engine trains all weights; it has no LoRA adapters yet"
    if recipe.dtype is Dtype.FP8:
        yield "the engine computes in fp32 and bf16; it has no fp8 yet"
