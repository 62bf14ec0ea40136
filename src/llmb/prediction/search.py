# SPDX-License-Identifier: Apache-2.0
"""Searches for layouts with the fastest steps or cheapest tokens, and for changes with which a run fits. Pure."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from llmb.base.missing import Missing
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.records import PARALLEL, Layout, Model, Recipe
from llmb.prediction.memory import clearly_fits, estimate, settle_sharding, why_not_estimated
from llmb.prediction.prediction import Prediction
from llmb.runs.choices import (
    Choices,
    DpSharding,
    GradientSync,
    Parallelism,
    Recompute,
    communication_problems,
    keeps_logits,
)
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import MemoryUse, fullest_ranks

MICRO_BATCHES = (1, 2, 4, 8)
CONTEXT = (1, 2, 4, 8)
MOST_STAGES = 64
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[tuple[DpSharding, GradientSync], ...] = (
    ("optimizer", "step"),
    ("full", "step"),
    ("full", "micro-batch"),
)
"""``RECOMPUTES`` and ``SHARDINGS`` are usually in order of decreasing memory."""
ENDS = ("first_stage_layers", "last_stage_layers")
ALONE = {**dict.fromkeys((*PARALLEL, "mbs"), 1), **dict.fromkeys(ENDS), "counts_embedding_and_loss": False}
NOT_DIVISIBLE = "do not divide"
NO_MICRO_BATCHES = "have too few micro-batches for their pipeline"
TOO_LARGE = "do not fit"
SLOWER = "fit with less recomputed or sharded"
"""Candidates that are omitted because a faster candidate with the same layout fits."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, with its predicted step and memory."""

    prediction: Prediction
    memory: MemoryUse

    @property
    def plan(self) -> EnginePlan:
        return self.prediction.plan


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """The candidates that fit, the fastest or cheapest first, and the number of others by reason."""

    fitting: tuple[Candidate, ...]
    searched: int
    left_out: Mapping[str, int]


Constraints = Mapping[str, Any]
"""Required values by name: sizes of the layout, recompute, dp_sharding and gradient_sync; and a maximum,
max_memory_gib."""
NONE: Constraints = MappingProxyType({})
Predicted = Callable[[EnginePlan], Prediction]
Goal = Literal["step", "token"]


def search_for(goal: Goal, plan: EnginePlan, predicted: Predicted, constraints: Constraints = NONE) -> LayoutSearch:
    """Search for layouts with the fastest step or, on as many or fewer GPUs, the cheapest tokens."""
    if goal == "step":
        return search(plan, predicted, constraints)
    searches = [search(each, predicted, constraints) for each in at_fewer_gpus(plan)]
    left_out: Counter[str] = sum((Counter(each.left_out) for each in searches), Counter())
    found = [one for each in searches for one in each.fitting]
    found.sort(key=lambda one: one.prediction.seconds * one.plan.recipe.layout.gpus)
    return LayoutSearch(tuple(found), sum(each.searched for each in searches), left_out)


def search(plan: EnginePlan, predicted: Predicted, constraints: Constraints = NONE) -> LayoutSearch:
    """Search layouts for a plan, whose own may be invalid; raise UsageError if memory or time cannot be predicted."""
    left_out: Counter[str] = Counter()
    found, searched = [], 0
    recomputes, shardings = _values(constraints, "recompute", RECOMPUTES), _shardings(constraints)
    for layout in layouts(plan, left_out, constraints):
        useful = [each for each in shardings if layout.ga > 1 or each != SHARDINGS[-1]] or shardings
        ways = [_with(plan, layout, recompute, *sharding) for recompute, sharding in product(recomputes, useful)]
        searched += len(ways)
        # Between few ranks, fp32 shards and the buffers of their reduction may need more than accumulated gradients.
        if not any(_admits(constraints, _memory(way)) for way in reversed(ways[-2:])):
            left_out[TOO_LARGE] += len(ways)
            continue
        fastest, tried = _fastest(ways, predicted, constraints)
        found.append(fastest)
        left_out[TOO_LARGE] += tried - 1
        left_out[SLOWER] += len(ways) - tried
    found.sort(key=lambda each: each.prediction.seconds)
    return LayoutSearch(tuple(found), searched + left_out[NOT_DIVISIBLE] + left_out[NO_MICRO_BATCHES], left_out)


def _fastest(ways: Sequence[EnginePlan], predicted: Predicted, constraints: Constraints) -> tuple[Candidate, int]:
    """Return the fastest plan that fits, and the number of plans tried; one of the last two must fit."""
    once = [way for way in ways if way.parallelism.gradient_sync == "step"]
    frequent = {way.recompute: way for way in ways if way.parallelism.gradient_sync == "micro-batch"} if once else {}
    waiting = sorted(map(predicted, once or ways), key=attrgetter("seconds"))
    tried = 0
    while True:
        prediction = waiting.pop(0)
        plan, memory, tried = prediction.plan, _memory(prediction.plan), tried + 1
        if _admits(constraints, memory):
            return Candidate(prediction, memory), tried
        if plan.parallelism.dp_sharding == "full" and (same := frequent.pop(plan.recompute, None)):
            insort(waiting, predicted(same), key=attrgetter("seconds"))


def with_recipe(found: LayoutSearch, own: Candidate | Missing, constraints: Constraints) -> LayoutSearch:
    """Return ``found`` with a fitting recipe in place of slower candidates with its layout, or ``found`` unchanged."""
    if isinstance(own, Missing) or not _satisfies(own, constraints):
        return found
    layout = own.plan.recipe.layout
    others = [one for one in found.fitting if one.plan.recipe.layout == layout]
    if any(one.prediction.seconds <= own.prediction.seconds for one in others):
        return found
    kept = [one for one in found.fitting if one not in others]
    if any(one.plan.recipe.layout.gpus != layout.gpus for one in kept):
        return found
    return replace(found, fitting=tuple(sorted((*kept, own), key=lambda one: one.prediction.seconds)))


def _satisfies(own: Candidate, constraints: Constraints) -> bool:
    plan, use = own.plan, own.memory
    values = {**plan.recipe.layout.model_dump(), **plan.parallelism.model_dump(), "recompute": plan.recompute}
    fits = use.fits and use.needed_gib <= constraints.get("max_memory_gib", use.needed_gib)
    return bool(fits) and all(values.get(name, value) == value for name, value in constraints.items())


def plan_to_search(recipe: Recipe, choices: Choices) -> EnginePlan:
    """Return a recipe's plan with all parallel sizes and MBS set to 1."""
    alone = recipe.model_copy(update={"layout": recipe.layout.model_copy(update=ALONE)})
    usual = choices.model_copy(update={"parallelism": Parallelism(), "communication": Choices().communication})
    plan = make_plan(alone, usual, device="cuda", trains=False)
    parallelism = choices.parallelism.settled(alone).model_copy(update={"gradient_sync": "step"})
    return plan.model_copy(update={"parallelism": parallelism, "communication": choices.communication})


def predict_recipe(recipe: Recipe, choices: Choices, predicted: Predicted) -> Candidate | Missing:
    """Predict a recipe in its layout, without recompute, even if it does not fit; Missing if it is invalid."""
    own = choices.model_copy(update={"recompute": "none", "parallelism": Parallelism()})
    capacity = own.capacity_factor_of(recipe)
    others = communication_problems(own.communication, recipe, "cuda", recipe.lora, capacity)
    if problems := check_layout(recipe.model, recipe.layout) or [*own.parallelism.problems(recipe.layout), *others]:
        return Missing("; ".join(problems))
    plan = settle_sharding(make_plan(recipe, own, device="cuda", trains=False), own.parallelism)
    return Candidate(predicted(plan), estimate(plan))


def _admits(constraints: Constraints, use: MemoryUse) -> bool:
    return clearly_fits(use) and use.needed_gib <= constraints.get("max_memory_gib", use.needed_gib)


def _memory(plan: EnginePlan) -> MemoryUse:
    return estimate(plan, fullest_ranks(plan.recipe.layout))


def at_fewer_gpus(plan: EnginePlan) -> Iterator[EnginePlan]:
    """Yield the plan on all GPUs, on half of them, and so on while their number is even."""
    recipe, gpus = plan.recipe, plan.recipe.layout.gpus
    while True:
        layout = recipe.layout.model_copy(update={"gpus": gpus})
        yield plan.model_copy(update={"recipe": recipe.model_copy(update={"layout": layout, "scale": gpus})})
        if gpus % 2:
            return
        gpus //= 2


def layouts(plan: EnginePlan, left_out: Counter[str], constraints: Constraints = NONE) -> Iterator[Layout]:
    """Yield the valid layouts to try, and count the invalid ones in ``left_out`` by reason."""
    recipe, way, others = plan.recipe, plan.communication, (plan.device, plan.lora, plan.capacity_factor)
    base = recipe.layout
    for sizes in _sizes(recipe.model, base, constraints):
        layout = base.model_copy(update=sizes)
        if layout.gpus % (layout.tp * layout.pp * layout.cp) or layout.gbs % (layout.mbs * layout.dp):
            left_out[NOT_DIVISIBLE] += 1
        elif (layout.pp > 1 and layout.ga < layout.pp) or (layout.vp > 1 and layout.ga % layout.pp):
            left_out[NO_MICRO_BATCHES] += 1
        elif check_layout(recipe.model, layout) or any(plan.parallelism.problems(layout)):
            left_out[NOT_DIVISIBLE] += 1
        elif not any(communication_problems(way, recipe.model_copy(update={"layout": layout}), *others)):
            yield layout


def _sizes(model: Model, base: Layout, constraints: Constraints) -> Iterator[dict[str, Any]]:
    """Yield sizes to try. Unless constrained, TP is at most 8, and ETP is 1 or equal to TP."""
    stages = [pp for pp in range(1, min(MOST_STAGES, base.layers + 2) + 1) if base.gpus % pp == 0]
    experts = _divisors(model.moe.experts) if model.moe else [1]
    free = {"tp": (1, 2, 4, 8), "pp": stages, "cp": CONTEXT, "mbs": MICRO_BATCHES, "ep": experts}
    for sizes in product(*(_values(constraints, name, values) for name, values in free.items())):
        chosen = dict(zip(free, sizes, strict=True), sequence_parallel=True)
        for split in _splits(base.layers, chosen["pp"], constraints, uneven=model.other_parts is not None):
            for etp in _values(constraints, "etp", {1, chosen["tp"]} if model.moe else (1,)):
                yield {**chosen, "etp": etp, **split}


def _splits(layers: int, pp: int, constraints: Constraints, *, uneven: bool) -> Iterator[dict[str, Any]]:
    ends: dict[str, Any] = {"counts_embedding_and_loss": False, **{name: constraints.get(name) for name in ENDS}}
    has_own = any(name in constraints for name in ENDS)
    if pp == 1 or has_own or layers % pp == 0 or (uneven and pp <= layers):
        stages = [1] if pp == 1 or layers % pp else _divisors(layers if has_own else layers // pp)
        yield from ({"vp": vp, **ends} for vp in _values(constraints, "vp", stages))
    if pp > 1 and not has_own and (layers + 2) % pp == 0:
        for vp in _values(constraints, "vp", _divisors((layers + 2) // pp)):
            if pp * vp == len(ENDS) and layers % pp == 0:
                continue  # without stages between the ends, this is the even split
            less = (layers + 2) // (pp * vp) - 1
            yield {"vp": vp, **ends, "first_stage_layers": less, "last_stage_layers": less}


def _values(constraints: Constraints, name: str, free: Iterable[Any]) -> Iterable[Any]:
    return (constraints[name],) if name in constraints else free


def _shardings(constraints: Constraints) -> list[tuple[DpSharding, GradientSync]]:
    sharding, sync = constraints.get("dp_sharding"), constraints.get("gradient_sync")
    if sharding == "none":
        return [("none", "step")]
    return [each for each in SHARDINGS if sharding in (None, each[0]) and sync in (None, each[1])]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _with(
    plan: EnginePlan, layout: Layout, recompute: Recompute, sharding: DpSharding, sync: GradientSync
) -> EnginePlan:
    plan = _change_layout(plan, layout)
    parallelism = plan.parallelism.model_copy(update={"dp_sharding": sharding, "gradient_sync": sync})
    return plan.model_copy(update={"recompute": recompute, "parallelism": parallelism})


def _change_layout(plan: EnginePlan, layout: Layout) -> EnginePlan:
    """Return the plan in ``layout``, which also decides whether logits are kept, unless the plan overrides this."""
    recipe = plan.recipe.model_copy(update={"layout": layout})
    by_default = plan.keep_logits == keeps_logits(plan.recipe)
    keep = keeps_logits(recipe) if by_default else plan.keep_logits
    return plan.model_copy(update={"recipe": recipe, "keep_logits": keep})


MOST_REMEDIES = 3
MOST_CHANGES = 3
"""Maximum number of options that are changed together if fewer are not enough."""
MOST_TP = 8
"""Above this size, tensor parallelism spans nodes."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options with which a run fits, and their cost in words and in percent of the step, if predicted."""

    options: str
    needed_gib: float
    cost: str
    slower_pct: float | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """An option to try. ``apply`` returns None if the plan already has it or cannot have it."""

    option: str
    cost: str
    apply: Callable[[EnginePlan], EnginePlan | None]


StepTime = Callable[[EnginePlan], float | None]
"""Predicts the seconds of a step; None if they cannot be predicted."""


def remedies(plan: EnginePlan, step_time: StepTime = lambda _: None) -> list[Remedy]:
    """Return up to ``MOST_REMEDIES`` ways to make the plan fit: the fewest options first, then roughly the cheapest."""
    found: list[tuple[set[str], Remedy]] = []
    changes = list(_changes(plan))
    for number in range(1, MOST_CHANGES + 1):
        for chosen in combinations(changes, number):
            options = {change.option for change in chosen}
            if len(found) == MOST_REMEDIES or any(smaller <= options for smaller, _ in found):
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
    changed: EnginePlan | None = plan
    for change in changes:
        changed = change.apply(changed) if changed else None
    if changed is None or why_not_estimated(changed):
        return None
    use = estimate(changed)
    return (changed, use.needed_gib) if use.fits else None


def _changes(plan: EnginePlan) -> Iterator[_Change]:
    """Yield changes roughly from the cheapest to the most expensive in time."""
    layout = plan.recipe.layout
    yield _Change("--no-keep-logits", "logits are computed twice", partial(_changed, keep_logits=False))
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
        "--dp-sharding full", "parameters are gathered for each pass of each micro-batch", partial(_sharded, "full")
    )
    yield _Change("--gradient-sync micro-batch", "gradients are reduced for each micro-batch", _synced)


def _changed(plan: EnginePlan, **values: object) -> EnginePlan | None:
    changed = plan.model_copy(update=values)
    return None if changed == plan else changed


def _recomputed(mode: Recompute, plan: EnginePlan) -> EnginePlan | None:
    return _changed(plan, recompute=mode) if plan.recompute == "none" or mode == "full" else None


def _sharded(sharding: DpSharding, plan: EnginePlan) -> EnginePlan | None:
    now, layout = plan.parallelism.dp_sharding, plan.recipe.layout
    if now == "full" or now == sharding or max(layout.dp * layout.cp, layout.edp) == 1:
        return None
    return _changed(plan, parallelism=plan.parallelism.model_copy(update={"dp_sharding": sharding}))


def _synced(plan: EnginePlan) -> EnginePlan | None:
    if not plan.compute_path.shards_parameters or plan.recipe.layout.ga == 1:
        return None
    return _changed(plan, parallelism=plan.parallelism.model_copy(update={"gradient_sync": "micro-batch"}))


def _laid_out(name: str, size: int, plan: EnginePlan) -> EnginePlan | None:
    layout = plan.recipe.layout.model_copy(update={name: size})
    if layout.tp > max(MOST_TP, plan.recipe.layout.tp) or check_layout(plan.recipe.model, layout):
        return None
    if any(plan.parallelism.problems(layout)):
        return None
    changed = _change_layout(plan, layout)
    return None if changed == plan else changed
