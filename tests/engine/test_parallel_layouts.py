# SPDX-License-Identifier: Apache-2.0
"""However a model is spread over ranks, it starts, learns and ends as on one process."""

import os
from collections.abc import Callable, Container, Iterable, Iterator
from operator import gt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch

from llmb.runs.choices import Communication, DpSharding, GradientSync, Parallelism
from llmb.runs.plan import Plan

STEPS, GBS = 20, 4
FEW_LAYERS = 2
"""Of dense models that no pipeline cuts: the first and the last. Maverick has experts in every second layer; another
attention in every fourth is not needed where blocks are compiled."""
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5, "later": 1e-4}
"""Largest differences: relative but for losses. Rounding alone gives 1e-6; later norms are those of parameters that
rounding moved apart."""
LLAMA, NEMOTRON, MAVERICK, QWEN, MIXTRAL, QWEN_MOE = MODELS = (
    "pretrain_llama3.1",
    "pretrain_nemotron4",
    "finetune_llama4-maverick",
    "pretrain_qwen3",
    "pretrain_mixtral",
    "pretrain_qwen3 tiny-moe",
)
DENSE, EXPERTS = (LLAMA, NEMOTRON, QWEN), (MAVERICK, MIXTRAL, QWEN_MOE)
TRIED_FIRST, OTHERS = (LLAMA, MAVERICK), (NEMOTRON, QWEN, MIXTRAL, QWEN_MOE)
"""One dense model and one with experts: the others are compared for fewer steps, and in the slow tests only."""

SEEDS = {QWEN_MOE: 4}
"""Other than the default, with which a sequence begins with a rare token: its hidden values stay a tenth of others',
and norms that divide by them amplify its gradient and the rounding of it."""


class Kind(NamedTuple):
    """How a layout is run; ``document_tokens`` packs sequences from documents.

    Experts drop no token without a ``capacity_factor``: which are dropped depends on the tokens that a rank has.
    """

    recompute: str = "none"
    compiled: bool = False
    document_tokens: int | None = None
    parallelism: Parallelism = Parallelism()
    capacity_factor: float = 0.0
    biases: bool = False
    communication: Communication = "overlapped"

    def choices(self, workload: str) -> dict[str, object]:
        chosen = self._asdict()
        del chosen["biases"]
        if workload not in EXPERTS:
            del chosen["capacity_factor"]
        return chosen | seed_of(workload)


def seed_of(workload: str) -> dict[str, int]:
    return {"seed": SEEDS[workload]} if workload in SEEDS else {}


PLAIN, BOTH = Kind(), Kind("full", compiled=True)
PACKED = Kind(document_tokens=50)
SELECTIVE = Kind("selective")
DROPPING = Kind(capacity_factor=1.0)
BIASED = Kind(biases=True)


def sharing(sharding: DpSharding, size: int | None = None, sync: GradientSync = "step") -> Kind:
    return Kind(parallelism=Parallelism(dp_sharding=sharding, dp_shard_size=size, gradient_sync=sync))


OPTIMIZER, WHOLE = sharing("optimizer"), sharing("none")
FULL_BY_2, OPTIMIZER_BY_2 = sharing("full", 2), sharing("optimizer", 2)
SYNCED, SYNCED_BY_2 = sharing("full", sync="micro-batch"), sharing("full", 2, "micro-batch")


class Fp8Figures(NamedTuple):
    """Largest differences in FP8: of any step's loss, of their mean, of all gradients in the last step."""

    loss: float
    mean_loss: float
    gradient: float


FP8_STEPS, FP8_MODELS = 6, (LLAMA, MAVERICK, QWEN_MOE)
FP8_BOUNDS = {
    "layers": Fp8Figures(0.0, 0.0, 0.0),
    "batches": Fp8Figures(0.005, 0.002, 0.2),
    "products": Fp8Figures(0.01, 0.004, 0.2),
}
BF16_BOUNDS = Fp8Figures(0.001, 0.0005, 0.05)


TABLE_KINDS = {"plain": PLAIN, "compiled and recomputed": BOTH}
COMPILED_EVERY_TIME = ("TP2 + SP", "PP2", "CP2", "EP2")
"""Layouts whose compiled blocks are tried beside the making of the table too: compiling takes long."""
FEW_STEPS = 4


class Tiers(NamedTuple):
    """Layouts that a test tries quickly, and among the slow tests; it tries all others among the measured ones.

    Each mechanism is tried once for every change; combinations of them, other models and longer runs add little.
    """

    quick: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def parameters(self, names: Iterable[str]) -> list[object]:
        return [pytest.param(name, marks=self._marks(name)) for name in names]

    def _marks(self, name: str) -> tuple[pytest.MarkDecorator, ...]:
        if name in self.quick:
            return ()
        return (pytest.mark.slow if name in self.slow else pytest.mark.measured,)


BEGIN = Tiers(("DP2", "PP2 x VP2", "EP2 x ETP2"), ("FSDP2", "TP2 + SP", "CP2", "EP2"))
OTHER_MODELS = Tiers(slow=("TP2 + SP", "EP2", "PP2 x EP2 x VP2"))
TRAIN = Tiers()
SHARE = Tiers(("TP2 x PP2, no SP, 99 tokens",), ("PP2, 1 layer first", "PP2 x VP2", "FSDP4", "EP2"))
SORTS = ("loss", "gradient", "norm")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "layouts.md"
MAKING_TABLE = bool(os.environ.get("LLMB_LAYOUT_TABLE"))
INTRO = f"""# Layouts and what they change

Layouts change training only through rounding, as long as experts drop no tokens. Each layout trains tiny models for
{STEPS} steps in fp32 on CPUs, and is compared with training in one process. Each cell has three differences:

- the largest difference in any step's loss;
- the largest difference in any parameter's gradient in the first step, relative to its norm;
- the difference in the first step's gradient norm, relative to that norm.

Each is at most {BOUNDS["loss"]:.0e}. The last column has `--compile --recompute full`, but generates no machine code.

DP is `--dp-sharding none`, ZeRO-1 `optimizer`, FSDP `full`. `make layouts` writes this page."""


FP8_INTRO = f"""## FP8

Layouts train {FP8_STEPS} steps with delayed scaling. Each cell has the largest difference in any step's loss, the mean
difference in loss, and the difference in all gradients of the last step, relative to their norm. The tables
group layouts by what they split: only layers (pipelines), also batches, or also products (GEMMs, attention)."""


class Layout(NamedTuple):
    """Ranks, what the layout sets, and what is tried beside the kinds of the table."""

    ranks: int
    sizes: dict[str, int | bool]
    kinds: tuple[Kind, ...] = ()
    parallelism: Parallelism = Parallelism()
    """Of the kinds of the table, as ``communication``; the others say it themselves."""
    communication: Communication = "overlapped"

    @property
    def workloads(self) -> tuple[str, ...]:
        """Experts need a model that has some, and tokens that are cut over tensor-parallel ranks."""
        if "ep" in self.sizes:
            return EXPERTS
        return DENSE if "sequence_parallel" in self.sizes else MODELS

    @property
    def fp8_kind(self) -> str:
        if {"tp", "etp", "cp"} & self.sizes.keys():
            return "products"
        return "layers" if self.ranks == self.sizes.get("pp") else "batches"


WITHOUT_SP = {"sequence_parallel": False}
LAYOUTS = {
    "DP2": Layout(2, {}, parallelism=WHOLE.parallelism),
    "ZeRO-1 over 2": Layout(2, {}, parallelism=OPTIMIZER.parallelism),
    "FSDP2": Layout(2, {}, (PACKED,)),
    "TP2": Layout(2, {"tp": 2, **WITHOUT_SP}, (BIASED,)),
    "TP2 + SP": Layout(2, {"tp": 2}, (PACKED, BIASED)),
    "PP2": Layout(2, {"pp": 2}),
    "PP2 x VP2": Layout(2, {"pp": 2, "vp": 2}),
    "CP2": Layout(2, {"cp": 2}, (PACKED,)),
    "EP2": Layout(2, {"ep": 2}, (DROPPING, DROPPING._replace(recompute="full", compiled=True))),
    "EP2, halves": Layout(2, {"ep": 2}, communication="halves"),
    "EP2 x ETP2": Layout(4, {"ep": 2, "etp": 2}),
    "TP2 x EP2 x ETP2": Layout(4, {"tp": 2, "ep": 2, "etp": 2}, (DROPPING,)),
    "TP2 x EP4": Layout(4, {"tp": 2, "ep": 4}),
    "PP2 x EP2 x VP2": Layout(4, {"pp": 2, "ep": 2, "vp": 2}),
    "PP2 x EP2 x VP2, halves": Layout(4, {"pp": 2, "ep": 2, "vp": 2}, communication="halves"),
    "CP2 x EP2": Layout(4, {"cp": 2, "ep": 2}),
    "TP2 x PP2": Layout(4, {"tp": 2, "pp": 2}),
    "TP2 x CP2": Layout(4, {"tp": 2, "cp": 2}, (PACKED,)),
    "PP2 x CP2 x VP2": Layout(4, {"pp": 2, "cp": 2, "vp": 2}, (PACKED,)),
    "FSDP2 x TP2 x PP2": Layout(8, {"tp": 2, "pp": 2}),
}
WAYS = {
    "FSDP2": Layout(2, {}, (SYNCED, OPTIMIZER, OPTIMIZER._replace(recompute="full"), SELECTIVE)),
    "EP2": Layout(2, {"ep": 2}, (SYNCED, OPTIMIZER._replace(recompute="selective"))),
    "EP2, compiled": Layout(2, {"ep": 2}, (SELECTIVE._replace(compiled=True),)),
    "PP2, 1 layer first": Layout(2, {"pp": 2, "first_stage_layers": 1}, (PLAIN,)),
    "PP2 x VP2": Layout(2, {"pp": 2, "vp": 2}, (SELECTIVE,)),
    "PP2 x VP2, GA 2": Layout(2, {"pp": 2, "vp": 2, "gbs": 2}, (PLAIN,)),
    "FSDP4": Layout(4, {}, (FULL_BY_2, OPTIMIZER_BY_2)),
    "FSDP4, GA 2": Layout(4, {"gbs": 8}, (SYNCED_BY_2,)),
    "FSDP2 x TP2": Layout(4, {"tp": 2}, (PLAIN, SYNCED, OPTIMIZER, WHOLE, SELECTIVE._replace(compiled=True))),
    "FSDP2 x CP2": Layout(4, {"cp": 2}, (FULL_BY_2, SYNCED, WHOLE)),
    "FSDP2 x PP2": Layout(4, {"pp": 2}, (SYNCED, WHOLE)),
    "FSDP2 x PP2 x VP2": Layout(4, {"pp": 2, "vp": 2}, (OPTIMIZER, SYNCED)),
    "FSDP2 x PP2 x VP4": Layout(4, {"pp": 2, "vp": 4, "layers": 8}, (PLAIN, SYNCED, OPTIMIZER)),
    "FSDP4 x EP2": Layout(4, {"ep": 2}, (OPTIMIZER, FULL_BY_2, WHOLE)),
    "FSDP4 x EP2, GA 2": Layout(4, {"ep": 2, "gbs": 8}, (SYNCED, SYNCED_BY_2)),
    "EP4": Layout(4, {"ep": 4}, (WHOLE,)),
    "PP2 x EP2": Layout(4, {"pp": 2, "ep": 2}, (PLAIN,)),
    "PP4": Layout(4, {"pp": 4}, (PLAIN,)),
    "FSDP4 x TP2": Layout(8, {"tp": 2}, (OPTIMIZER_BY_2,)),
    "FSDP2 x TP2, no SP": Layout(4, {"tp": 2, **WITHOUT_SP}, (PLAIN,)),
    "TP2 x CP2, no SP": Layout(4, {"tp": 2, "cp": 2, **WITHOUT_SP}, (PLAIN, PACKED)),
    "TP2 x PP2, no SP, 99 tokens": Layout(4, {"tp": 2, "pp": 2, "seq_len": 99, **WITHOUT_SP}, (PLAIN,)),
    "TP2 x PP2 x EP2": Layout(8, {"tp": 2, "pp": 2, "ep": 2}, (PLAIN,)),
    "FSDP2 x TP2 x PP2": Layout(8, {"tp": 2, "pp": 2}, (OPTIMIZER, WHOLE)),
    "FSDP2 x TP2 x EP2": Layout(8, {"tp": 2, "ep": 2}, (FULL_BY_2,)),
}
"""More layouts, and what ranks share out: tried for two steps, not in the table."""


class Case(NamedTuple):
    layout: Layout
    workload: str
    kind: Kind

    @property
    def sizes(self) -> dict[str, int | bool]:
        is_short = self.workload in DENSE or self.kind.compiled
        layers = {"layers": FEW_LAYERS} if is_short and "pp" not in self.layout.sizes and not MAKING_TABLE else {}
        return {"gbs": GBS, **layers, **self.layout.sizes}

    @property
    def alone(self) -> dict[str, int | bool]:
        """What the layout says of the model and the batch, which one process has to know too."""
        return {name: size for name, size in self.sizes.items() if name in ("gbs", "seq_len", "layers")}


MakePlan = Callable[..., Plan]
Differences = dict[str, float]
RunCases = Callable[..., list[Differences]]


def parts_of(case: Case) -> int:
    """Into how many the ranks cut a sequence, where that decides which tokens are dropped."""
    return int(case.layout.sizes.get("tp", 1)) if case.kind.capacity_factor else 1


def plan_document(plan: Plan, case: Case) -> dict[str, Any]:
    """As JSON; of the model with biases for a kind that has them."""
    document = plan.model_dump(mode="json")
    if case.kind.biases:
        document["recipe"]["model"] |= {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}
    return document


def cases_of(layout: Layout, kinds: Iterable[Kind]) -> list[Case]:
    """Experts have no biases, and ``test_data_packed_training.py`` packs their documents."""
    combined = [Case(layout, workload, kind) for workload in layout.workloads for kind in kinds]
    return [
        case for case in combined if case.workload not in EXPERTS or not (case.kind.biases or case.kind.document_tokens)
    ]


@pytest.fixture(scope="session")
def run_cases(tiny_plan: MakePlan, references: Callable[..., Path], distances: Callable[..., Differences]) -> RunCases:
    """How far each case lies from what one process does in place of its ranks."""

    def run(cases: list[Case], steps: int) -> list[Differences]:
        return [found_in(case, steps) for case in cases]

    def found_in(case: Case, steps: int) -> Differences:
        def plan(kind: Kind, scale: int, sizes: dict[str, int | bool]) -> dict[str, Any]:
            options = {"scale": scale, "overrides": sizes, **kind.choices(case.workload)}
            return plan_document(tiny_plan(case.workload, steps=steps, **options), case)

        kind = Kind(document_tokens=case.kind.document_tokens, capacity_factor=case.kind.capacity_factor)
        reference = references("layout_reference.py", plan(kind, 1, case.alone), parts_of(case))
        return distances(plan(case.kind, case.layout.ranks, case.sizes), reference)

    return run


def too_large(differences: Differences) -> dict[str, float]:
    return {name: value for name, value in differences.items() if not value <= BOUNDS[name.split()[0]]}


class Place(NamedTuple):
    """Of a cell in the table."""

    layout: str
    workload: str
    kind: str


Fp8Table = dict[tuple[str, str], Fp8Figures]
"""By layout and model."""


@pytest.fixture(scope="session")
def fp8_table() -> Fp8Table:
    return {}


@pytest.fixture(scope="session")
def table(fp8_table: Fp8Table) -> Iterator[dict[Place, Differences]]:
    """What is found of the kinds of the table; becomes the page in the docs where LLMB_LAYOUT_TABLE is set."""
    found: dict[Place, Differences] = {}
    yield found
    if MAKING_TABLE and {place.layout for place in found} == {name for name, _ in fp8_table} == set(LAYOUTS):
        PAGE.write_text(page(found, fp8_table))


@pytest.mark.parametrize("name", BEGIN.parameters(LAYOUTS))
def test_every_layout_begins_as_one_process_does(name: str, run_cases: RunCases) -> None:
    """Initial values, the first step's loss and gradients, and what the first update made of them."""
    assert_begins_equally(LAYOUTS[name], (plain(name), *LAYOUTS[name].kinds), TRIED_FIRST, run_cases)


@pytest.mark.parametrize("name", OTHER_MODELS.parameters(LAYOUTS))
def test_other_models_begin_in_every_layout_as_on_one_process(name: str, run_cases: RunCases) -> None:
    assert_begins_equally(LAYOUTS[name], (plain(name),), OTHERS, run_cases)


@pytest.mark.measured
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.kinds])
def test_other_models_begin_in_every_kind_of_a_layout(name: str, run_cases: RunCases) -> None:
    """Each kind is tried with the first models for every change."""
    assert_begins_equally(LAYOUTS[name], LAYOUTS[name].kinds, OTHERS, run_cases)


def plain(name: str) -> Kind:
    return PLAIN._replace(parallelism=LAYOUTS[name].parallelism, communication=LAYOUTS[name].communication)


def assert_begins_equally(
    layout: Layout, kinds: tuple[Kind, ...], workloads: Container[str], run_cases: RunCases
) -> None:
    cases = [case for case in cases_of(layout, kinds) if case.workload in workloads]
    found = zip(cases, run_cases(cases, steps=2), strict=True)
    assert [(case, wrong) for case, differences in found if (wrong := too_large(differences))] == []


@pytest.mark.parametrize("name", TRAIN.parameters(LAYOUTS))
def test_every_layout_trains_as_one_process_does(
    name: str, run_cases: RunCases, table: dict[Place, Differences]
) -> None:
    """Of all models for the table. Otherwise one dense model and one with experts are enough: what a longer run adds to
    the first two steps, which are compared for every model, is the optimizer, and that knows no model. Compiled blocks
    add nothing after their first steps either."""
    layout = LAYOUTS[name]
    ways = {"parallelism": layout.parallelism, "communication": layout.communication}
    kinds = {title: kind._replace(**ways) for title, kind in TABLE_KINDS.items()}
    if not MAKING_TABLE:
        kinds = {title: kind for title, kind in kinds.items() if not kind.compiled or name in COMPILED_EVERY_TIME}
    found = {}
    for title, kind in kinds.items():
        cases = {
            Place(name, case.workload, title): case
            for case in cases_of(layout, [kind])
            if MAKING_TABLE or case.workload in TRIED_FIRST
        }
        steps = FEW_STEPS if kind.compiled and not MAKING_TABLE else STEPS
        of_kind = run_cases(list(cases.values()), steps)
        found |= dict(zip(cases, of_kind, strict=True))
    assert {place: wrong for place, differences in found.items() if (wrong := too_large(differences))} == {}
    table |= found


@pytest.mark.parametrize("name", SHARE.parameters(WAYS))
def test_however_ranks_share_and_order_their_work_they_train_as_one_process_does(
    name: str, run_cases: RunCases
) -> None:
    layout = WAYS[name]
    # Models that make a difference here: experts have a mesh and products of their own, tied embeddings are in two
    # stages of a pipeline.
    assert_begins_equally(
        layout, layout.kinds, {*TRIED_FIRST, QWEN} if "pp" in layout.sizes else TRIED_FIRST, run_cases
    )


@pytest.fixture(scope="session")
def fp8_alone(tiny_plan: MakePlan, train_plans: Callable[..., list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What one process finds of each model."""
    return dict(zip(FP8_MODELS, train_plans([fp8_plan(tiny_plan, name) for name in FP8_MODELS]), strict=True))


def fp8_plan(tiny_plan: MakePlan, workload: str, layout: Layout | None = None, dtype: str = "fp8") -> Plan:
    ranks, sizes, parallelism = (layout.ranks, layout.sizes, layout.parallelism) if layout else (1, {}, Parallelism())
    options = {**({"capacity_factor": 0.0} if workload in EXPERTS else {}), **seed_of(workload)}
    options["communication"] = layout.communication if layout else "overlapped"
    overrides = {"gbs": GBS, "seq_len": 64, **sizes}
    return tiny_plan(workload, ranks, FP8_STEPS, dtype=dtype, overrides=overrides, parallelism=parallelism, **options)


@pytest.mark.measured
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_in_fp8_as_one_process_does(
    name: str,
    tiny_plan: MakePlan,
    train_plans: Callable[..., list[dict[str, Any]]],
    fp8_alone: dict[str, dict[str, Any]],
    fp8_table: Fp8Table,
) -> None:
    layout = LAYOUTS[name]
    models = [model for model in FP8_MODELS if model in layout.workloads]
    found = train_plans([fp8_plan(tiny_plan, model, layout) for model in models])
    figures = {(name, model): fp8_figures(one, fp8_alone[model]) for model, one in zip(models, found, strict=True)}
    bounds = FP8_BOUNDS[layout.fp8_kind]
    assert {place: one for place, one in figures.items() if any(map(gt, one, bounds))} == {}
    fp8_table |= figures


@pytest.mark.measured
@pytest.mark.parametrize("sizes", [{}, {"cp": 2}, {"ep": 2}, {"pp": 2}], ids=str)
def test_gradients_that_are_reduced_by_micro_batch_train_in_fp8_as_one_process_does(
    sizes: dict[str, int | bool],
    tiny_plan: MakePlan,
    train_plans: Callable[..., list[dict[str, Any]]],
    fp8_alone: dict[str, dict[str, Any]],
) -> None:
    layout = Layout(4 if "pp" in sizes else 2, sizes, parallelism=SYNCED.parallelism)
    models = [model for model in FP8_MODELS if model in layout.workloads]
    found = train_plans([fp8_plan(tiny_plan, model, layout) for model in models])
    figures = [fp8_figures(one, fp8_alone[model]) for model, one in zip(models, found, strict=True)]
    assert [one for one in figures if any(map(gt, one, FP8_BOUNDS[layout.fp8_kind]))] == []


@pytest.fixture(scope="session")
def bf16_alone(tiny_plan: MakePlan, train_plans: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    return train_plans([fp8_plan(tiny_plan, QWEN_MOE, dtype="bf16")])[0]


@pytest.mark.measured
@pytest.mark.parametrize("name", ["EP2", "EP2 x ETP2", "TP2 x EP4", "PP2 x EP2 x VP2", "CP2 x EP2"])
def test_chosen_experts_train_in_bf16_as_on_one_process(
    name: str, tiny_plan: MakePlan, train_plans: Callable[..., list[dict[str, Any]]], bf16_alone: dict[str, Any]
) -> None:
    """Rounding sends single tokens to another of their nearly equal experts."""
    (found,) = train_plans([fp8_plan(tiny_plan, QWEN_MOE, LAYOUTS[name], "bf16")])
    figures = fp8_figures(found, bf16_alone)
    assert not any(map(gt, figures, BF16_BOUNDS)), figures


def fp8_figures(found: dict[str, Any], alone: dict[str, Any]) -> Fp8Figures:
    names = sorted(alone["last_gradients"])
    losses = [abs(ours - theirs) for ours, theirs in zip(found["losses"], alone["losses"], strict=True)]
    ours, theirs = (torch.cat([one["last_gradients"][name].flatten() for name in names]) for one in (found, alone))
    return Fp8Figures(max(losses), fmean(losses), float((ours - theirs).norm() / theirs.norm()))


def page(found: dict[Place, Differences], in_fp8: Fp8Table) -> str:
    """The tables as Markdown, one for each model, and one for each kind of layout in FP8."""
    parts = [INTRO]
    for workload in MODELS:
        rows = [row(name, workload, found) for name, layout in LAYOUTS.items() if workload in layout.workloads]
        head = f"| layout | processes | {' | '.join(TABLE_KINDS)} |"
        parts.append("\n".join([f"## {workload}\n", head, "|---" * (2 + len(TABLE_KINDS)) + "|", *rows]))
    parts.append(FP8_INTRO)
    for kind, bounds in FP8_BOUNDS.items():
        rows = [fp8_row(name, in_fp8) for name, layout in LAYOUTS.items() if layout.fp8_kind == kind]
        head = f"| {kind} | processes | {' | '.join(FP8_MODELS)} |"
        limits = f"| bounds | | {' | '.join([fp8_cell(bounds)] * len(FP8_MODELS))} |"
        parts.append("\n".join([head, "|---" * (2 + len(FP8_MODELS)) + "|", limits, *rows]))
    return "\n\n".join(parts) + "\n"


def row(name: str, workload: str, found: dict[Place, Differences]) -> str:
    cells = [cell(found[Place(name, workload, kind)]) for kind in TABLE_KINDS]
    return f"| {name} | {LAYOUTS[name].ranks} | {' | '.join(cells)} |"


def fp8_row(name: str, in_fp8: Fp8Table) -> str:
    cells = [fp8_cell(in_fp8[name, model]) if (name, model) in in_fp8 else "" for model in FP8_MODELS]
    return f"| {name} | {LAYOUTS[name].ranks} | {' | '.join(cells)} |"


def fp8_cell(figures: Fp8Figures) -> str:
    return " ".join(f"{value:.0e}" for value in figures)


def cell(differences: Differences) -> str:
    """The largest difference of each sort."""
    worst = [max(value for name, value in differences.items() if name.startswith(sort)) for sort in SORTS]
    return " ".join(f"{value:.0e}" for value in worst)


def test_the_page_has_every_layout_and_keeps_the_bounds() -> None:
    text = PAGE.read_text()
    assert text.startswith(INTRO)
    for workload in MODELS:
        table_of_model = text.split(f"## {workload}\n")[1].split("##")[0]
        rows = [[part.strip() for part in line.split("|")[1:-1]] for line in table_of_model.splitlines()[3:] if line]
        layouts = [name for name, layout in LAYOUTS.items() if workload in layout.workloads]
        assert [(name, int(ranks)) for name, ranks, *_ in rows] == [(name, LAYOUTS[name].ranks) for name in layouts]
        for cells in (row[2:] for row in rows):
            assert len(cells) == len(TABLE_KINDS)
            assert all(
                float(value) <= BOUNDS[sort]
                for text_of_cell in cells
                for sort, value in zip(SORTS, text_of_cell.split(), strict=True)
            )


def test_the_page_has_every_layout_in_fp8_within_the_bounds_of_its_kind() -> None:
    in_fp8 = PAGE.read_text().split(FP8_INTRO)[1]
    for kind, bounds in FP8_BOUNDS.items():
        _, _, *rows = in_fp8.split(f"| {kind} |")[1].split("\n\n")[0].splitlines()
        (_, _, *limits), *found = ([part.strip() for part in line.split("|")[1:-1]] for line in rows)
        assert limits == [fp8_cell(bounds)] * len(FP8_MODELS)
        assert [name for name, *_ in found] == [name for name, one in LAYOUTS.items() if one.fp8_kind == kind]
        for name, _, *cells in found:
            assert [bool(cell) for cell in cells] == [model in LAYOUTS[name].workloads for model in FP8_MODELS]
            for cell_text in filter(None, cells):
                assert all(float(value) <= bound for value, bound in zip(cell_text.split(), bounds, strict=True))
