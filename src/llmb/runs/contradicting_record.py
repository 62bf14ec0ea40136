# SPDX-License-Identifier: Apache-2.0
"""Contradictions between the record, the environment and the steps of a run. Pure."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import fmean

from llmb.base.shown_text import counted
from llmb.catalogue.throughput import MOST_MFU_PCT, why_too_fast
from llmb.readers.contradictions import CLOCK_ERROR_S, LONGEST_STEP_S, SHORTEST_STEP_S, Lap, clock_contradiction
from llmb.runs.plan import Plan
from llmb.runs.record import RunRecord
from llmb.runs.steps import Step

WHOLE_SECONDS_S = 2 * CLOCK_ERROR_S
"""Error of the difference of two moments in the record."""


def why_contradicting(
    record: RunRecord, steps: Sequence[Step], *, log_gpus: int | None = None, log_gbs: int | None = None
) -> str | None:
    """Why a run that did all its steps, by itself or by its record, is invalid; ``steps`` is empty for a program that
    writes none.

    ``log_gpus`` is their number by the log, if that tells it itself, and ``log_gbs`` its global batch size.
    """
    texts = (
        *[step.values_text() for step in steps if not step.finite][:1],
        *_wrong_steps(record.plan, steps),
        *_other_sizes(record, steps, log_gpus, log_gbs),
        *_longer_than_the_run(record, steps),
        *_other_result(record, steps),
    )
    return "the record contradicts itself: " + "; ".join(texts) if texts else None


def _wrong_steps(plan: Plan, steps: Sequence[Step]) -> Iterator[str]:
    """Steps that are not those of the plan, or whose times cannot be true."""
    first, last = plan.window.first, plan.window.last
    if not plan.first_step <= first <= last <= plan.last_step:
        yield f"the window is steps {first}-{last}, and the run has steps {plan.first_step}-{plan.last_step}"
    if steps:
        yield from _wrong_order((plan.first_step - 1, *(step.step for step in steps), plan.last_step + 1))
    if bad := next((step for step in steps if not SHORTEST_STEP_S < step.step_time_s < LONGEST_STEP_S), None):
        yield f"step {bad.step} took {bad.step_time_s:.4g} s, which no step takes"
    inside = [step for step in steps if step.step in plan.window]
    if skipped := sum(not step.updated for step in inside):
        yield f"{counted(skipped, 'step')} of the window skipped the update of the parameters"
    if other := next((step for step in steps if step.profiled != plan.slows_down(step.step)), None):
        yield f"step {other.step} was profiled or was not, against the plan"
    laps = [
        Lap(
            steps_s=step.step_time_s,
            clock_s=step.ended_s - before.ended_s,
            between_s=step.pause_s,
            ranks_apart_s=_ranks_apart_s(step),
        )
        for before, step in pairwise(inside)
    ]
    if contradiction := clock_contradiction(laps):
        yield contradiction


def _wrong_order(numbers: Sequence[int]) -> Iterator[str]:
    """``numbers``: those of all steps, between the one before the first and the one after the last."""
    for before, number in pairwise(numbers):
        if number != before + 1:
            repeated = "was written twice" if number == before else f"is written after step {before}"
            yield f"step {number} {repeated}" if number <= before else f"step {before + 1} is missing"
            return


def _ranks_apart_s(step: Step) -> float:
    return step.rank_step_time_s_max - step.rank_step_time_s_min


def _other_sizes(record: RunRecord, steps: Sequence[Step], log_gpus: int | None, log_gbs: int | None) -> Iterator[str]:
    """Numbers of GPUs, sequences and tokens that are not those of the layout. A pretended rank logs its own."""
    recipe, layout = record.plan.recipe, record.plan.recipe.layout
    is_alone = recipe.pretended_rank is not None
    workers = sum(record.environment.ranks_per_node.values()) if record.environment else None
    gpus = {"layout": record.plan.processes, "environment": workers, "log": log_gpus}
    batches = {"layout": layout.gbs, "log": None if is_alone else log_gbs}
    for what, sources in (("number of GPUs", gpus), ("global batch size", batches)):
        counts = {who: count for who, count in sources.items() if count}
        if len(set(counts.values())) > 1:
            yield f"the {what} is " + ", ".join(f"{count} in the {who}" for who, count in counts.items())
    tokens = layout.gbs * layout.seq_len // (layout.dp if is_alone else 1)
    if bad := next((step for step in steps if step.padded_tokens != tokens), None):
        yield f"step {bad.step} has {bad.padded_tokens:,} tokens, and the layout {tokens:,}"


def _longer_than_the_run(record: RunRecord, steps: Sequence[Step]) -> tuple[str, ...]:
    """Compare with the record's start and end, between which there are also start-up, checkpoints and the end."""
    last = record.attempts[-1] if record.attempts else None
    began, ended = last.started_at if last else record.started_at, record.ended_at
    if not began or not ended:
        return ()
    lasted_s = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    trained = [step for step in steps if not last or step.step >= last.first_step]
    trained_s, apart_s = sum(step.step_time_s for step in trained), sum(map(_ranks_apart_s, trained))
    if lasted_s < -WHOLE_SECONDS_S:
        return (f"it ended {-lasted_s:.4g} s before it began",)
    if trained_s <= lasted_s + WHOLE_SECONDS_S + apart_s:
        return ()
    return (f"its steps sum to {trained_s:.4g} s, and it lasted {lasted_s:.4g} s",)


def _other_result(record: RunRecord, steps: Sequence[Step]) -> Iterator[str]:
    """Describe differences of the result of a run that has ended from its record and its steps."""
    result, window = record.result, record.window
    if record.status in ("queued", "running"):
        return
    if result is None or result.status != record.status:
        yield f"it says {record.status}, and {f'its result {result.status}' if result else 'has no result'}"
    if steps and record.status == "success" and len(steps) != record.plan.steps:
        yield f"it says success, and {len(steps)} of {record.plan.steps} steps are recorded"
    if result and (why := why_too_fast(result.tflops_per_gpu or {}, result.peak_tflops)):
        yield why
    if result and (beyond := max((mfu for mfu in (result.mfu_pct or {}).values() if mfu), default=0)) > MOST_MFU_PCT:
        yield f"its result says an MFU of {beyond:.4g} %"
    times = [step.step_time_s for step in steps if step.step in window and not step.profiled]
    mean_s = result.step_time_s.mean if result and result.step_time_s else None
    if mean_s is not None and times and not math.isclose(fmean(times), mean_s, rel_tol=1e-9):
        yield f"its steps {window.first}-{window.last} took {fmean(times):.6g} s, and its result says {mean_s:.6g} s"
