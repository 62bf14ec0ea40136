# SPDX-License-Identifier: Apache-2.0
"""Steps of runs that never were, as ``metrics.jsonl`` has them: one after the other, without a pause."""

from collections.abc import Sequence

from llmb.runs.plan import Plan
from llmb.runs.steps import Step

FIRST_STEP_S = 1795298800.0
"""When the first step began."""


def step_of(number: int = 0, step_time_s: float = 1.0, plan: Plan | None = None, **changes: object) -> Step:
    """A step of a run whose steps all take as long."""
    tokens = plan.recipe.layout.gbs * plan.recipe.layout.seq_len if plan else 1024
    values: dict[str, object] = {
        "step": number,
        "step_time_s": step_time_s,
        "loss": 10 - number / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": tokens,
        "padded_tokens": tokens,
        "counted_labels": tokens,
        "peak_memory_bytes": 2**30,
        "peak_memory_rank": 0,
        "rank_step_time_s_min": step_time_s,
        "rank_step_time_s_max": step_time_s,
        "slowest_rank": 0,
        "data_wait_s": 0.0,
        "pause_s": 0.0,
        "layer_s_median": 0.01,
        "outside_layers_s": 0.0,
        "ended_s": FIRST_STEP_S + (number + 1) * step_time_s,
        "profiled": bool(plan and plan.profile and plan.profile.covers(number)),
    }
    return Step(**{**values, **changes})  # type: ignore[arg-type]


def steps_of(times_s: Sequence[float], plan: Plan | None = None, **changes: object) -> list[Step]:
    ends = [FIRST_STEP_S + sum(times_s[: number + 1]) for number in range(len(times_s))]
    pairs = enumerate(zip(times_s, ends, strict=True))
    return [step_of(number, time_s, plan, **{"ended_s": end_s, **changes}) for number, (time_s, end_s) in pairs]
