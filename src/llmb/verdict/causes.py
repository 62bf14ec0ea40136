# SPDX-License-Identifier: Apache-2.0
"""Why a run is slow: causes by their share of a step, and what the evidence at hand does not tell. Pure.

Against a reference, a cause is what the run has more of than its baseline, and what differs between them takes what
was not measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llmb.catalogue.records import Record
from llmb.missing import Missing
from llmb.verdict.causes_evidence import CauseName, CauseRule, Differing, Evidence, ReferenceTime, cause_rules
from llmb.verdict.causes_measured import FINDERS, Bound, FoundCause

MOST_SHOWN = 4
"""Differences of one cause."""


class Cause(Record):
    """A cause and what it costs."""

    name: CauseName
    title: str
    share_s: float | None
    """Seconds per step; None if that is not known."""
    share_pct: float | None
    """Share in percent of the step time."""
    bound: Bound
    in_step: bool
    """False if it lies between steps, and lengthens the run but not the step time."""
    evidence: tuple[str, ...]
    confirm: str
    """The command that confirms it."""


class UnknownCause(Record):
    """What may be a cause or not: the run does not tell."""

    name: CauseName
    title: str
    reason: str
    confirm: str
    """The command that tells."""


class Explanation(Record):
    """Causes that may be behind all others first, then by share, largest first; last those of unknown share."""

    run: str
    """Its folder, or its log."""
    step_time_s: float
    reference_s: float | None
    """The step time of the reference for as many sequences; None without a reference."""
    reference: str | None
    gap_s: float | None
    """How much longer a step takes than the reference's."""
    unexplained_s: float | None
    """What of the gap no cause accounts for."""
    causes: tuple[Cause, ...]
    not_known: tuple[UnknownCause, ...]
    predicted_s: dict[str, float] | None = None
    """What each part of the step was predicted to take before the run; None if nothing was."""


Words = Mapping[str, str]
"""What stands in the commands that confirm: ``run``, ``command``, ..."""


def explain_evidence(run: Evidence, reference: ReferenceTime | None, words: Words) -> Explanation:
    measured = dict(_measured(run, reference.evidence if reference else None))
    found = {name: item for name, item in measured.items() if isinstance(item, FoundCause)}
    gap_s = run.step_time_s - reference.step_time_s if reference else None
    rest_s = None
    least_s = run.step_time_s * cause_rules().least_share_pct.value / 100
    if reference and gap_s is not None:
        found |= _window(run, reference)
        rest_s = gap_s - sum(item.share_s or 0.0 for item in found.values() if item.in_step)
        differing = _differing(reference.differing, found, rest_s)
        found |= _suspected(differing) if gap_s >= least_s else differing
        if any(item.share_s for item in differing.values()):
            rest_s = min(rest_s, 0.0)
    causes = [
        _cause(name, item, run, words)
        for name, item in found.items()
        if item.share_s is None or item.share_s >= least_s
    ]
    return Explanation(
        run=words["run"],
        step_time_s=run.step_time_s,
        reference_s=reference.step_time_s if reference else None,
        reference=reference.source if reference else None,
        gap_s=gap_s,
        unexplained_s=rest_s if rest_s is not None and rest_s >= least_s else None,
        causes=tuple(sorted(causes, key=_order)),
        not_known=tuple(
            UnknownCause(
                name=name,
                title=cause_rules().rule(name).title,
                reason=item.reason,
                confirm=_command(cause_rules().rule(name), words),
            )
            for name, item in measured.items()
            if isinstance(item, Missing)
        ),
    )


def _measured(run: Evidence, baseline: Evidence | None) -> Iterator[tuple[CauseName, FoundCause | Missing]]:
    """Less what the baseline has of the same. What differs by choice is left to the differences."""
    for name, find in FINDERS.items():
        item = find(run)
        if item is None:
            continue
        if baseline is None or isinstance(item, Missing) or cause_rules().rule(name).first:
            yield name, item
            continue
        other = find(baseline)
        if item.share_s is None:
            if not isinstance(other, FoundCause):
                yield name, item
        elif name == "recomputation":
            if baseline.work != run.work:
                yield name, item
        elif isinstance(other, Missing):
            yield name, item
        else:
            yield name, _more(item, other)


def _more(item: FoundCause, other: FoundCause | None) -> FoundCause:
    """``item`` without the share that the baseline has as well."""
    if other is None or other.share_s is None or item.share_s is None:
        return item
    note = f"the baseline has {other.share_s:.3f} s of it, which are not counted"
    return replace(item, share_s=item.share_s - other.share_s, evidence=(*item.evidence, note))


def _window(run: Evidence, reference: ReferenceTime) -> dict[CauseName, FoundCause]:
    """Exact: the run's own steps in the reference's window."""
    if reference.window_mean_s is None:
        return {}
    said = f"the reference is of {reference.window_text}; those of this run take {reference.window_mean_s:.4g} s"
    return {"window": FoundCause(share_s=run.step_time_s - reference.window_mean_s, evidence=(said,))}


def _differing(
    differing: tuple[Differing, ...], found: Mapping[CauseName, FoundCause], rest_s: float
) -> dict[CauseName, FoundCause]:
    """The rest of the gap goes to what differs: all of it to one cause, at most all of it to each of several."""
    rules = cause_rules()
    by_rule: dict[CauseName, list[Differing]] = {}
    for item in differing:
        rule = rules.rule_of_key(item.key)
        if rule and (rule.name not in found or rule.name == "recomputation"):
            by_rule.setdefault(rule.name, []).append(item)
    timed = [name for name in by_rule if rules.rule(name).times_steps]
    chosen = [name for name in timed if name not in ("machine", "software")]
    causes: dict[CauseName, FoundCause] = {}
    for name, items in by_rule.items():
        said = _said(items)
        measured = found.get(name)
        share_s = max(rest_s, 0.0) if name in (chosen or timed) else None
        if measured:  # its own share is part of the rest no longer
            share_s, said = (share_s or 0.0) + (measured.share_s or 0.0), (*said, *measured.evidence)
        if share_s is None and name in timed:
            said = (*said, "listed because it differs; nothing shows that it costs time")
        bound: Bound = "about" if len(chosen or timed) == 1 else "at most"
        causes[name] = FoundCause(share_s=share_s, bound=bound, evidence=said)
    return causes


def _suspected(differing: Mapping[CauseName, FoundCause]) -> dict[CauseName, FoundCause]:
    """What is named before all others also if their shares leave nothing to it: it may be behind them."""
    return {
        name: replace(item, share_s=item.share_s or None) if cause_rules().rule(name).first else item
        for name, item in differing.items()
    }


def _said(items: Sequence[Differing]) -> tuple[str, ...]:
    shown = [
        f"{item.key}: {item.own or 'none'}, reference {item.reference or 'none'}{_worth(item)}"
        for item in items[:MOST_SHOWN]
    ]
    return (*shown, *([f"and {len(items) - MOST_SHOWN} more"] if len(items) > MOST_SHOWN else []))


def _worth(item: Differing) -> str:
    return f", worth {item.slower_pct[0]:g} to {item.slower_pct[1]:g} % of a step" if item.slower_pct else ""


def _cause(name: CauseName, item: FoundCause, run: Evidence, words: Words) -> Cause:
    rule = cause_rules().rule(name)
    return Cause(
        name=name,
        title=rule.title,
        share_s=item.share_s,
        share_pct=None if item.share_s is None else 100 * item.share_s / run.step_time_s,
        bound=item.bound,
        in_step=item.in_step,
        evidence=item.evidence,
        confirm=_command(rule, words),
    )


def _command(rule: CauseRule, words: Words) -> str:
    return rule.confirm.format_map(words)


def _order(cause: Cause) -> tuple[bool, float, int]:
    """Equal shares, and what is named first, in the order of the data file, in which likelier causes come first."""
    names = [rule.name for rule in cause_rules().causes]
    first = cause_rules().rule(cause.name).first
    share_s = -1.0 if first or cause.share_s is None else cause.share_s
    return not first, -share_s, names.index(cause.name)
