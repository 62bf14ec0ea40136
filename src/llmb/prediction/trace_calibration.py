# SPDX-License-Identifier: Apache-2.0
"""Calibrates the terms of a prediction with the kernels of a trace of the same layout. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmb.base.errors import UsageError
from llmb.catalogue.records import Gpu, gpu_type_of
from llmb.catalogue.throughput import MFU, throughput
from llmb.prediction.prediction import BRIDGE, DOCUMENTS, Calibration, predicted_terms
from llmb.prediction.step_time import BUBBLE, TERMS
from llmb.readers.profiles.breakdown import RankTrace, StepBreakdown, TraceSummary
from llmb.readers.profiles.nsys_export import SPLIT_GRAPHS
from llmb.runs.plan import EnginePlan

GEMMS = ("bf16", "fp8", "mxfp8", "nvfp4", "experts", "written")
ATTENTION = ("attention", "cp_attention")
OPERATORS = ("memory", "cast", "routed", "fp8_layer_s", "moe_layer_s")
"""``GEMMS``, ``ATTENTION`` and ``OPERATORS``: rates of the work that a trace shows as kernels of these kinds."""
TO_EXPERTS = ("all_to_all", "dispatch", "combine")
SENDS = ("send_recv",)
REDUCTIONS = ("all_gather", "reduce_scatter", "all_reduce")
"""``TO_EXPERTS``, ``SENDS`` and ``REDUCTIONS``: kinds of collectives in traces."""
DO = "calibrate with a trace of the same model, layout and GPU type"


def calibrate_with_trace(
    traces: TraceSummary,
    recorded: EnginePlan | None,
    plan: EnginePlan,
    types: Iterable[Gpu],
    gpu: Gpu,
    usual: Calibration,
) -> Calibration:
    """Return ``usual`` with terms replaced by a traced step's kernel times; raise UsageError if trace and plan do not
    match."""
    trace = max(traces.ranks, key=lambda one: one.typical.local_s)
    step, title = trace.typical, f"trace {trace.source}"
    _check(title, trace, recorded, plan, types)
    terms = predicted_terms(plan, gpu, usual)
    factors: dict[str, float] = {}
    texts = []
    # Collectives of a rank that ran alone complete immediately.
    collectives = () if recorded and recorded.recipe.pretended_rank is not None else step.collectives
    for name, replaced, seconds in _measured(replace(step, collectives=collectives), usual.software):
        if predicted := sum(terms.get(term, 0.0) for term in replaced):
            factors |= dict.fromkeys(replaced, seconds / predicted)
            texts.append(f"{name} {seconds:.4g} s ({100 * (seconds / predicted - 1):+.0f} %)")
    if not texts:
        what = f"step {step.step} of {title} has no GPU kernels (GEMMs, attention, other operators, collectives)"
        raise UsageError(what, do="record whole steps on GPUs with 'llmb run --profile'")
    unknown = "" if recorded else "; the trace does not contain model and layout"
    text = f"{title}, step {step.step}: measured {', '.join(texts)}; the rest as predicted{unknown}"
    return replace(usual, text=text, factors=factors, error="trace")


def _measured(step: StepBreakdown, software: str) -> Iterator[tuple[str, set[str], float]]:
    operators = step.other_s + step.memory_copy_s + step.unclassified_s
    parts = (
        ("GEMMs", GEMMS, step.matrix_product_s),
        ("attention", ATTENTION, step.attention_s),
        ("other operators", OPERATORS, operators),
    )
    for name, rates, seconds in parts:
        if seconds:
            yield name, {TERMS[rate] for rate in rates}, seconds
    # NVIDIA's software sends keys and values around a ring, like the stages of a pipeline; others gather them.
    sent, gathered = {TERMS["pp"], BUBBLE}, {TERMS[rate] for rate in ("tp", "dp", "dp_beyond", "wait")}
    (sent if software in (DOCUMENTS, BRIDGE) else gathered).add(TERMS["cp"])
    used = (("EP messages", TO_EXPERTS, {TERMS["ep"]}), ("sends", SENDS, sent))
    for name, kinds, replaced in (*used, ("gathers and reductions", REDUCTIONS, gathered)):
        exposed = [each.exposed_s for each in step.collectives if each.kind in kinds]
        if exposed:
            yield f"exposed {name}", replaced, sum(exposed)


def _check(title: str, trace: RankTrace, recorded: EnginePlan | None, plan: EnginePlan, types: Iterable[Gpu]) -> None:
    layout = plan.recipe.layout
    if trace.device == "cpu":
        raise UsageError(f"{title} has no GPU kernels, but predictions are for GPUs", do=DO)
    asked = "but the prediction is for"
    if trace.gpu_name and gpu_type_of(trace.gpu_name, types) != plan.recipe.gpu_type:
        raise UsageError(f"{title} was recorded on {trace.gpu_name}, {asked} {plan.recipe.gpu_type}", do=DO)
    if trace.typical.cuda_graph_s:
        raise UsageError(f"{title} has CUDA graphs without their kernels", do=SPLIT_GRAPHS)
    theirs = _facts(recorded) if recorded else {"gpus": trace.world_size or layout.gpus}
    for name, ours in _facts(plan).items():
        if name in theirs and theirs[name] != ours:
            raise UsageError(f"{title} was recorded with {name} {theirs[name]}, {asked} {ours}", do=DO)
    computed_s = trace.typical.matrix_product_s + trace.typical.attention_s
    if computed_s and (why := throughput(plan.recipe, computed_s, lora=plan.lora).reasons.get(MFU)):
        raise UsageError(f"{title} is not of this model, layout and batch: {why}", do=DO)


def _facts(plan: EnginePlan) -> dict[str, object]:
    recipe = plan.recipe
    names = {"workload": recipe.workload, "size": recipe.size, "dtype": recipe.dtype, "GPU type": recipe.gpu_type}
    ways = {"recompute": plan.recompute, "dp_sharding": plan.parallelism.dp_sharding}
    return {**names, **recipe.layout.model_dump(), **ways}
