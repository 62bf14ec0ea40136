# SPDX-License-Identifier: Apache-2.0
"""The targets of each model and dtype, and whether they were reached. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.engine.engines.registry import LLMB
from benchmarks.engine.records import CaseResult, Published, Verdict
from llmb.catalogue.records import Dtype


def merged(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """One result per engine, model and dtype: of several rounds the one with the median step time in the middle."""
    groups: dict[tuple[str, str, Dtype], list[CaseResult]] = {}
    for case in cases:
        groups.setdefault((case.engine, case.model, case.dtype), []).append(case)
    return [_middle(group) for group in groups.values()]


def _middle(group: list[CaseResult]) -> CaseResult:
    done = [case for case in group if case.status == "done"]
    return sorted(done, key=_step_time)[len(done) // 2] if done else group[-1]


def _step_time(case: CaseResult) -> float:
    return median(case.step_times_s)


def judge(cases: Sequence[CaseResult], published: Sequence[Published]) -> Iterator[Verdict]:
    """Two targets per model and dtype: the published MFU, and each other engine's tokens/s."""
    results = {(case.engine, case.model, case.dtype): case for case in merged(cases)}
    targets = {(target.model, target.dtype): target for target in published}
    for (engine, model, dtype), own in results.items():
        if engine != LLMB:
            continue
        yield against_published(own, targets.get((model, dtype)))
        others = [
            case for case in results.values() if case.engine != LLMB and (case.model, case.dtype) == (model, dtype)
        ]
        yield from (against_engine(own, other) for other in others)


def against_published(own: CaseResult, target: Published | None) -> Verdict:
    measured = (own.mfu_pct or {}).get("published")
    name = f"published MFU on {target.scale} {target.gpu_type}" if target else "published MFU"
    if target is None:
        reason: str | None = f"no MFU is published for {own.dtype}"
    elif own.status != "done":
        reason = _why(own)
    else:
        reason = None if measured is not None else f"the catalogue has no {own.dtype} peak for this device"
    return _verdict(own, "published_mfu", name, measured, target.mfu_pct if target else None, reason)


def against_engine(own: CaseResult, other: CaseResult) -> Verdict:
    reason = next((_why(case) for case in (own, other) if case.status != "done"), None)
    return _verdict(own, "other_engine", f"tokens/s of {other.engine}", own.tokens_per_s, other.tokens_per_s, reason)


def _why(case: CaseResult) -> str:
    return f"{case.engine} {case.status.replace('_', ' ')}: {case.reason}"


def _verdict(
    own: CaseResult, shows: str, against: str, measured: float | None, target: float | None, reason: str | None
) -> Verdict:
    """Reached if llmb is at least as good; a tie with another engine counts as not reached."""
    values = {"model": own.model, "dtype": own.dtype, "shows": shows, "against": against, "reason": reason}
    if reason or measured is None or target is None:
        return Verdict(**values, verdict="not_measured", measured=measured, target=target, margin_pct=None)
    good = measured >= target if shows == "published_mfu" else measured > target
    margin = 100 * (measured / target - 1)
    return Verdict(
        **values, verdict="reached" if good else "not_reached", measured=measured, target=target, margin_pct=margin
    )
