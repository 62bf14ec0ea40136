# SPDX-License-Identifier: Apache-2.0
"""However precisely and by whatever kernels a model computes, it starts like exact fp32 and learns what that learns."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.rounding import BEGINNING
from torch import Tensor

from llmb.runs.plan import Plan

HERE = Path(__file__).parent
WORKER = HERE / "training_worker.py"
PAGE = HERE.parents[1] / "docs" / "reference" / "numerics.md"
MAKING_TABLE = bool(os.environ.get("LLMB_NUMERICS_TABLE"))
LIMIT_S = 3500
STEPS, LAST = 200, 50
SIZES = {"gbs": 4}
LLAMA, NEMOTRON, MAVERICK, QWEN_MOE = MODELS = (
    *("pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"),
    "pretrain_qwen3 tiny-moe",
)
RATES = {NEMOTRON: {"peak_lr": 1e-3}, QWEN_MOE: {"peak_lr": 3e-4}}
"""Other than the model's own. At 3e-3 Nemotron4 learns an attention sink that fails, now and then, for a sequence that
begins with a rare token: the loss of one step rises by up to 0.7, in exact fp32 with the same weights too. The smallest
difference decides at which step."""
STILL = {"steps": 3, "peak_lr": 1e-12}
"""Three steps that leave the parameters where they are: delayed scaling knows nothing before the first."""
REFERENCE = {"dtype": "fp32", "attention_backend": "math", "compiled": False}


class Figures(NamedTuple):
    """Differences from fp32: of any step's loss, of the mean loss of the last steps, of a parameter's gradient."""

    loss: float
    late_loss: float
    gradient: float


class Bounds(NamedTuple):
    """The largest figures, and the gradient's for a model with experts.

    A token for which two experts are nearly alike goes to the other one; the router's gradient shows it most.
    """

    largest: Figures
    gradient_with_experts: float

    def of(self, workload: str) -> Figures:
        if workload not in (MAVERICK, QWEN_MOE):
            return self.largest
        losses = ROUTED_LOSSES if workload == QWEN_MOE else {}
        return self.largest._replace(gradient=self.gradient_with_experts, **losses)


ROUTED_LOSSES = {"loss": 0.12, "late_loss": 0.005}
"""In tiny-moe 8 of 16 experts serve a token, so that many scores are nearly alike: losses differ as much in fp32, by
0.065, although the gradients of equal weights are equal."""


class Way(NamedTuple):
    """A way to compute, and how far it may lie off."""

    options: dict[str, Any]
    bounds: Bounds


FP32 = Bounds(Figures(0.03, 0.001, 1e-5), 1e-5)
BF16 = Bounds(Figures(0.06, 0.003, 0.03), 0.3)
FP8 = Bounds(Figures(0.06, 0.003, 0.3), 0.6)
WAYS = {
    "fp32": Way({"dtype": "fp32"}, FP32),
    "fp32, compiled": Way({"dtype": "fp32", "compiled": True}, FP32),
    "bf16": Way({"dtype": "bf16"}, BF16),
    "bf16, attention by math": Way({"dtype": "bf16", "attention_backend": "math"}, BF16),
    "bf16, gradients reduced in bf16": Way({"dtype": "bf16", "grad_reduce_dtype": "bf16"}, BF16),
    "bf16, compiled": Way({"dtype": "bf16", "compiled": True}, BF16),
    "fp8, delayed scaling": Way({"dtype": "fp8"}, FP8),
    "fp8, delayed scaling, compiled": Way({"dtype": "fp8", "compiled": True}, FP8),
    "fp8, delayed scaling, emulated": Way({"dtype": "fp8", "emulate_fp8": True}, FP8),
    "fp8, current scaling": Way({"dtype": "fp8", "fp8_recipe": "current"}, FP8),
}
EVERY_TIME = ("bf16", "fp8, delayed scaling", "fp8, current scaling")
"""What is measured beside the making of the table too."""
Found = dict[tuple[str, str], Figures]
Losses = list[float]
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def table() -> Iterator[Found]:
    """What is found, by workload and way; becomes the page in the docs where LLMB_NUMERICS_TABLE is set."""
    found: Found = {}
    yield found
    if MAKING_TABLE and len(found) == len(MODELS) * len(WAYS):
        PAGE.write_text(page(found))


@pytest.mark.measured
@pytest.mark.parametrize("workload", MODELS if MAKING_TABLE else [LLAMA])
def test_every_way_to_compute_learns_what_fp32_learns(
    workload: str, tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], tmp_path: Path, table: Found
) -> None:
    ways = {name: way for name, way in WAYS.items() if MAKING_TABLE or name in EVERY_TIME}
    options = [REFERENCE, *(way.options for way in ways.values())]
    lengths = [{"steps": STEPS, **RATES.get(workload, {})}, STILL]
    dropless = {"capacity_factor": 0} if workload == MAVERICK else {}  # what is dropped is decided by rounding
    fixed = {"scale": 1, "overrides": SIZES, **dropless}
    plans = [tiny_plan(workload, **fixed, **each, **length) for each in options for length in lengths]
    (tmp_path / "plans.json").write_text(json.dumps([plan.model_dump(mode="json") for plan in plans]))
    run_ranks(WORKER, 1, tmp_path, 1, "inductor", "soon", limit_s=LIMIT_S)
    results = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(len(plans))]
    learnt, still = results[::2], results[1::2]
    losses, gradients = ([each["losses"] for each in learnt], [each["last_gradients"] for each in still])
    assert losses[0][-1] < losses[0][0] - 1
    found = {
        (workload, name): off(losses[number], losses[0], gradients[number], gradients[0])
        for number, name in enumerate(ways, start=1)
    }
    table |= found
    bounds = {place: WAYS[place[1]].bounds.of(workload) for place in found}
    assert {place: figures for place, figures in found.items() if not within(figures, bounds[place])} == {}


def off(losses: Losses, exact_losses: Losses, gradients: Gradients, exact_gradients: Gradients) -> Figures:
    pairs = list(zip(losses, exact_losses, strict=True))
    return Figures(
        loss=max(abs(ours - theirs) for ours, theirs in pairs),
        late_loss=abs(fmean(ours - theirs for ours, theirs in pairs[-LAST:])),
        gradient=max(relative(gradients[name], exact) for name, exact in exact_gradients.items()),
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    """An expert without tokens has a gradient of zero."""
    return float((ours - theirs).norm()) / (float(theirs.norm()) or 1.0)


def within(figures: Figures, bounds: Figures) -> bool:
    return all(figure <= bound for figure, bound in zip(figures, bounds, strict=True))


INTRO = f"""# Precisions and kernels, and what they change

How far do bf16, FP8, fused attention and compilation move the loss? Each row is {STEPS} steps of a tiny model in one
CPU process, compared with fp32, unfused attention and no compilation. Each cell has the largest difference and, in
parentheses, its bound. Gradients are compared after two steps that change no weights, relative to their norm.

Nemotron4 is trained at a third of its peak learning rate, and tiny-moe at a tenth."""
COLUMNS = ("loss of any step", f"mean loss of the last {LAST} steps", "gradient of any parameter")


def page(found: Found) -> str:
    head = f"| precision and kernels | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}"
    parts = [INTRO]
    for workload in MODELS:
        rows = "\n".join(row(name, workload, found[workload, name]) for name in WAYS)
        parts.append(f"## {workload}\n\n{head}\n{rows}")
    _, marker, others = PAGE.read_text().partition(BEGINNING)
    return "\n\n".join(parts) + f"\n\n{marker}{others}"


def row(name: str, workload: str, figures: Figures) -> str:
    return f"| {name} | {' | '.join(cells_of(figures, WAYS[name].bounds.of(workload)))} |"


def cells_of(figures: Figures, bounds: Figures) -> list[str]:
    return [f"{figure:.2g} ({bound:g})" for figure, bound in zip(figures, bounds, strict=True)]


def test_the_page_has_every_way_and_keeps_the_bounds() -> None:
    text = PAGE.read_text().partition(BEGINNING)[0]
    assert text.startswith(INTRO)
    for workload in MODELS:
        lines = text.split(f"## {workload}\n")[1].split("\n## ")[0].strip().splitlines()[2:]
        assert len(lines) == len(WAYS)
        for (name, way), line in zip(WAYS.items(), lines, strict=True):
            first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert first == name
            figures = Figures(*(float(cell.split()[0]) for cell in cells))
            assert cells == cells_of(figures, way.bounds.of(workload))
            assert within(figures, way.bounds.of(workload))
