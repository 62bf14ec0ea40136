# SPDX-License-Identifier: Apache-2.0
"""Changes with which a run that does not fit its GPUs would, by the estimate, and what they cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from llmb.catalogue.layout_check import check_layout
from llmb.predict.memory import estimate, why_not_estimated
from llmb.runs.choices import Recompute, keeps_logits
from llmb.runs.parallelism import DpSharding
from llmb.runs.plan import EnginePlan

MOST_REMEDIES = 3
MOST_CHANGES = 3
"""Options that are changed together if fewer do not suffice."""
MOST_TP = 8
"""With more, tensor parallelism leaves the node."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options with which the run fits, what the fullest rank then needs, and what they cost: in words, and in percent
    of the predicted step; None where nothing is predicted."""

    options: str
    needed_gib: float
    cost: str
    slower_pct: float | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """``apply`` returns the plan with the option, or None if it has it already, or cannot have it."""

    option: str
    cost: str
    apply: Callable[[EnginePlan], EnginePlan | None]


StepTime = Callable[[EnginePlan], float | None]
"""Seconds that a step is predicted to take, or None."""


def remedies(plan: EnginePlan, step_time: StepTime = lambda _: None) -> list[Remedy]:
    """The cheapest changes that suffice, single ones before those of several options; empty if none is known."""
    found: list[tuple[set[str], Remedy]] = []
    changes = list(_changes(plan))
    for number in range(1, MOST_CHANGES + 1):
        for chosen in combinations(changes, number):
            options = {change.option for change in chosen}
            if len(found) == MOST_REMEDIES or any(known <= options for known, _ in found):
                continue
            if fitting := _fitting(plan, chosen):
                changed, needed_gib = fitting
                costs, words = "; ".join(change.cost for change in chosen), " ".join(each.option for each in chosen)
                found.append((options, Remedy(words, needed_gib, costs, _slower_pct(plan, changed, step_time))))
    return [remedy for _, remedy in found]


def _slower_pct(plan: EnginePlan, changed: EnginePlan, step_time: StepTime) -> float | None:
    before, after = step_time(plan), step_time(changed)
    return None if before is None or after is None else 100 * (after / before - 1)


def _fitting(plan: EnginePlan, changes: tuple[_Change, ...]) -> tuple[EnginePlan, float] | None:
    """The plan with these changes, and what its fullest rank needs; None if it does not fit, or they exclude each
    other."""
    changed: EnginePlan | None = plan
    for change in changes:
        changed = change.apply(changed) if changed else None
    if changed is None or why_not_estimated(changed):
        return None
    use = estimate(changed)
    return (changed, use.needed_gib) if use.fits else None


def _changes(plan: EnginePlan) -> Iterator[_Change]:
    """Roughly from what costs least time to what costs most."""
    layout = plan.recipe.layout
    yield _Change("--no-keep-logits", "logits are computed twice", partial(_with, keep_logits=False))
    yield _Change("--dp-sharding optimizer", "parameters are gathered once a step", partial(_sharded, "optimizer"))
    yield _Change("--recompute selective", "activation functions are computed twice", partial(_recomputed, "selective"))
    sizes = (
        ("mbs", layout.mbs // 2, "twice as many products, of half the size"),
        ("ep", 2 * layout.ep, "tokens are sent to more ranks"),
        ("tp", 2 * layout.tp, "hidden states are exchanged between more ranks, in every layer"),
        ("cp", 2 * layout.cp, "keys and values are exchanged between more ranks, in every layer"),
        ("pp", 2 * layout.pp, "a longer bubble in every step"),
    )
    yield from (_Change(f"--{name} {size}", cost, partial(_laid_out, name, size)) for name, size, cost in sizes)
    yield _Change(
        "--recompute full",
        "the forward pass of every block is computed twice: a third more FLOPs",
        partial(_recomputed, "full"),
    )
    yield _Change(
        "--dp-sharding full",
        "parameters are gathered for each pass of each micro-batch",
        partial(_sharded, "full"),
    )


def _with(plan: EnginePlan, **values: object) -> EnginePlan | None:
    changed = plan.model_copy(update=values)
    return None if changed == plan else changed


def _recomputed(mode: Recompute, plan: EnginePlan) -> EnginePlan | None:
    return _with(plan, recompute=mode) if plan.recompute == "none" or mode == "full" else None


def _sharded(sharding: DpSharding, plan: EnginePlan) -> EnginePlan | None:
    """Only more than it is, and only where there are ranks to share with."""
    now, layout = plan.parallelism.dp_sharding, plan.recipe.layout
    if now == "full" or now == sharding or max(layout.dp * layout.cp, layout.edp) == 1:
        return None
    return _with(plan, parallelism=plan.parallelism.model_copy(update={"dp_sharding": sharding}))


def _laid_out(name: str, size: int, plan: EnginePlan) -> EnginePlan | None:
    """The layout must stay valid with the same GPUs and the same batch."""
    layout = plan.recipe.layout.model_copy(update={name: size})
    if layout.tp > max(MOST_TP, plan.recipe.layout.tp) or check_layout(plan.recipe.model, layout):
        return None
    if any(plan.parallelism.problems(layout)):
        return None
    recipe = plan.recipe.model_copy(update={"layout": layout})
    by_default = plan.keep_logits == keeps_logits(plan.recipe)
    return _with(plan, recipe=recipe, keep_logits=keeps_logits(recipe) if by_default else plan.keep_logits)
