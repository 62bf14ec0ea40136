# SPDX-License-Identifier: Apache-2.0
"""However a model is spread over ranks, it starts, learns and ends as on one process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from llmb.runs.plan import Plan

HERE = Path(__file__).parent
WORKER, REFERENCE = HERE / "layout_worker.py", HERE / "layout_reference.py"
LIMIT_S = 600
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
    "TP2 x PP2, no SP, 35 tokens": Layout(4, {"tp": 2, "pp": 2, "seq_len": 35, **WITHOUT_SP}),
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
    subprocess.run([sys.executable, REFERENCE, folder / "plans.json", folder], check=True, timeout=LIMIT_S)
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
            env=os.environ | {"OMP_NUM_THREADS": "1"},
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(
    layout: str, tiny_plan: MakePlan, references: References, tmp_path: Path
) -> None:
    cases = cases_of(layout, (PLAIN, BOTH, *LAYOUTS[layout].kinds))
    found = run_cases(cases, tiny_plan, references, tmp_path)
    assert {case: wrong for case in cases if (wrong := too_large(found[case]))} == {}
