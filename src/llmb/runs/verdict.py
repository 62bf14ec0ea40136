# SPDX-License-Identifier: Apache-2.0
"""A verdict and all that it rests on; what differs between a run and its reference, and what that means. Pure but for
its data file."""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record, Window

VerdictName = Literal["pass", "regressed", "improved", "inconclusive", "invalid", "not comparable"]
ReferenceKind = Literal["published", "baseline", "expectation", "prediction"]
Effect = Literal["prevents", "weakens", "noted"]
Interval = tuple[float, float]


class Reference(Record):
    """The step time that a run is judged against."""

    kind: ReferenceKind
    step_time_s: float
    step_time_s_ci95: Interval | None = None
    """None for a single figure whose spread is not published."""
    window: Window | None = None
    """None if the source does not tell which steps its figure is of."""
    window_text: str = ""
    """The window as the source words it."""
    convention: str | None = None
    """The source's way of counting FLOPs; None if it has only a step time."""
    source: str
    """Document and line, folder of the baseline, or the user's file and entry."""
    runs: int | None = None
    """Number of runs of a baseline; None for a single figure."""


class Condition(Record):
    """Something that differs between a run and its reference. A value is None if that side does not tell."""

    key: str
    """Dotted, such as ``software.driver``."""
    own: str | None
    reference: str | None
    effect: Effect
    """The effect on a verdict: prevents it, makes it soft, or is only reported."""
    slower_pct: Interval | None = None
    """The slowdown of the run's steps by it, in percent: from, to; None if it is not known."""
    why: str | None = None
    """The explanation, with its source, where the reference has one."""


class Verdict(Record):
    """The keys are a contract."""

    verdict: VerdictName
    soft: bool
    """The reference, or a condition that differs, allows only a rough statement."""
    delta_pct: float | None = None
    """Step time relative to the reference, in percent of it; above 0 is slower. None without two figures."""
    ci95_pct: Interval | None = None
    """95 % confidence interval of ``delta_pct``."""
    smallest_visible_change_pct: float | None = None
    """The smallest slow-down that the data would have shown, in 80 of 100 cases; None where there is no interval."""
    tolerance_pct: float | None = None
    tolerance_source: str | None = None
    reference: Reference | None = None
    conditions: tuple[Condition, ...] = ()
    more_runs: int | None = None
    """The expected number of further runs that decide an inconclusive verdict; None if runs would not."""
    reason: str | None = None
    """Why there is no clear verdict, or why runs allow only a soft one."""
    sentence: str = ""
    """One line for a person, formed from the rest."""


WORST: tuple[VerdictName, ...] = ("regressed", "invalid", "inconclusive", "not comparable", "pass", "improved")
"""The worst first."""
BETTER: tuple[VerdictName, ...] = ("pass", "improved")
"""The verdicts better than an open question."""


def worst(verdicts: Iterable[Verdict]) -> VerdictName:
    return min((verdict.verdict for verdict in verdicts), key=WORST.index)


DATA = Path(__file__).with_name("conditions.yaml")
ORDER: tuple[Effect, ...] = ("prevents", "weakens", "noted")
NETWORK_FAULT = "network_fault"
MACHINE_FAULT = "machine_fault"
OTHER_WORK = "other_work"
UNLIKE_NODES = "unlike_nodes"
CHANGED_COPY = "changed_copy"
ERROR_AT_END = "error_at_end"
EXPLAINED = (NETWORK_FAULT, MACHINE_FAULT)
"""Faults that have to be known to read a difference, and that a command tells more of."""
Faults = Mapping[str, tuple[str, ...]]
"""The disturbances of a run, by the key of their conditions, the most important first."""
_FIGURE = re.compile(r"(?<!\S)\d+(?:\.\d+)?(?!\S)")
BETWEEN_RUNS = " | "
"""Stands between the texts of several runs."""
Values = Mapping[str, str]
"""Conditions of one side by dotted key. A key that is missing is not known."""


class ConditionRule(Record):
    """The meaning of a difference of the keys that fit one of the patterns."""

    keys: tuple[str, ...]
    title: str
    """The title for display; empty if it is the key itself."""
    differs: Effect | Literal["ignored"] | dict[ReferenceKind, Effect]
    """A prediction has the effect of an expectation: both are of conditions that were stated."""
    unknown: Effect | Literal["ignored"] = "ignored"
    important: bool = False
    """True if a change of the setting of a node is likely to change the time of a step."""
    why: str

    def effect(self, kind: ReferenceKind, *, both: bool) -> Effect | None:
        """Return the effect; ``both``: neither side is None. None for ignored keys."""
        stated: ReferenceKind = "expectation" if kind == "prediction" else kind
        effect = self.unknown if not both else self.differs
        effect = effect[stated] if isinstance(effect, dict) else effect
        return None if effect == "ignored" else effect


class ConditionFile(Record):
    """``conditions.yaml``."""

    rules: tuple[ConditionRule, ...]


@cache
def condition_rules() -> tuple[ConditionRule, ...]:
    return read_file(DATA, ConditionFile, wrap="rules").rules


def rule_of(key: str) -> ConditionRule:
    """The last rule holds for every key."""
    return next(rule for rule in condition_rules() if any(fnmatchcase(key, pattern) for pattern in rule.keys))


def title_of(key: str) -> str:
    """Title of a condition, for people."""
    rule = rule_of(key)
    exact = not any("*" in pattern for pattern in rule.keys)
    return rule.title if exact and rule.title else key


def differing(conditions: Iterable[Condition]) -> str:
    """Such as ``program and CUDA graphs (worth 10 to 50 %) differ``."""
    *first, last = dict.fromkeys(f"{title_of(condition.key)}{worth(condition)}" for condition in conditions)
    return f"{', '.join(first)} and {last} differ" if first else f"{last} differs"


def worth(condition: Condition) -> str:
    """Format the slowdown of a run by it; empty if that is not known."""
    return "" if condition.slower_pct is None else " (worth {:g} to {:g} %)".format(*condition.slower_pct)


def find_conditions(own: Values, reference: Values, kind: ReferenceKind) -> tuple[Condition, ...]:
    """Return differences, and important conditions that only one side has; the most important first."""
    conditions = []
    for key in own.keys() | reference.keys():
        values = own.get(key), reference.get(key)
        if values[0] == values[1]:
            continue
        effect = rule_of(key).effect(kind, both=None not in values)
        if effect:
            conditions.append(Condition(key=key, own=values[0], reference=values[1], effect=effect))
    return tuple(sorted(conditions, key=lambda condition: (ORDER.index(condition.effect), condition.key)))


def disturbances(own: Values, reference: Values) -> Iterator[Condition]:
    """Yield disturbances of either side's runs; even the same one on both sides makes conditions unequal."""
    for key in dict.fromkeys((*own, *reference)):
        effect = rule_of(key).effect("baseline", both=False)
        assert effect, "the data file does not ignore it"
        yield Condition(key=key, own=own.get(key), reference=reference.get(key), effect=effect)


def fault_texts(faults: Faults, run_id: str) -> dict[str, str]:
    """Each as one text, with the command that tells more of the run ``run_id``."""
    more = f" ('llmb judge {run_id} --explain' tells more)"
    return {key: "; ".join(texts) + (more if key in EXPLAINED else "") for key, texts in faults.items()}


def together(sides: Iterable[Values]) -> dict[str, str]:
    """Texts of several runs as one by key."""
    every = list(sides)
    keys = dict.fromkeys(key for side in every for key in side)
    texts = {key: BETWEEN_RUNS.join(dict.fromkeys(side[key] for side in every if key in side)) for key in keys}
    if OTHER_WORK in texts and len(every) > 1:
        texts[OTHER_WORK] = _ranges([side[OTHER_WORK] for side in every if OTHER_WORK in side], len(every))
    return texts


def _ranges(texts: Iterable[str], runs: int) -> str:
    """Such as ``other processes used 1.5 to 1.8 of 2 cores during 5 of 6 runs``."""
    alike: dict[str, list[list[str]]] = {}
    for part in "; ".join(texts).split("; "):
        alike.setdefault(_FIGURE.sub("{}", part), []).append(_FIGURE.findall(part))
    return "; ".join(
        f"{form.format(*map(_range, zip(*figures, strict=True)))} during {len(figures)} of {runs} runs"
        for form, figures in alike.items()
    )


def _range(figures: tuple[str, ...]) -> str:
    return " to ".join(dict.fromkeys((min(figures, key=float), max(figures, key=float))))


def condition_values(values: Mapping[str, object], *, unset: str | None = None) -> dict[str, str]:
    """Format values. A None means ``unset``, or that the value is not known."""
    texts = {key: unset if value is None else _text(value) for key, value in values.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def merged(sides: Iterable[Values]) -> dict[str, str]:
    """Conditions of several runs: the one value of all, or all of theirs; without those that not every run tells."""
    every = list(sides)
    keys = set.intersection(*(set(side) for side in every)) if every else set()
    return {key: ", ".join(sorted({side[key] for side in every})) for key in keys}
