# SPDX-License-Identifier: Apache-2.0
"""Predictions, and the memory of ranks, as tables and JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmb.base.errors import LlmbError
from llmb.base.missing import Missing
from llmb.catalogue.records import PARALLEL, Recipe
from llmb.catalogue.resolve import CUSTOM
from llmb.catalogue.throughput import MFU, Throughput, throughput
from llmb.prediction.prediction import COLUMNS, PredictedRow, Prediction
from llmb.prediction.scale import PUBLISHED_GPUS, Curve, Goodput
from llmb.prediction.search import Candidate, Constraints, Goal, Remedy
from llmb.reports.formats import cell, duration, interval_of, number
from llmb.reports.recipe_report import CONVENTION_NAMES, identity_document
from llmb.reports.table import Column, Shown, Table, csv_text, fields_of, number_column, result_table, table_of
from llmb.runs.rank_account import GIB, MARGIN_GIB, OWNERS, CollectiveCount, MemoryUse, RankAccount, RankMemory

SHOWN = ("kind", "group", "count", "bytes")
"""Columns of collectives."""


@dataclass(frozen=True, slots=True)
class RunMemory(Shown):
    """The memory that the ranks of a recipe need, and changes with which they would fit, if they do not."""

    recipe: Recipe
    use: MemoryUse
    remedies: Sequence[Remedy] = ()

    def tables(self) -> Iterator[Table]:
        return memory_tables(self)

    def to_dict(self) -> dict[str, Any]:
        return memory_document(self)


def memory_document(counted: RunMemory) -> dict[str, Any]:
    """The JSON of ``llmb memory``; its keys are a contract."""
    use = counted.use
    return {
        **identity_document(counted.recipe),
        **fields_of(use, "method", "capacity_gib", "needed_gib", "fits"),
        "margin_gib": MARGIN_GIB,
        "assumptions": list(use.assumptions),
        "remedies": [asdict(each) for each in counted.remedies],
        "ranks": [_rank_document(each) for each in use.ranks],
    }


def _rank_document(memory: RankMemory) -> dict[str, Any]:
    document: dict[str, Any] = {
        "rank": memory.rank,
        "pp_stage": memory.pp_stage,
        "peak_gib": memory.peak_bytes / GIB,
        **{f"{owner}_gib": memory.bytes_by_owner[owner] / GIB for owner in OWNERS},
    }
    if isinstance(memory, RankAccount):  # an estimate is of memory alone
        document |= {
            "flops": memory.flops,
            "collectives": [each.model_dump(include=set(SHOWN)) for each in memory.collectives],
        }
    return document


def memory_tables(counted: RunMemory) -> Iterator[Table]:
    use = counted.use
    columns = [
        Column[RankMemory]("rank", lambda each: each.rank, right=True),
        Column[RankMemory]("stage", lambda each: each.pp_stage, right=True),
        number_column("peak GiB", lambda each: each.peak_bytes / GIB),
        *(_owner_column(owner) for owner in OWNERS),
    ]
    if use.method == "exact":
        columns.append(
            number_column("TFLOPs", lambda each: each.flops / 1e12 if isinstance(each, RankAccount) else None)
        )
    memory = table_of(counted.recipe.title(), use.ranks, columns)
    memory.caption = "\n".join([fits_text(use), *(f"assumed: {each}" for each in use.assumptions)])
    yield memory
    if use.fits is False:
        yield _remedy_table(counted.remedies)
    fullest = use.fullest
    if isinstance(fullest, RankAccount) and fullest.collectives:
        yield table_of(
            f"collectives of rank {fullest.rank} in a step",
            fullest.collectives,
            [
                Column[CollectiveCount]("kind", lambda each: each.kind),
                Column[CollectiveCount]("group", lambda each: each.group),
                number_column("number", lambda each: each.count),
                number_column("GB", lambda each: each.bytes / 1e9),
            ],
        )


def _owner_column(owner: str) -> Column[RankMemory]:
    return number_column(owner, lambda each: each.bytes_by_owner[owner] / GIB)


def _remedy_table(found: Sequence[Remedy]) -> Table:
    columns = [
        Column[Remedy]("with", lambda each: each.options),
        number_column("needs about GiB", lambda each: each.needed_gib),
        Column[Remedy]("step", lambda each: "" if each.slower_pct is None else f"{each.slower_pct:+.1f} %", right=True),
        Column[Remedy]("at the cost of", lambda each: each.cost),
    ]
    table = table_of("it would fit", found, columns)
    if not found:
        table.caption = "no three options are known with which it would; more GPUs may help"
    return table


def fits_text(use: MemoryUse) -> str:
    """Return a sentence about whether the fullest rank fits."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    tensors = f"{about}{number(fullest.peak_bytes / GIB)} GiB for tensors"
    if use.capacity_gib is None:
        return f"rank {fullest.rank} needs {tensors}; the memory of the device is unknown"
    verb = "fits" if use.fits else "does not fit"
    needs = f"{about}{number(use.needed_gib)} of {number(use.capacity_gib)} GiB on stage {fullest.pp_stage}"
    return f"{verb}: rank {fullest.rank} needs {needs}, {tensors} and about {number(MARGIN_GIB)} beside them"


TERM_TITLES = {
    "products bf16": "GEMMs, BF16",
    "products fp8": "GEMMs, FP8",
    "outputs of products": "GEMM outputs to memory",
    "products cut for overlap": "GEMMs split for TP overlap",
    "attention cut for overlap": "attention split for CP overlap",
    "tensor-parallel messages": "TP all-gather and reduce-scatter",
    "context-parallel messages": "CP exchange of keys and values",
    "messages of experts": "EP all-to-all",
    "messages between stages": "PP send and receive",
    "data-parallel messages beside work": "DP communication, hidden",
    "data-parallel messages waited for": "DP communication, exposed",
    "once a step": "optimizer step, fixed part",
}
"""Titles in tables for terms whose names in JSON documents are not those that engineers use."""


def term_title(name: str) -> str:
    return TERM_TITLES.get(name, name)


SECONDS_PER_HOUR = 3600
BAR = 24
"""Characters of the longest bar."""
LEAST = 0.001
"""The smallest share of a step with its own line."""


@dataclass(frozen=True, slots=True)
class RunPrediction(Shown):
    """The prediction of a run before it starts."""

    prediction: Prediction
    memory: MemoryUse | Missing
    energy_j_per_token: float | None = None
    curve: Curve | None = None
    goodput: Goodput | None = None

    def tables(self) -> Iterator[Table]:
        return predict_tables(self)

    def to_dict(self) -> dict[str, Any]:
        return predict_document(self)

    @property
    def throughput(self) -> Throughput:
        plan = self.prediction.plan
        return throughput(plan.recipe, self.prediction.seconds, lora=plan.lora)


def predict_document(predicted: RunPrediction) -> dict[str, Any]:
    """The JSON of ``llmb predict``; its keys are a contract."""
    prediction, figures = predicted.prediction, predicted.throughput
    memory = predicted.memory
    known = None if isinstance(memory, Missing) else memory
    return {
        **identity_document(prediction.plan.recipe),
        "step_time_s": prediction.seconds,
        "ci95_s": prediction.interval_s,
        "error_pct": prediction.error_pct,
        "errors": {name: each.model_dump() for name, each in prediction.errors.items()},
        "breakdown_s": dict(prediction.terms),
        **fields_of(figures, "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"),
        **fields_of(figures, "days_per_1t_tokens", "reasons"),
        "memory": {
            "peak_gib": known and known.fullest.peak_bytes / GIB,
            "needed_gib": known and known.needed_gib,
            "capacity_gib": known and known.capacity_gib,
            "fits": known and known.fits,
            "reason": memory.reason if isinstance(memory, Missing) else None,
        },
        "energy_j_per_token_at_most": predicted.energy_j_per_token,
        "scaling": predicted.curve and _curve_document(predicted.curve),
        "goodput": predicted.goodput and asdict(predicted.goodput),
        "calibration": prediction.calibration.text,
        "unvalidated": list(prediction.unvalidated),
        "published": [fields_of(each, "step_time_s", "source", "line") for each in prediction.plan.recipe.expectations],
    }


def _curve_document(curve: Curve) -> dict[str, Any]:
    scales = [
        {
            "gpus": each.gpus,
            "gbs": each.prediction.plan.recipe.layout.gbs,
            "step_time_s": each.prediction.seconds,
            "ci95_s": each.prediction.interval_s,
            "efficiency": each.efficiency,
            "grew": each.grew and each.grew[0],
        }
        for each in curve.scales
    ]
    return {"scales": scales, "ends": curve.ends}


def predict_tables(predicted: RunPrediction) -> Iterator[Table]:
    prediction, figures = predicted.prediction, predicted.throughput
    recipe = prediction.plan.recipe
    table = result_table(f"PREDICTED {recipe.title()}", "metric", "predicted", "note", right=("predicted",))
    interval = f"95 % within {interval_of(prediction.interval_s)}, ±{prediction.error_pct:.0f} %"
    table.add_row("step time s", number(prediction.seconds), interval)
    for published in recipe.expectations:
        if published.kind == "table":
            far = 100 * (prediction.seconds / published.step_time_s - 1)
            table.add_row("published s", number(published.step_time_s), f"the prediction is {far:+.1f} % from it")
    table.add_row("tokens/s", f"{figures.tokens_per_s:,.0f}", "")
    for name, title in CONVENTION_NAMES.items():
        if (mfu := figures.mfu_pct[name]) is not None:
            table.add_row("MFU %", number(mfu), title)
    if MFU in figures.reasons:
        table.add_row("MFU %", "n/a", figures.reasons[MFU])
    days = figures.days_per_1t_tokens
    table.add_row("days per 1T tokens", cell(days), figures.reasons.get("days_per_1t_tokens", ""))
    memory = predicted.memory
    table.add_row("memory GiB", *(("n/a", memory.reason) if isinstance(memory, Missing) else _memory_figure(memory)))
    if predicted.energy_j_per_token is not None:
        table.add_row("J per token", number(predicted.energy_j_per_token), "at most: GPUs alone, at their power limit")
    if good := predicted.goodput:
        failures = f"a failure every {duration(good.between_failures_s)}, checkpoints every {duration(good.interval_s)}"
        table.add_row("goodput %", f"{100 * good.part:.1f}", failures)
    table.add_row("calibration", "", prediction.calibration.text)
    for each in prediction.unvalidated:
        table.add_row("not validated", "", each)
    yield table
    yield waterfall("Where the step goes", prediction.terms)
    if predicted.curve:
        yield _curve_table(predicted.curve)


def _memory_figure(use: MemoryUse) -> tuple[str, str]:
    fullest = f"rank {use.fullest.rank} of stage {use.fullest.pp_stage} needs the most"
    needed = f"{use.needed_gib:.1f} of {cell(use.capacity_gib)}"
    return needed, f"{'fits' if use.fits else 'does not fit'}: {fullest}"


def _curve_table(curve: Curve) -> Table:
    table = table_of(
        "PREDICTED scaling",
        curve.scales,
        [
            number_column("GPUs", lambda each: each.gpus, lambda gpus: f"{gpus:,}"),
            number_column("batch", lambda each: each.prediction.plan.recipe.layout.gbs, lambda batch: f"{batch:,}"),
            number_column("step s", lambda each: each.prediction.seconds),
            Column("efficiency %", lambda each: f"{100 * each.efficiency:.1f}", right=True),
            Column(
                "grew most",
                lambda each: f"{term_title(each.grew[0])}, +{100 * each.grew[1]:.1f} %" if each.grew else "",
            ),
        ],
    )
    above = f"; above {PUBLISHED_GPUS:,} GPUs no published step checks it" if curve.goes_beyond else ""
    table.caption = f"no further: {curve.ends}{above}"
    return table


def waterfall(title: str, terms: Mapping[str, float]) -> Table:
    """Return a table of the time of a predicted step by cause."""
    seconds = sum(terms.values())
    rows = sorted(((name, each) for name, each in terms.items() if each >= LEAST * seconds), key=lambda row: -row[1])
    if len(rows) < len(terms):
        rows.append(("others", seconds - sum(each for _, each in rows)))
    return table_of(
        title,
        rows,
        [
            Column("cause", lambda row: term_title(row[0])),
            Column("s", lambda row: number(row[1]), right=True),
            Column("%", lambda row: f"{100 * row[1] / seconds:.1f}", right=True),
            Column("", lambda row: "█" * max(1, round(BAR * row[1] / rows[0][1]))),
        ],
    )


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
    return csv_text(names, rows_document(rows))


@dataclass(frozen=True, slots=True)
class LayoutPlan(Shown):
    """Layouts that fit, the best first, and the recipe's own, which may not; price: of a GPU hour."""

    goal: Goal
    recipe: Recipe
    constraints: Constraints
    layouts: tuple[Candidate, ...]
    own: Candidate | Missing
    searched: int
    left_out: Mapping[str, int]
    price: float | None = None

    def tables(self) -> Iterator[Table]:
        return plan_tables(self)

    def to_dict(self) -> dict[str, Any]:
        return plan_document(self)

    @property
    def first(self) -> Prediction:
        """The best layout's prediction, else the recipe's."""
        return next(each for each in (*self.layouts, self.own) if isinstance(each, Candidate)).prediction

    def cost(self, one: Candidate) -> float:
        """Return the objective of the search, which is minimized."""
        return one.prediction.seconds * (one.plan.recipe.layout.gpus if self.goal == "token" else 1)

    @property
    def ahead_pct(self) -> float | None:
        """The improvement of the first layout over the recipe; None if the recipe does not fit."""
        if not self.own or not self.layouts or self.exceeds(self.own):
            return None
        return 100 * (self.cost(self.own) / self.cost(self.layouts[0]) - 1)

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """The layouts whose predictions do not differ significantly from the first."""
        most = 1 + self.first.error_pct / 100
        return tuple(one for one in self.layouts if self.cost(one) <= most * self.cost(self.layouts[0]))

    def exceeds(self, one: Candidate) -> bool:
        needed = one.memory.needed_gib
        return one.memory.fits is False or needed > self.constraints.get("max_memory_gib", needed)

    def price_per_1t(self, one: Candidate) -> float | None:
        """Return the price of a trillion tokens."""
        if self.price is None:
            return None
        layout, seconds = one.plan.recipe.layout, one.prediction.seconds
        return self.price * layout.gpus * seconds / SECONDS_PER_HOUR / (layout.gbs * layout.seq_len) * 1e12


def plan_document(found: LayoutPlan) -> dict[str, Any]:
    """The JSON of ``llmb plan``; its keys are a contract."""
    own = found.own
    return {
        **identity_document(found.recipe),
        "goal": found.goal,
        "constraints": dict(found.constraints),
        "layouts": [_layout_document(found, each) for each in found.layouts],
        "recipe_layout": {**_layout_document(found, own), "fits": own.memory.fits} if own else None,
        "recipe_left_out": own.reason if isinstance(own, Missing) else None,
        "searched": found.searched,
        "left_out": dict(found.left_out),
        "error_pct": found.first.error_pct,
        "tied": len(found.tied),
        "better_than_recipe_pct": found.ahead_pct,
        "calibration": found.first.calibration.text,
        "unvalidated": list(found.first.unvalidated),
    }


def _layout_document(found: LayoutPlan, one: Candidate) -> dict[str, Any]:
    layout, plan = one.plan.recipe.layout, one.plan
    names = ("gpus", *PARALLEL, "mbs", "gbs", "seq_len", "first_stage_layers", "last_stage_layers")
    return {
        **fields_of(layout, *names),
        "recompute": plan.recompute,
        "dp_sharding": plan.parallelism.dp_sharding,
        "step_time_s": one.prediction.seconds,
        "ci95_s": one.prediction.interval_s,
        "breakdown_s": dict(one.prediction.terms),
        "tokens_per_s_per_gpu": _tokens_per_gpu(one),
        "peak_gib": one.memory.fullest.peak_bytes / GIB,
        "needed_gib": one.memory.needed_gib,
        "price_per_1t_tokens": found.price_per_1t(one),
    }


def _tokens_per_gpu(one: Candidate) -> float:
    layout = one.plan.recipe.layout
    return layout.gbs * layout.seq_len / one.prediction.seconds / layout.gpus


def plan_tables(found: LayoutPlan) -> Iterator[Table]:
    own, recipe = found.own, found.recipe
    rows = [(str(place), each) for place, each in enumerate(found.layouts, start=1)]
    if own:
        rows.append((_own_name(recipe), own))
    columns: list[Column[tuple[str, Candidate]]] = [
        Column("", lambda row: row[0], right=True),
        *(_size_column(name) for name in ("gpus", "seq_len", *PARALLEL, "mbs")),
        Column("recompute", lambda row: row[1].plan.recompute),
        Column("sharding", lambda row: row[1].plan.parallelism.dp_sharding),
        number_column("step s", lambda row: row[1].prediction.seconds),
        number_column("tokens/s/GPU", lambda row: _tokens_per_gpu(row[1])),
        Column("GiB", lambda row: _gib_text(found, row[1])),
    ]
    varied = {name for name in ("gpus", "seq_len", "ep", "etp") if len({_size(row[1], name) for row in rows}) > 1}
    fixed = {"gpus", "seq_len", "ep", "etp"} - varied
    columns = [each for each in columns if each.header not in fixed]
    if found.price is not None:
        columns.append(number_column("price/1T tokens", lambda row: found.price_per_1t(row[1])))
    title = f"PREDICTED layouts of {recipe.model_name} {recipe.dtype} on {recipe.layout.gpus} x {recipe.gpu_type}"
    options = "".join(f", --{name.replace('_', '-')} {value}" for name, value in found.constraints.items())
    table = table_of(f"{title}{options}", rows, columns)
    table.caption = "\n".join(_plan_notes(found))
    yield table
    if found.layouts and own:
        yield _differences(found.layouts[0].prediction, own.prediction)


def _own_name(recipe: Recipe) -> str:
    """The name of the recipe's row: options may have changed its work."""
    return "adapted" if recipe.overridden or any(note.startswith(CUSTOM) for note in recipe.decisions) else "recipe"


def _gib_text(found: LayoutPlan, one: Candidate) -> str:
    capacity = one.memory.capacity_gib
    of = "" if capacity is None else f"/{capacity:g}"
    return f"{one.memory.needed_gib:.0f}{of}{' does not fit' if found.exceeds(one) else ''}"


def left_out_text(found: LayoutPlan) -> str:
    reasons = sorted(found.left_out.items(), key=lambda each: -each[1])
    left = ", ".join(f"{number:,} {reason}" for reason, number in reasons if number)
    return f"of {found.searched:,} ways {left}"


def _plan_notes(found: LayoutPlan) -> Iterator[str]:
    own, ahead, tied = found.own, found.ahead_pct, found.tied
    within = f"±{found.first.error_pct:.0f} %"
    better, worse = ("faster", "slower") if found.goal == "step" else ("cheaper", "dearer")
    yield f"{left_out_text(found)}; steps are within {within}"
    if ahead is not None and ahead > found.first.error_pct:
        yield f"the first is {ahead:.1f} % {better} than the recipe, of {within}"
    elif ahead is not None and ahead >= 0:
        yield f"none is distinguishably {better} than the recipe: {ahead:.1f} % of {within}"
    elif ahead is not None:
        yield f"none is {better} than the recipe: the first is {-ahead:.1f} % {worse}, of {within}"
    if len(tied) > 1:
        apart = 100 * (found.cost(tied[-1]) / found.cost(tied[0]) - 1)
        yield f"1 to {len(tied)} are a tie: {apart:.1f} % apart, of {within}"
    if isinstance(own, Missing):
        yield f"the layout of the recipe is left out: {own.reason}"
    else:
        yield from (f"{_own_name(found.recipe)}: {note}" for note in found.recipe.decisions)


def _size_column(name: str) -> Column[tuple[str, Candidate]]:
    return Column(name, lambda row: _size(row[1], name), right=True)


def _size(one: Candidate, name: str) -> int | None:
    value: int | None = getattr(one.plan.recipe.layout, name)
    return value


def _differences(best: Prediction, own: Prediction) -> Table:
    """Return the differences by term."""
    changes = {name: abs(_of(best, name) - _of(own, name)) for name in (*own.terms, *best.terms)}
    shown = [name for name, change in changes.items() if change >= LEAST * own.seconds]
    rows = sorted(shown, key=changes.__getitem__, reverse=True)
    return table_of(
        "The first beside the layout of the recipe",
        [*rows, "step"],
        [
            Column("cause", term_title),
            number_column("recipe s", lambda name: _of(own, name)),
            number_column("first s", lambda name: _of(best, name)),
            Column("difference s", lambda name: f"{_of(best, name) - _of(own, name):+.3f}", right=True),
        ],
    )


def _of(prediction: Prediction, name: str) -> float:
    return prediction.seconds if name == "step" else prediction.terms.get(name, 0.0)


def campaign_text(found: LayoutPlan, repeats: int) -> str:
    """Return a file for ``llmb bulk`` that measures which of the layouts is the fastest."""
    lines = [f"# The layouts that 'llmb plan' proposes for {found.recipe.title()}, the best first."]
    lines += [_campaign_line(each, repeats) for each in found.layouts]
    return "\n".join(lines) + "\n"


def _campaign_line(one: Candidate, repeats: int) -> str:
    recipe, plan = one.plan.recipe, one.plan
    names = (*PARALLEL, "mbs", "gbs", "seq_len", "first_stage_layers", "last_stage_layers")
    sizes = " ".join(f"{name}={value}" for name in names if (value := _size(one, name)) is not None)
    ways = f"recompute={plan.recompute} dp_sharding={plan.parallelism.dp_sharding} repeats={repeats}"
    return f"{recipe.workload} {recipe.size} {recipe.dtype} {recipe.scale} {sizes} {ways}"
