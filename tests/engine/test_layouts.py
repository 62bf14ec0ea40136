# SPDX-License-Identifier: Apache-2.0
"""However a model is spread over ranks, it starts, learns and ends as on one process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmb.runs.plan import Plan

HERE = Path(__file__).parent
WORKER, REFERENCE = HERE / "layout_worker.py", HERE / "layout_reference.py"
LIMIT_S = 600
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STEPS = 20
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5}
"""Largest differences: relative but for losses. Rounding alone gives 1e-6."""
LLAMA, NEMOTRON, MAVERICK = MODELS = ("pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick")


class Kind(NamedTuple):
    """How a layout is run; ``document_tokens`` packs sequences from documents."""

    recompute: str = "none"
    compiled: bool = False
    document_tokens: int | None = None


PLAIN, RECOMPUTED, COMPILED, BOTH = Kind(), Kind("full"), Kind(compiled=True), Kind("full", compiled=True)
PACKED = Kind(document_tokens=50)
PACKED_BOTH = PACKED._replace(recompute="full", compiled=True)


TABLE_KINDS = {"plain": PLAIN, "recomputed": RECOMPUTED, "compiled": COMPILED, "both": BOTH}
SORTS = ("loss", "gradient", "norm")
PAGE = HERE.parents[1] / "docs" / "reference" / "layouts.md"
MAKING_TABLE = bool(os.environ.get("LLMB_LAYOUT_TABLE"))
INTRO = f"""# Layouts and what they change

Nothing, but for rounding. Each layout trains {STEPS} steps in fp32 on CPU processes, the tiny model of each
architecture, as it is, with full recomputation (`--recompute full`), with blocks compiled (`--compile`), and with both.
It is compared with a training on one process that uses none of the engine's ways to spread a model. Each cell has three
figures, the largest differences of any loss, of any parameter's gradient in the first step (relative to its norm), and
of any step's gradient norm (relative). The bounds are {BOUNDS["loss"]:.0e}, {BOUNDS["gradient"]:.0e} and
{BOUNDS["norm"]:.0e}; initial values have to be equal.

`make layouts` measures the tables again and writes this page; `make test` checks the bounds without writing it. For
these tables, blocks are traced and differentiated as `--compile` does it, but not made into machine code. SP is
sequence parallel, without which experts cannot be combined with TP."""


class Layout(NamedTuple):
    """Ranks, what the layout sets, and what is tried beside the kinds of the table."""

    ranks: int
    sizes: dict[str, int | bool]
    kinds: tuple[Kind, ...] = ()

    @property
    def workloads(self) -> tuple[str, ...]:
        """Experts need a model that has some, and tokens that are cut over tensor-parallel ranks."""
        if "ep" in self.sizes:
            return (MAVERICK,)
        return (LLAMA, NEMOTRON) if "sequence_parallel" in self.sizes else MODELS


WITHOUT_SP = {"sequence_parallel": False}
LAYOUTS = {
    "FSDP2": Layout(2, {}, (PACKED,)),
    "TP2": Layout(2, {"tp": 2, **WITHOUT_SP}, (PACKED,)),
    "TP2 + SP": Layout(2, {"tp": 2}, (PACKED,)),
    "PP2": Layout(2, {"pp": 2}),
    "PP2 x VP2": Layout(2, {"pp": 2, "vp": 2}),
    "PP2, 1 layer first": Layout(2, {"pp": 2, "first_stage_layers": 1}),
    "CP2": Layout(2, {"cp": 2}, (PACKED, PACKED_BOTH)),
    "EP2": Layout(2, {"ep": 2}),
    "EP2 x ETP2": Layout(4, {"ep": 2, "etp": 2}),
    "TP2 x EP2 x ETP2": Layout(4, {"tp": 2, "ep": 2, "etp": 2}),
    "CP2 x EP2": Layout(4, {"cp": 2, "ep": 2}),
    "FSDP2 x TP2": Layout(4, {"tp": 2}),
    "TP2 x PP2": Layout(4, {"tp": 2, "pp": 2}),
    "TP2 x CP2": Layout(4, {"tp": 2, "cp": 2}, (PACKED,)),
    "PP2 x CP2 x VP2": Layout(4, {"pp": 2, "cp": 2, "vp": 2}, (PACKED,)),
    "FSDP2 x TP2 x PP2": Layout(8, {"tp": 2, "pp": 2}),
    "FSDP2 x TP2, no SP": Layout(4, {"tp": 2, **WITHOUT_SP}),
    "TP2 x CP2, no SP": Layout(4, {"tp": 2, "cp": 2, **WITHOUT_SP}, (PACKED,)),
    "TP2 x PP2, no SP, 99 tokens": Layout(4, {"tp": 2, "pp": 2, "seq_len": 99, **WITHOUT_SP}),
    "TP2 x PP2 x EP2": Layout(8, {"tp": 2, "pp": 2, "ep": 2}),
}


class Case(NamedTuple):
    layout: str
    workload: str
    kind: Kind


MakePlan = Callable[..., Plan]
Differences = dict[str, float]
References = Callable[[Case], Path]


@pytest.fixture(scope="session")
def references(tiny_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The file with what one process does in place of a case's ranks."""
    folder = tmp_path_factory.mktemp("references")
    keys = list(
        {key_of(case): None for layout in LAYOUTS for case in cases_of(layout, (PLAIN, *LAYOUTS[layout].kinds))}
    )
    plans = [
        tiny_plan(workload, scale=1, steps=STEPS, document_tokens=tokens, overrides={"gbs": 4, "seq_len": seq_len})
        for workload, tokens, seq_len in keys
    ]
    (folder / "plans.json").write_text(json.dumps([plan.model_dump(mode="json") for plan in plans]))
    command = [sys.executable, REFERENCE, folder / "plans.json", folder]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=os.environ | ONE_THREAD)
    return lambda case: folder / f"{keys.index(key_of(case))}.pt"


def key_of(case: Case) -> tuple[str, int | None, int | None]:
    """All that decides what one process does."""
    return case.workload, case.kind.document_tokens, LAYOUTS[case.layout].sizes.get("seq_len")


def cases_of(layout: str, kinds: Iterable[Kind]) -> list[Case]:
    return [Case(layout, workload, kind) for workload in LAYOUTS[layout].workloads for kind in kinds]


def run_cases(cases: list[Case], make_plan: MakePlan, references: References, folder: Path) -> dict[Case, Differences]:
    """The largest difference of each sort, with the ranks of a layout started once for all cases."""
    ranks, sizes, _ = LAYOUTS[cases[0].layout]
    described = []
    for case in cases:
        options = {"scale": ranks, "steps": STEPS, "overrides": {**sizes, "gbs": 4}, **case.kind._asdict()}
        plan = make_plan(case.workload, **options).model_dump(mode="json")
        described.append({"plan": plan, "reference": str(references(case))})
    (folder / "cases.json").write_text(json.dumps(described))
    found = zip(cases, run_ranks(folder, ranks), strict=True)
    return dict(found)


def run_ranks(folder: Path, ranks: int) -> list[Differences]:
    """What the first rank found in each case."""
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, folder, str(rank)],
            env=os.environ | ONE_THREAD,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, complaints) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, complaints
    return json.loads(outputs[0][0])


def too_large(differences: Differences) -> dict[str, float]:
    return {name: value for name, value in differences.items() if not value <= BOUNDS[name.split()[0]]}


@pytest.fixture(scope="session")
def table() -> Iterator[dict[Case, Differences]]:
    """What is found of the kinds of the table; becomes the page in the docs where LLMB_LAYOUT_TABLE is set."""
    found: dict[Case, Differences] = {}
    yield found
    if MAKING_TABLE and {case.layout for case in found} == set(LAYOUTS):
        PAGE.write_text(page(found))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(
    layout: str, tiny_plan: MakePlan, references: References, tmp_path: Path, table: dict[Case, Differences]
) -> None:
    tried = TABLE_KINDS.values() if MAKING_TABLE else (PLAIN, BOTH, *LAYOUTS[layout].kinds)
    cases = cases_of(layout, tried)
    found = run_cases(cases, tiny_plan, references, tmp_path)
    assert {case: wrong for case in cases if (wrong := too_large(found[case]))} == {}
    table |= found


def page(found: dict[Case, Differences]) -> str:
    """The table as Markdown, one for each model."""
    parts = [INTRO]
    for workload in MODELS:
        rows = [row(layout, workload, found) for layout in LAYOUTS if workload in LAYOUTS[layout].workloads]
        head = f"| layout | processes | {' | '.join(TABLE_KINDS)} |"
        parts.append("\n".join([f"## {workload}\n", head, "|---" * (2 + len(TABLE_KINDS)) + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def row(layout: str, workload: str, found: dict[Case, Differences]) -> str:
    cells = [cell(found[Case(layout, workload, kind)]) for kind in TABLE_KINDS.values()]
    return f"| {layout} | {LAYOUTS[layout].ranks} | {' | '.join(cells)} |"


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
