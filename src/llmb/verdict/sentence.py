# SPDX-License-Identifier: Apache-2.0
"""A verdict as one line for a person, formed from its record. Pure."""

from collections.abc import Iterator

from llmb.metrics.group_difference import unseen
from llmb.shown_text import counted
from llmb.verdict.conditions import (
    BETWEEN_RUNS,
    CHANGED_COPY,
    ERROR_AT_END,
    EXPLAINED,
    OTHER_WORK,
    UNLIKE_NODES,
    Interval,
    ReferenceKind,
    Verdict,
    VerdictName,
    differing,
)

WINDOW = "window"
MOST_DIGITS = 4
UNDECIDED = "the interval contains the tolerance"
NAMES: dict[ReferenceKind, str] = {"published": "published", "baseline": "the baseline", "expectation": "expected"}
"""What a run is slower than."""
FIGURES: dict[ReferenceKind, str] = {
    "published": "the published figure",
    "baseline": "the baseline",
    "expectation": "the expected figure",
}
TOLERATED: dict[VerdictName, str] = {
    "pass": "within the tolerance of",
    "regressed": "more than the tolerance of",
    "improved": "more than the tolerance of",
    "inconclusive": "tolerance",
}

SPOILED = {
    OTHER_WORK: "other work beside",
    UNLIKE_NODES: "nodes unlike each other in",
    ERROR_AT_END: "an error after the last step of",
}
"""Faults in words, before whose they are."""
DECIDED: tuple[VerdictName, ...] = ("pass", "regressed", "improved")


def headline(verdict: Verdict) -> str:
    """The sentence behind the verdict, if it does not begin with it."""
    return f"{verdict.verdict.upper()}: {verdict.sentence}" if verdict.verdict in DECIDED else verdict.sentence


def with_sentence(verdict: Verdict) -> Verdict:
    return verdict.model_copy(update={"sentence": "; ".join(_parts(verdict))})


def _parts(verdict: Verdict) -> Iterator[str]:
    kind: ReferenceKind = verdict.reference.kind if verdict.reference else "baseline"
    if verdict.verdict == "invalid":
        yield f"invalid: {verdict.reason}"
        return
    found = (condition for condition in verdict.conditions if condition.key in EXPLAINED)
    sides = [pair for condition in found for pair in ((condition.own, ""), (condition.reference, f"{FIGURES[kind]}: "))]
    faults = tuple(f"{whose}{what}" for what, whose in sides if what)
    if verdict.delta_pct is None:
        with_what = f" with {FIGURES[kind]}" if verdict.reference and verdict.verdict == "not comparable" else ""
        yield f"{verdict.verdict}{with_what}: {'; '.join(filter(None, (*faults, verdict.reason)))}"
        return
    if verdict.verdict == "not comparable":
        reasons = "; ".join(filter(None, (*faults, verdict.reason)))
        yield f"not comparable with {FIGURES[kind]}: {reasons} ({_difference(verdict, kind)})"
        return
    digits = _digits(verdict.tolerance_pct, verdict.delta_pct, *(verdict.ci95_pct or ()))
    first = "; ".join((*faults, f"{_difference(verdict, kind, digits)}{_tolerance(verdict, digits)}"))
    yield f"inconclusive: {first}" if verdict.verdict == "inconclusive" else first
    yield from _reasons(verdict)
    yield from _weaknesses(verdict, kind)
    yield from _shown(verdict)


def _digits(limit: float | None, *values: float) -> int:
    """As few as distinguish the values from the tolerance."""
    if limit is None:
        return 1
    near = [abs(value) for value in values if abs(abs(value) - limit) > 10**-MOST_DIGITS]
    fitting = (n for n in range(1, MOST_DIGITS) if percent(limit, n) not in [percent(value, n) for value in near])
    return next(fitting, MOST_DIGITS)


def _difference(verdict: Verdict, kind: ReferenceKind, digits: int = 1) -> str:
    """Such as ``5.2 % slower than published (4.9 to 5.5 %)``."""
    delta = verdict.delta_pct
    assert delta is not None, "a verdict on a difference has one"
    runs = verdict.reference.runs if verdict.reference else None
    name = NAMES[kind] + (f" of {runs} runs" if kind == "baseline" and runs and runs > 1 else "")
    interval = f" ({_interval(verdict.ci95_pct, -1 if delta < 0 else 1, digits)})" if verdict.ci95_pct else ""
    if not float(percent(delta)):
        return f"as fast as {name}{interval}"
    return f"{percent(abs(delta), digits)} % {'slower' if delta > 0 else 'faster'} than {name}{interval}"


def _interval(interval: Interval, sign: int, digits: int) -> str:
    low, high = sorted(sign * end for end in interval)
    return f"{percent(low, digits)} to {percent(high, digits)} %"


def percent(value: float, digits: int = 1) -> str:
    """With ``digits`` after the point, two at least of a small value."""
    digits = digits if abs(value) >= 0.095 else max(digits, 2)
    return f"{round(value, digits) + 0.0:.{digits if round(value, digits) else 1}f}"


def _tolerance(verdict: Verdict, digits: int) -> str:
    limit = verdict.tolerance_pct
    return "" if limit is None else f", {TOLERATED[verdict.verdict]} {percent(limit, digits)} %"


def _reasons(verdict: Verdict) -> Iterator[str]:
    """Why there is no clear verdict, and what would tell."""
    if verdict.more_runs:
        yield f"{counted(verdict.more_runs, 'more run')} would tell"
    reason = (verdict.reason or "").removeprefix(_unseen(verdict)).removeprefix("; ")
    if reason and not (verdict.more_runs and reason == UNDECIDED):
        yield reason


def _unseen(verdict: Verdict) -> str:
    """The part of the reason that the end of the sentence says."""
    interval, smallest, limit = verdict.ci95_pct, verdict.smallest_visible_change_pct, verdict.tolerance_pct
    if interval is None or smallest is None or limit is None:
        return ""
    return unseen(interval, smallest, limit) or ""


def _shown(verdict: Verdict) -> Iterator[str]:
    """What the data would have shown, where no difference was found."""
    smallest, limit = verdict.smallest_visible_change_pct, verdict.tolerance_pct
    if smallest is None or verdict.verdict not in ("pass", "inconclusive"):
        return
    text = percent(smallest, _digits(limit, smallest))
    what = f"only a change above {text}" if limit is not None and smallest > limit else f"a change of {text}"
    yield f"{what} % would have shown"


def _weaknesses(verdict: Verdict, kind: ReferenceKind) -> Iterator[str]:
    """What a person has to know beside the difference."""
    weak = [condition for condition in verdict.conditions if condition.effect == "weakens"]
    for condition in weak:
        if condition.key == WINDOW and condition.own and condition.reference:
            own, other = _statistic(condition.own), _statistic(condition.reference)
            yield f"{FIGURES[kind]} is {other}, yours {own}"
        if title := SPOILED.get(condition.key):
            sides = ((condition.own, "yours"), (condition.reference, FIGURES[kind]))
            yield from (f"{title} {whose}: {_of_one(what)}" for what, whose in sides if what)
    if others := [condition for condition in weak if condition.key not in (WINDOW, CHANGED_COPY, *SPOILED, *EXPLAINED)]:
        yield differing(others)
    if kind == "published":
        spread = "is of one run" if verdict.reference and verdict.reference.step_time_s_ci95 else "has no spread"
        yield f"a soft verdict: a single published figure {spread}"


def _of_one(text: str) -> str:
    """What is known of the first of several runs; the table of conditions has the others."""
    first, *others = text.split(BETWEEN_RUNS)
    return f"{first} (and {len(others)} more like it)" if others else first


def _statistic(steps: str) -> str:
    """The statistic of a window: the one step of ``last`` or ``49``, the mean of ``35-44``."""
    if steps == "last":
        return "the last step's"
    return f"step {steps}'s" if steps.isdecimal() else f"the mean of {steps}"
