# SPDX-License-Identifier: Apache-2.0
"""A run in the form in which commands analyze it, whichever program trained it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmb.base.statistics import Statistics
from llmb.catalogue.records import PARALLEL, Recipe, Window
from llmb.catalogue.throughput import SECONDS_PER_DAY
from llmb.readers.anomalies import Anomalies
from llmb.readers.logs.log_files import ParsedFile
from llmb.readers.logs.outcome import LogOutcome
from llmb.readers.nccl.nccl_network import Network
from llmb.runs.checkpoints.origin import Origin
from llmb.runs.conditions import RunIdentity, Value, key_of, steps_text
from llmb.runs.record import RunRecord
from llmb.runs.result import Faults

LOGGED = "logged"
"""The key, among FLOP conventions, of rates that a log reports."""
ASSUMED = "layout.assumed"
"""The configuration key that marks a layout taken from the recipe."""
BATCH: tuple[str, ...] = ("mbs", "gbs")
_LAYOUT = {f"layout.{name}": name for name in (*PARALLEL, *BATCH)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedRun:
    """A run's identity, outcome and speed; unknown values are None or empty."""

    id: str
    """The short id that commands accept and print."""
    path: Path
    """The run's folder; without a record, its log or its case in a comparison of engines."""
    identity: RunIdentity
    conditions: Mapping[str, Value] = field(default_factory=dict)
    """The conditions that may differ between repeats, under dotted keys."""
    label: str | None = None
    campaign: str | None = None
    started_s: float | None = None
    """Unix time of the start, else of the submission or, with only a log, of its last write."""
    status: str
    reason: str | None = None
    window: Window | None = None
    step_times_s: Sequence[float] = ()
    """Step times of the window's steps, in order, without profiled steps; empty unless the run has statistics."""
    first_times_s: Sequence[float] = ()
    """The run's first step times in full precision; empty if only the log has step times."""
    step_time_s: Statistics | None = None
    figures: Literal["exact", "rounded"] | None = None
    """The precision of step times: full, from ``metrics.jsonl``, or rounded as the log prints them."""
    mfu_pct: Mapping[str, float | None] = field(default_factory=dict)
    """MFU in percent by FLOP convention."""
    tokens_per_s_per_gpu: float | None = None
    days_per_1t_tokens: float | None = None
    anomalies: Anomalies | None = None
    """Anomalies of the window's steps, if they were searched for."""
    nodes: tuple[str, ...] = ()
    network: Network | None = None
    """The network that the record or the log reports."""
    faults: Faults = field(default_factory=dict)
    """The known disturbances of the run."""
    recipe: Recipe | None = None
    record: RunRecord | None = None
    unread_record: str | None = None
    """The reason why the record beside the log cannot be read."""
    log: ParsedFile | None = None
    """The parsed log, whose outcome takes the record into account; None if it was not read."""
    source: str | None = None
    """The run's own id, or a substitute from its log: equal for copies. None if only ``path`` identifies it."""
    content: str | None = None
    """Digest of the run's results, equal for unchanged copies."""
    copy_of: str | None = None
    """The reason why a copy of another run does not count; None if the run counts."""

    @property
    def counted_as(self) -> str:
        """Key that is equal for copies of the same run, which count once."""
        return self.source or str(self.path.absolute())

    @property
    def outcome(self) -> LogOutcome:
        """Return the outcome in the log, which must have been read."""
        assert self.log, "the log was read"
        return self.log.outcome

    @property
    def log_path(self) -> Path:
        assert self.log, "the log was read"
        return self.log.path

    @property
    def configuration(self) -> Mapping[str, Value]:
        return self.identity.configuration

    @property
    def software(self) -> dict[str, Value]:
        return {key: value for key, value in self.conditions.items() if key.startswith("software.")}

    @property
    def key(self) -> str | None:
        """Key that is equal for repeats with the same software; None if nothing is known about the run."""
        values = {**self.configuration, **self.software}
        return key_of(values) if values else None

    @property
    def values(self) -> dict[str, Value]:
        """Return configuration and conditions by key, with the window as a condition."""
        window = {"window": steps_text(self.window)} if self.window else {}
        return {**self.configuration, **self.conditions, **window}

    def text(self, key: str) -> str | None:
        value = self.configuration.get(key)
        return None if value is None else str(value)

    def number(self, key: str) -> int | None:
        value = self.configuration.get(key)
        return value if isinstance(value, int) else None

    @property
    def release(self) -> str | None:
        """Release of the reference document; None if unknown."""
        return (self.recipe and self.recipe.release) or self.text("release")

    @property
    def origin(self) -> Origin | None:
        """Origin of the run's weights and data; None if the run has no record."""
        return self.record.plan.origin if self.record else None

    @property
    def gpus(self) -> int | None:
        return self.number("layout.gpus")

    @property
    def node_count(self) -> int | None:
        return len(self.nodes) or self.number("nodes")

    @property
    def layout(self) -> dict[str, int]:
        values = self.configuration
        return {name: value for key, name in _LAYOUT.items() if isinstance(value := values.get(key), int)}

    @property
    def layout_source(self) -> Literal["record", "log", "recipe"] | None:
        """The source of the layout, which is only assumed if it is ``recipe``; None if no layout is known."""
        if not self.layout:
            return None
        return "record" if self.record else "recipe" if self.configuration.get(ASSUMED) else "log"

    @property
    def layout_text(self) -> str:
        return layout_text(self.layout)

    @property
    def recipe_text(self) -> str:
        """Return a string such as ``pretrain_llama3.1 8b bf16``; empty if the recipe is unknown."""
        return " ".join(filter(None, map(self.text, ("workload", "size", "dtype"))))

    def configured(self, configuration: dict[str, Value]) -> "AnalyzedRun":
        return replace(self, identity=RunIdentity(configuration=configuration))

    def with_outcome(self, log: ParsedFile) -> "AnalyzedRun":
        return replace(self, **log_fields(log, self.figures or "rounded"))

    def with_figures(self, mfu_pct: Mapping[str, float | None], tokens_per_s_per_gpu: float | None) -> "AnalyzedRun":
        """Return the run with this MFU and token rate, and the resulting days per 10^12 tokens."""
        gpus = self.gpus
        days = 1e12 / (tokens_per_s_per_gpu * gpus) / SECONDS_PER_DAY if tokens_per_s_per_gpu and gpus else None
        return replace(self, mfu_pct=mfu_pct, tokens_per_s_per_gpu=tokens_per_s_per_gpu, days_per_1t_tokens=days)

    def invalid(self, reason: str) -> "AnalyzedRun":
        """Return the run with the status ``invalid`` and ``reason``, without statistics, rates and anomalies."""
        log = replace(self.log, outcome=without_figures(self.outcome, reason)) if self.log else None
        bare = replace(self, log=log, status="invalid", reason=reason, step_times_s=(), step_time_s=None, figures=None)
        return replace(bare.with_figures({}, None), anomalies=None)


def log_fields(log: ParsedFile, figures: Literal["exact", "rounded"] = "rounded") -> dict[str, Any]:
    """Return the fields of ``AnalyzedRun`` that a log provides; ``reason`` is None for a success."""
    outcome = log.outcome
    return {
        "log": log,
        "status": outcome.status,
        "reason": None if outcome.status == "success" else outcome.reason,
        "window": outcome.window,
        "step_times_s": outcome.step_times_s,
        "step_time_s": outcome.step_time_s,
        "figures": figures if outcome.step_time_s else None,
    }


def needs_catalogue(runs: Iterable[AnalyzedRun]) -> bool:
    """Return whether any run has a GPU type but no record."""
    return any(run.record is None and run.text("gpu_type") for run in runs)


def without_figures(outcome: LogOutcome, reason: str) -> LogOutcome:
    """Return the outcome of an invalid run, without its measurements."""
    return replace(outcome, status="invalid", reason=reason, step_time_s=None, tflops_per_gpu=None, step_times_s=())


def layout_text(layout: Mapping[str, int]) -> str:
    """Return a string such as ``tp4 pp8 mbs1 gbs252``, without parallel sizes of 1."""
    return " ".join(f"{name}{value}" for name, value in layout.items() if value > 1 or name in BATCH)


@dataclass(frozen=True, slots=True)
class ExcludedRun:
    run: str
    reason: str


def by_reason(left_out: Iterable[ExcludedRun]) -> dict[str, list[str]]:
    runs: dict[str, list[str]] = {}
    for one in left_out:
        runs.setdefault(one.reason, []).append(one.run)
    return runs


@dataclass(frozen=True, slots=True)
class RunSet:
    title: str
    runs: tuple[AnalyzedRun, ...]
    left_out: tuple[ExcludedRun, ...] = ()


def without_unmeasured(some: RunSet) -> RunSet:
    """Return the set with the runs that do not count as measurements moved to ``left_out``."""
    runs = tuple(run for run in some.runs if exclusion_reason(run) is None)
    dropped = [ExcludedRun(run.id, reason) for run in some.runs if (reason := exclusion_reason(run))]
    return RunSet(some.title, runs, (*some.left_out, *dropped))


def exclusion_reason(run: AnalyzedRun) -> str | None:
    """Return why the run does not count as a measurement; None if it does."""
    flaw = flaw_of(run)
    return (
        f"{run.status.replace('_', ' ')}: {flaw}"
        if flaw and run.reason and run.status not in ("success", "cancelled")
        else flaw
    )


def flaw_of(run: AnalyzedRun) -> str | None:
    """Return why a run is not a measurement; None if it is one."""
    if run.status == "cancelled" and run.reason:
        return f"cancelled: {run.reason}"
    if run.status != "success":
        return run.reason or run.status.replace("_", " ")
    return run.reason or (None if run.step_time_s else "its steps have no statistics")


def grouped(runs: Iterable[AnalyzedRun]) -> list[list[AnalyzedRun]]:
    """Group the runs by identity, in the order of the first run of each group."""
    groups: dict[str, list[AnalyzedRun]] = {}
    for run in runs:
        groups.setdefault(run.identity.key, []).append(run)
    return list(groups.values())
