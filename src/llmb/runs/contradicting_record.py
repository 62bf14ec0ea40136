# SPDX-License-Identifier: Apache-2.0
"""Whether the record, the environment and the steps of a run agree. Pure."""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import fmean

from llmb.metrics.contradictions import CLOCK_ERROR_S, Lap, RunFacts, contradictions
from llmb.metrics.throughput import MOST_MFU_PCT, why_too_fast
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
    plan, window = record.plan, record.plan.window
    layout = plan.recipe.layout
    inside = [step for step in steps if step.step in window]
    facts = RunFacts(
        first_step=plan.first_step,
        last_step=plan.last_step,
        window=(window.first, window.last),
        steps=[step.step for step in steps],
        step_times_s=[step.step_time_s for step in steps],
        not_updated=[step.step for step in steps if not step.updated],
        recorded=[step.step for step in steps if step.profiled != plan.slows_down(step.step)],
        laps=[_lap(before, step) for before, step in pairwise(inside)],
        gpus={"layout": plan.processes, **_told_gpus(record, log_gpus)},
        batches={"layout": layout.gbs, **({"log": log_gbs} if log_gbs and plan.recipe.pretended_rank is None else {})},
        tokens_per_step=layout.gbs * layout.seq_len // (1 if plan.recipe.pretended_rank is None else layout.dp),
        tokens={step.step: step.padded_tokens for step in steps},
    )
    not_finite = [step.values_text() for step in steps if not step.finite][:1]
    found = (*not_finite, *contradictions(facts), *_longer_than_the_run(record, steps), *_other_result(record, steps))
    return "the record contradicts itself: " + "; ".join(found) if found else None


def _lap(before: Step, step: Step) -> Lap:
    return Lap(
        steps_s=step.step_time_s,
        clock_s=step.ended_s - before.ended_s,
        between_s=step.pause_s,
        ranks_apart_s=_ranks_apart_s(step),
    )


def _ranks_apart_s(step: Step) -> float:
    return step.rank_step_time_s_max - step.rank_step_time_s_min


def _told_gpus(record: RunRecord, log_gpus: int | None) -> dict[str, int]:
    seen = record.environment.ranks_per_node if record.environment else {}
    told = {"environment": sum(seen.values()), "log": log_gpus}
    return {who: count for who, count in told.items() if count}


def _longer_than_the_run(record: RunRecord, steps: Sequence[Step]) -> tuple[str, ...]:
    """By the record's start and end, between which there are also start-up, checkpoints and the end."""
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
    """How the result of a run that has ended differs from its record and its steps."""
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
