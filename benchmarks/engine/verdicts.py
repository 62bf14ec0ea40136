# SPDX-License-Identifier: Apache-2.0
"""The targets of each model and dtype, and whether they were reached. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.engine.engines.registry import LLMB
from benchmarks.engine.records import CaseResult, Published, Verdict
from llmb.catalogue.records import Dtype

Setup = tuple[str, str | None, str, Dtype, int]


def merged(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """One result per setup: of several rounds the one with the median step time in the middle."""
    return [_middle(group) for group in rounds_of(cases).values()]


def rounds_of(cases: Sequence[CaseResult]) -> dict[Setup, list[CaseResult]]:
    groups: dict[Setup, list[CaseResult]] = {}
    for case in cases:
        groups.setdefault(case.setup, []).append(case)
    return groups


def _middle(group: list[CaseResult]) -> CaseResult:
    done = [case for case in group if case.status == "done"]
    return sorted(done, key=_step_time)[len(done) // 2] if done else group[-1]


def _step_time(case: CaseResult) -> float:
    return median(case.step_times_s)


def judge(cases: Sequence[CaseResult], published: Sequence[Published]) -> Iterator[Verdict]:
    """Two targets per model and dtype: the published MFU, and each other engine's tokens/s.

    The published runs have many micro-batches per step: of llmb's results the one with the most is compared with them.
    """
    results, rounds = merged(cases), rounds_of(cases)
    targets = {(target.model, target.dtype): target for target in published}
    own = [case for case in results if case.engine == LLMB and case.variant is None]
    for model, dtype in dict.fromkeys((case.model, case.dtype) for case in own):
        same = [case for case in own if (case.model, case.dtype) == (model, dtype)]
        best = max(same, key=lambda case: (case.status == "done", case.ga))
        yield against_published(best, targets.get((model, dtype)))
        for other in results:
            if other.engine == LLMB or (other.model, other.dtype) != (model, dtype):
                continue
            mine = next((case for case in same if case.ga == other.ga), None)
            if mine:
                apart = max(filter(None, (differ_pct(rounds[case.setup]) for case in (mine, other))), default=None)
                against, speeds = f"tokens/s of {other.engine}", (mine.tokens_per_s, other.tokens_per_s)
                verdict = _verdict(mine, "other_engine", against, *speeds, _why(mine) or _why(other))
                yield verdict.model_copy(update={"rounds_differ_pct": apart})


def differ_pct(rounds: Sequence[CaseResult]) -> float | None:
    """How far the slowest round is from the fastest; None with fewer than two."""
    times = [_step_time(case) for case in rounds if case.status == "done"]
    return 100 * (max(times) / min(times) - 1) if len(times) > 1 else None


def against_published(own: CaseResult, target: Published | None) -> Verdict:
    measured = (own.mfu_pct or {}).get("published")
    name = f"published MFU on {target.scale} {target.gpu_type}" if target else "published MFU"
    if target is None:
        reason: str | None = f"no MFU is published for {own.dtype}"
    else:
        reason = _why(own)
        if reason is None and measured is None:
            reason = f"the catalogue has no {own.dtype} peak for this device"
    return _verdict(own, "published_mfu", name, measured, target.mfu_pct if target else None, reason)


def _why(case: CaseResult) -> str | None:
    """Why a result cannot be judged; None if it can."""
    if case.outdated:
        return f"{case.engine} outdated: {case.outdated}"
    return None if case.status == "done" else f"{case.engine} {case.status.replace('_', ' ')}: {case.reason}"


def _verdict(
    own: CaseResult, shows: str, against: str, measured: float | None, target: float | None, reason: str | None
) -> Verdict:
    """Reached if llmb is at least as good; a tie with another engine counts as not reached."""
    of = {"model": own.model, "dtype": own.dtype, "micro_batches": own.ga}
    values = {**of, "shows": shows, "against": against, "reason": reason}
    if reason or measured is None or target is None:
        return Verdict(**values, verdict="not_measured", measured=measured, target=target, margin_pct=None)
    good = measured >= target if shows == "published_mfu" else measured > target
    margin = 100 * (measured / target - 1)
    return Verdict(
        **values, verdict="reached" if good else "not_reached", measured=measured, target=target, margin_pct=margin
    )
