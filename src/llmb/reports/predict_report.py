# SPDX-License-Identifier: Apache-2.0
"""Predictions, searched layouts, and the memory of ranks, as tables, CSV and JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llmb.base.errors import LlmbError
from llmb.base.missing import Missing
from llmb.catalogue.records import PARALLEL, Recipe
from llmb.catalogue.resolve import CUSTOM
from llmb.catalogue.throughput import MFU, Throughput, throughput
from llmb.prediction.prediction import COLUMNS, PredictedRow, Prediction
from llmb.prediction.scale import (
    PUBLISHED_GPUS,
    Curve,
    Goodput,
    Scenario,
    TrainingCost,
    joules_per_token,
    training_cost,
)
from llmb.prediction.search import Candidate, Constraints, Goal, Remedy
from llmb.prediction.uncertainty import ErrorSource, error_sources
from llmb.reports.formats import cell, duration, formatted, interval_of, number, whole
from llmb.reports.recipe_report import CONVENTION_NAMES, identity_document
from llmb.reports.table import Column, Shown, Table, csv_text, fields_of, numbers, rows_table, table_of, texts
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_account import GIB, MARGIN_GIB, OWNERS, MemoryUse, RankAccount, RankMemory


@dataclass(frozen=True, slots=True)
class RunMemory(Shown):
    """The memory that the ranks of a recipe need, and changes that would make them fit if they do not."""

    recipe: Recipe
    use: MemoryUse
    remedies: Sequence[Remedy] = ()

    def tables(self) -> Iterator[Table]:
        use, fullest = self.use, self.use.fullest
        owners = (f"{owner}: bytes_by_owner.{owner}" for owner in OWNERS)
        columns = [
            *texts("rank", "stage: pp_stage", right=True),
            *numbers("peak GiB: peak_bytes", *owners, form=lambda size: number(round(size / GIB, 3))),
            *(numbers("TFLOPs: flops", form=lambda flops: number(flops / 1e12)) if use.method == "exact" else ()),
        ]
        notes = [fits_text(use), *(f"assumed: {each}" for each in use.assumptions)]
        yield table_of(self.recipe.title(), use.ranks, columns, caption=notes)
        if use.fits is False:
            columns = [
                *texts("with: options"),
                *numbers("needs about GiB: needed_gib"),
                *numbers("step: slower_pct", form=formatted("{:+.1f} %")),
                *texts("at the cost of: cost"),
            ]
            none = "no combination of up to three options makes it fit; more GPUs may help"
            yield table_of("it would fit", self.remedies, columns, caption="" if self.remedies else none)
        if isinstance(fullest, RankAccount) and fullest.collectives:
            columns = [*texts("kind", "group"), *numbers("number: count")]
            columns += numbers("GB: bytes", form=lambda size: number(size / 1e9))
            yield table_of(f"collectives of rank {fullest.rank} in a step", fullest.collectives, columns)

    def document(self) -> dict[str, Any]:
        """Return the JSON of ``llmb memory``; its keys are a contract."""
        return {
            **identity_document(self.recipe),
            **fields_of(self.use, "method", "capacity_gib", "needed_gib", "fits"),
            "margin_gib": MARGIN_GIB,
            **fields_of(self, "use.assumptions", "remedies"),
            "ranks": [_rank_document(each) for each in self.use.ranks],
        }


def _rank_document(memory: RankMemory) -> dict[str, Any]:
    document = {
        **fields_of(memory, "rank", "pp_stage"),
        "peak_gib": memory.peak_bytes / GIB,
        **{f"{owner}_gib": memory.bytes_by_owner[owner] / GIB for owner in OWNERS},
    }
    if isinstance(memory, RankAccount):  # an estimate is of memory alone
        collectives = [fields_of(each, "kind", "group", "count", "bytes") for each in memory.collectives]
        document |= {"flops": memory.flops, "collectives": collectives}
    return document


def fits_text(use: MemoryUse) -> str:
    """Return a sentence about whether the fullest rank fits into memory."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    tensors = f"{about}{number(fullest.peak_bytes / GIB)} GiB for tensors"
    if use.capacity_gib is None:
        return f"rank {fullest.rank} needs {tensors}; the memory of the device is unknown"
    verb = "fits" if use.fits else "does not fit"
    needs = f"{about}{number(use.needed_gib)} of {number(use.capacity_gib)} GiB on stage {fullest.pp_stage}"
    rest = f"about {number(MARGIN_GIB)} GiB for the CUDA context, NCCL and fragmentation"
    return f"{verb}: rank {fullest.rank} needs {needs}: {tensors}, and {rest}"


TERM_TITLES = {
    "products bf16": "GEMMs, BF16",
    "products fp8": "GEMMs, FP8",
    "products mxfp8": "GEMMs, MXFP8",
    "products nvfp4": "GEMMs, NVFP4",
    "products of experts": "grouped GEMMs of experts",
    "outputs of products": "GEMM outputs to memory",
    "casts": "casts to FP8 or FP4",
    "permutation of tokens": "token permutation, unfused operators",
    "routing": "kernels of MoE layers",
    "attention cut for overlap": "attention split for CP overlap",
    "tensor-parallel messages": "TP all-gather and reduce-scatter",
    "context-parallel messages": "CP exchange of keys and values",
    "messages of experts": "EP all-to-all",
    "messages between stages": "PP send and receive",
    "data-parallel messages beside work": "DP communication, hidden",
    "data-parallel messages waited for": "DP communication, exposed",
    "once a step": "optimizer step, fixed part",
}
"""Titles in tables for terms with other names in JSON documents."""


def term_title(name: str) -> str:
    return TERM_TITLES.get(name, name)


TRILLION = 1e12
SIZES = (*PARALLEL, "mbs", "gbs", "seq_len", "first_stage_layers", "last_stage_layers")
SIGNED = "{:+.3f}".format
BAR = 24
"""Length of the longest bar in characters."""
LEAST = 0.001
"""The smallest fraction of a step that has its own row."""


@dataclass(frozen=True, slots=True)
class RunPrediction(Shown):
    """The prediction of a run before it starts."""

    prediction: Prediction
    memory: MemoryUse | Missing
    curve: Curve | None = None
    goodput: Goodput | None = None
    imbalance: float | None = None
    """Tokens for the experts of the most heavily loaded rank, relative to the mean; None if the load is equal."""
    what_if: Sequence[Scenario] = ()
    tokens: float = TRILLION
    """The number of tokens to train on."""
    price: float | None = None
    """Price of a GPU hour."""

    def tables(self) -> Iterator[Table]:
        lacks = "DOES NOT FIT: " if self.memory and self.memory.fits is False else ""
        title = f"{lacks}PREDICTED {self.prediction.plan.recipe.title()}"
        memory, step = [_memory_row(self.memory)], [*_metrics(self)]
        rows = chain(memory, step) if lacks else chain(step, memory)
        yield rows_table(title, ("metric", "predicted", "note"), chain(rows, _further_rows(self)), right=("predicted",))
        yield waterfall("Where the step goes", self.prediction.terms)
        yield from _sources_table(self.error_sources)
        if curve := self.curve:
            columns = [
                *numbers("GPUs: gpus", "batch: prediction.plan.recipe.layout.gbs", form=whole),
                *numbers("step s: prediction.seconds"),
                *numbers("efficiency %: efficiency", form=lambda share: f"{100 * share:.1f}"),
                *texts("grew most: grew", form=lambda by: f"{term_title(by[0])}, +{100 * by[1]:.1f} %" if by else ""),
            ]
            above = f"; above {PUBLISHED_GPUS:,} GPUs no published step checks it" if curve.goes_beyond else ""
            yield table_of("PREDICTED scaling", curve.scales, columns, caption=f"no further: {curve.ends}{above}")
        if self.what_if:
            columns = [
                *texts("change"),
                *numbers("step s: step_time_s"),
                *numbers("step %: longer_pct", form=formatted("{:+.1f}")),
            ]
            yield table_of("What if", self.what_if, columns)

    def document(self) -> dict[str, Any]:
        """Return the JSON of ``llmb predict``; its keys are a contract."""
        prediction, figures = self.prediction, self.throughput
        memory = self.memory
        return {
            **identity_document(prediction.plan.recipe),
            "layout": prediction.plan.recipe.layout,
            **fields_of(prediction.plan, "recompute", "parallelism.dp_sharding", "parallelism.dp_shard_size"),
            **fields_of(prediction.plan, "parallelism.gradient_sync"),
            **fields_of(prediction, "step_time_s: seconds", "ci95_s: interval_s", "error_pct", "errors"),
            **fields_of(self, "error_sources", "prediction.calibration.software"),
            "breakdown_s": dict(prediction.terms),
            **fields_of(figures, "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"),
            **fields_of(figures, "days_per_1t_tokens", "reasons"),
            "memory": {
                "peak_gib": None if isinstance(memory, Missing) else memory.fullest.peak_bytes / GIB,
                **fields_of(memory or None, "needed_gib", "capacity_gib", "fits"),
                "reason": memory.reason if isinstance(memory, Missing) else None,
            },
            "energy_j_per_token_at_most": joules_per_token(prediction),
            **fields_of(self, "training", "prediction.beyond_nvlink"),
            "scaling": (curve := self.curve)
            and {"scales": [fields_of(each, *SCALE) for each in curve.scales], "ends": curve.ends},
            **fields_of(self, "what_if", "goodput", "imbalance"),
            **fields_of(prediction, "calibration: calibration.text", "calibration_factors: calibration.factors"),
            **fields_of(prediction, "unvalidated"),
            "published": [
                fields_of(each, "step_time_s", "source", "line") for each in prediction.plan.recipe.expectations
            ],
        }

    @property
    def error_sources(self) -> list[ErrorSource]:
        return error_sources(self.prediction)

    @property
    def training(self) -> TrainingCost | None:
        return _training(self.prediction, self.tokens, self.price)

    @property
    def throughput(self) -> Throughput:
        plan = self.prediction.plan
        return throughput(plan.recipe, self.prediction.seconds, lora=plan.lora)


SCALE = (
    *("gpus", "prediction.plan.recipe.layout.gbs", "step_time_s: prediction.seconds"),
    *("ci95_s: prediction.interval_s", "efficiency", "grew: grew.0"),
)


def _metrics(predicted: RunPrediction) -> Iterator[tuple[str, str, str]]:
    prediction, figures = predicted.prediction, predicted.throughput
    low, high = (100 * (each / prediction.seconds - 1) for each in prediction.interval_s)
    interval = f"95 % within {interval_of(prediction.interval_s)}, {low:+.0f} to {high:+.0f} %"
    yield "step time s", number(prediction.seconds), interval
    yield "software", "", _case_text(prediction)
    for published in prediction.plan.recipe.expectations:
        if published.kind == "table":
            far = 100 * (prediction.seconds / published.step_time_s - 1)
            yield "published s", number(published.step_time_s), f"the prediction is {far:+.1f} % from it"
    yield "tokens/s", f"{figures.tokens_per_s:,.0f}", ""
    for name, title in CONVENTION_NAMES.items():
        if (mfu := figures.mfu_pct[name]) is not None:
            yield "MFU %", number(mfu), title
    if MFU in figures.reasons:
        yield "MFU %", "n/a", figures.reasons[MFU]
    for crossing in prediction.beyond_nvlink:
        added = f"of the step are due to its messages over the network: {crossing.text}"
        yield f"{crossing.group} beyond NVLink", f"{_ms(crossing.added_s)} ms", added
    yield from _training_rows(predicted, figures.reasons.get("days_per_1t_tokens", ""))


def _training_rows(predicted: RunPrediction, why_unknown: str) -> Iterator[tuple[str, str, str]]:
    cost, per = predicted.training, f"per {_trillions(predicted.tokens)} tokens"
    if cost is None:
        yield f"days {per}", "", why_unknown
        return
    yield f"days {per}", number(cost.days), f"{cost.gpu_hours:,.0f} GPU hours"
    if cost.energy_mwh_at_most is not None:
        joules = number(joules_per_token(predicted.prediction))
        note = f"at most: GPUs alone, at their power limit; {joules} J/token"
        yield f"MWh {per}", number(cost.energy_mwh_at_most), note
    if cost.price is not None:
        yield f"price {per}", number(cost.price), f"at {predicted.price:g} per GPU hour"


def _training(prediction: Prediction, tokens: float, price: float | None) -> TrainingCost | None:
    """Return the cost of training on ``tokens``; None for a proxy, which has fewer layers than the model."""
    return None if prediction.plan.recipe.proxy else training_cost(prediction, tokens, price)


def _trillions(tokens: float) -> str:
    return f"{tokens / TRILLION:g}T"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:+,.0f}"


def _further_rows(predicted: RunPrediction) -> Iterator[tuple[str, str, str]]:
    prediction = predicted.prediction
    yield "layout", "", _layout_text(prediction.plan)
    if predicted.imbalance is not None:
        yield "imbalance", number(predicted.imbalance), "rows of experts on the fullest rank / mean, also in the memory"
    if good := predicted.goodput:
        failures = f"a failure every {duration(good.between_failures_s)}, checkpoints every {duration(good.interval_s)}"
        yield "goodput %", f"{100 * good.part:.1f}", failures
    yield "calibration", "", prediction.calibration.text
    for each in prediction.unvalidated:
        yield "not validated", "", each


LEAST_SHARE = 0.005
"""The smallest share of the interval's squared half-width with its own line."""


def _sources_table(sources: Sequence[ErrorSource]) -> Iterator[Table]:
    rows = [each for each in sources if each.share >= LEAST_SHARE]
    if len(rows) < 2:
        return
    columns: list[Column[ErrorSource]] = [
        *texts("source", form=term_title),
        *numbers("± %: pct", form=formatted("{:.1f}")),
        Column("share %", lambda each: 100 * each.share, formatted("{:.0f}"), right=True),
        *texts("basis"),
    ]
    yield table_of("Where the interval comes from", rows, columns, caption="± add in quadrature")


def _memory_row(memory: MemoryUse | Missing) -> tuple[str, str, str]:
    if isinstance(memory, Missing):
        return "memory GiB", "n/a", memory.reason
    fits = "fits" if memory.fits else "does not fit"
    fullest = f"rank {memory.fullest.rank} of stage {memory.fullest.pp_stage} needs the most"
    return "memory GiB", f"{memory.needed_gib:.1f} of {cell(memory.capacity_gib)}", f"{fits}: {fullest}"


def _case_text(prediction: Prediction) -> str:
    """Describe the assumed software, and the published steps from which the interval was derived, if any."""
    case = next(iter(prediction.errors.values()))
    basis = "assumed" if case.rows is None else f"of {case.rows} published steps"
    return f"{prediction.calibration.software}; interval {basis}: {case.text}"


def _layout_text(plan: EnginePlan) -> str:
    layout, ways = plan.recipe.layout, plan.parallelism
    sizes = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in (*PARALLEL, "dp", "mbs", "gbs"))
    within = "" if ways.dp_shard_size is None else f" within {ways.dp_shard_size}"
    return f"{sizes}; recompute {plan.recompute}, sharding {ways.sharding_text}{within}"


def waterfall(title: str, terms: Mapping[str, float], caption: str = "") -> Table:
    """Return a table of a predicted step's time, broken down by cause."""
    seconds = sum(terms.values())
    rows = sorted(((name, each) for name, each in terms.items() if each >= LEAST * seconds), key=lambda row: -row[1])
    if len(rows) < len(terms):
        rows.append(("others", seconds - sum(each for _, each in rows)))
    columns = [
        *texts("cause: 0", form=term_title),
        *numbers("s: 1"),
        *numbers("%: 1", form=lambda part: f"{100 * part / seconds:.1f}"),
        *texts(": 1", form=lambda part: "█" * max(1, round(BAR * part / rows[0][1]))),
    ]
    return table_of(title, rows, columns, caption=caption)


def rows_document(rows: Iterable[PredictedRow]) -> list[dict[str, Any]]:
    document = []
    for row in rows:
        one: dict[str, Any] = {"line": row.line, **row.columns, "step_time_s": None, "reason": None}
        if isinstance(row.outcome, LlmbError):
            one["reason"] = row.outcome.what
        else:
            layout, seconds, (low, high) = row.outcome.plan.recipe.layout, row.outcome.seconds, row.outcome.interval_s
            one |= {"step_time_s": seconds, "low_s": low, "high_s": high}
            one["tokens_per_s"] = layout.gbs * layout.seq_len / seconds
        document.append(one)
    return document


def rows_csv(rows: Iterable[PredictedRow]) -> str:
    names = (*COLUMNS, "step_time_s", "low_s", "high_s", "tokens_per_s", "reason")
    return csv_text(texts(*names), rows_document(rows))


@dataclass(frozen=True, slots=True)
class LayoutPlan(Shown):
    """Layouts that fit, the best first, and the recipe's own, which may not fit. ``price`` is per GPU hour, and
    ``tokens`` is the number of tokens to train on."""

    goal: Goal
    recipe: Recipe
    constraints: Constraints
    layouts: tuple[Candidate, ...]
    own: Candidate | Missing
    searched: int
    left_out: Mapping[str, int]
    price: float | None = None
    tokens: float | None = None

    def tables(self) -> Iterator[Table]:
        own, recipe, rows = self.own, self.recipe, self.rows
        varying = ("gpus", "seq_len", "ep", "etp")
        fixed = [name for name in varying if len({getattr(one.plan.recipe.layout, name) for _, one in rows}) < 2]
        sizes = [name for name in ("gpus", "seq_len", *PARALLEL, "mbs") if name not in fixed]
        columns: list[Column[tuple[str, Candidate]]] = [
            *texts(": 0", right=True),
            *texts(*(f"{name}: 1.plan.recipe.layout.{name}" for name in sizes), right=True),
            *texts("recompute: 1.plan.recompute", "sharding: 1.plan.parallelism.sharding_text"),
            *numbers("step s: 1.prediction.seconds"),
            Column("tokens/s/GPU", lambda row: _tokens_per_gpu(row[1]), number),
            Column("GiB", lambda row: f"{row[1].memory.needed_gib:.0f}{self._limit(row[1])}"),
        ]
        title = f"PREDICTED layouts of {recipe.model_name} {recipe.dtype} on {recipe.layout.gpus} x {recipe.gpu_type}"
        options = "".join(f", --{name.replace('_', '-')} {value}" for name, value in self.constraints.items())
        yield table_of(f"{title}{options}", rows, columns, caption=_plan_notes(self))
        if self.price is not None or self.tokens is not None:
            yield self._training_table()
        if self.layouts and own:
            yield _differences(self.layouts[0].prediction, own.prediction)

    @property
    def rows(self) -> list[tuple[str, Candidate]]:
        """Return the layouts, named by their place in the list, and then the recipe's layout, if known."""
        rows = [(str(place), each) for place, each in enumerate(self.layouts, start=1)]
        return [*rows, (_own_name(self.recipe), self.own)] if isinstance(self.own, Candidate) else rows

    def _training_table(self) -> Table:
        priced = [f"price: {self.price:g} per GPU hour"] if self.price is not None else []
        columns: list[Column[tuple[str, TrainingCost | None]]] = [
            *texts(": 0", right=True),
            *numbers("days: 1.days", "GPU hours: 1.gpu_hours", "MWh at most: 1.energy_mwh_at_most"),
            *(numbers("price: 1.price") if priced else ()),
        ]
        costs = [(name, self.training(one)) for name, one in self.rows]
        notes = ["energy: of GPUs alone, at their power limit", *priced]
        title = f"PREDICTED training on {_trillions(self.tokens or TRILLION)} tokens"
        return table_of(title, costs, columns, caption=notes)

    def training(self, one: Candidate) -> TrainingCost | None:
        return _training(one.prediction, self.tokens or TRILLION, self.price)

    def document(self) -> dict[str, Any]:
        """Return the JSON of ``llmb plan``; its keys are a contract."""
        own = self.own
        return {
            **identity_document(self.recipe),
            **fields_of(self, "goal", "constraints"),
            "layouts": [_layout_document(self, each) for each in self.layouts],
            "recipe_layout": {**_layout_document(self, own), "fits": own.memory.fits} if own else None,
            "recipe_left_out": own.reason if isinstance(own, Missing) else None,
            **fields_of(self, "searched", "left_out", "first.error_pct"),
            "tied": len(self.tied),
            **fields_of(self, "better_than_recipe_pct: ahead_pct", "calibration: first.calibration.text"),
            "unvalidated": self.first.unvalidated,
        }

    @property
    def first(self) -> Prediction:
        """Return the best layout's prediction, or else the recipe's."""
        return next(each for each in (*self.layouts, self.own) if isinstance(each, Candidate)).prediction

    def cost(self, one: Candidate) -> float:
        """Return the objective of the search, which is minimized: seconds, or GPU seconds, per step."""
        return one.prediction.seconds * (one.plan.recipe.layout.gpus if self.goal == "token" else 1)

    @property
    def ahead_pct(self) -> float | None:
        """Return the improvement of the first layout over the recipe in percent; None unless both are known and fit."""
        if not self.own or not self.layouts or self.exceeds(self.own):
            return None
        return 100 * (self.cost(self.own) / self.cost(self.layouts[0]) - 1)

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Return the first layout, and layouts that cost more than the first by at most the prediction's error."""
        most = 1 + self.first.error_pct / 100
        return tuple(one for one in self.layouts if self.cost(one) <= most * self.cost(self.layouts[0]))

    def exceeds(self, one: Candidate) -> bool:
        needed = one.memory.needed_gib
        return one.memory.fits is False or needed > self.constraints.get("max_memory_gib", needed)

    def _limit(self, one: Candidate) -> str:
        capacity = one.memory.capacity_gib
        return f"{'' if capacity is None else f'/{capacity:g}'}{' does not fit' if self.exceeds(one) else ''}"


def _layout_document(found: LayoutPlan, one: Candidate) -> dict[str, Any]:
    return {
        **fields_of(one.plan.recipe.layout, "gpus", *SIZES),
        **fields_of(one.plan, "recompute", "parallelism.dp_sharding", "parallelism.gradient_sync"),
        **fields_of(one.prediction, "step_time_s: seconds", "ci95_s: interval_s", "breakdown_s: terms"),
        "tokens_per_s_per_gpu": _tokens_per_gpu(one),
        "peak_gib": one.memory.fullest.peak_bytes / GIB,
        "needed_gib": one.memory.needed_gib,
        "price_per_1t_tokens": training_cost(one.prediction, TRILLION, found.price).price,
        "training": found.training(one),
        **fields_of(one.prediction, "beyond_nvlink"),
    }


def _tokens_per_gpu(one: Candidate) -> float:
    layout = one.plan.recipe.layout
    return layout.gbs * layout.seq_len / one.prediction.seconds / layout.gpus


def _own_name(recipe: Recipe) -> str:
    return "adapted" if recipe.overridden or any(note.startswith(CUSTOM) for note in recipe.decisions) else "recipe"


def left_out_text(found: LayoutPlan) -> str:
    reasons = sorted(found.left_out.items(), key=lambda each: -each[1])
    left = ", ".join(f"{number:,} {reason}" for reason, number in reasons if number)
    return f"of {found.searched:,} ways {left}"


def _plan_notes(found: LayoutPlan) -> Iterator[str]:
    own, ahead, tied = found.own, found.ahead_pct, found.tied
    within = f"±{found.first.error_pct:.0f} %"
    better, worse = ("faster", "slower") if found.goal == "step" else ("cheaper", "more expensive")
    yield f"{left_out_text(found)}; steps are within {within}"
    yield f"not searched: {'' if 'tp' in found.constraints else 'TP above 8, '}offloading to the CPU"
    if any(one.plan.syncs_each_pass for one in found.layouts):
        yield "synced: --gradient-sync micro-batch"
    yield from _crossing_notes(found)
    if found.recipe.proxy:
        yield f"a proxy was searched: for the whole model, add --layers {found.recipe.full_layers}"
    if ahead is not None and ahead > found.first.error_pct:
        yield f"the first is {ahead:.1f} % {better} than the recipe"
    elif ahead is not None and ahead >= 0:
        yield f"none is distinguishably {better} than the recipe: {ahead:.1f} % of {within}"
    elif ahead is not None:
        yield f"none is {better} than the recipe: the first is {-ahead:.1f} % {worse}"
    if len(tied) > 1:
        apart = 100 * (found.cost(tied[-1]) / found.cost(tied[0]) - 1)
        yield f"1 to {len(tied)} are a tie: {apart:.1f} % apart, of {within}"
    if isinstance(own, Missing):
        yield f"the layout of the recipe is left out: {own.reason}"
    else:
        yield from (f"{_own_name(found.recipe)}: {note}" for note in found.recipe.decisions)


def _crossing_notes(found: LayoutPlan) -> Iterator[str]:
    """Yield a note per group of ranks beyond an NVLink domain, with the time that it adds to each layout's step."""
    added: dict[str, list[str]] = {}
    for name, one in found.rows:
        for crossing in one.prediction.beyond_nvlink:
            added.setdefault(crossing.text, []).append(f"{_ms(crossing.added_s)} ms in {name}")
    yield from (f"{text}, which adds to the step: {', '.join(each)}" for text, each in added.items())


def _differences(best: Prediction, own: Prediction) -> Table:
    changes = {name: abs(_of(best, name) - _of(own, name)) for name in (*own.terms, *best.terms)}
    shown = [name for name, change in changes.items() if change >= LEAST * own.seconds]
    names = [*sorted(shown, key=changes.__getitem__, reverse=True), "step"]
    rows = [(term_title(name), was := _of(own, name), now := _of(best, name), now - was) for name in names]
    columns = [*texts("cause: 0"), *numbers("recipe s: 1", "first s: 2"), *numbers("difference s: 3", form=SIGNED)]
    return table_of("The first layout compared with the recipe's", rows, columns)


def _of(prediction: Prediction, name: str) -> float:
    return prediction.seconds if name == "step" else prediction.terms.get(name, 0.0)


def campaign_text(found: LayoutPlan, repeats: int) -> str:
    """Return the text of a file for ``llmb bulk`` that runs each of the layouts, the best first."""
    lines = [f"# The layouts that 'llmb plan' proposes for {found.recipe.title()}, the best first."]
    for plan in (one.plan for one in found.layouts):
        recipe, layout = plan.recipe, fields_of(plan.recipe.layout, *SIZES)
        sizes = " ".join(f"{name}={value}" for name, value in layout.items() if value is not None)
        parallelism = plan.parallelism
        sync = "" if parallelism.gradient_sync == "step" else f" gradient_sync={parallelism.gradient_sync}"
        ways = f"recompute={plan.recompute} dp_sharding={parallelism.dp_sharding}{sync} repeats={repeats}"
        lines.append(f"{recipe.workload} {recipe.size} {recipe.dtype} {recipe.scale} {sizes} {ways}")
    return "\n".join([*lines, ""])
