# SPDX-License-Identifier: Apache-2.0
"""A log with what is known of its run: from the record beside it in a run folder, else from the log alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from llmb.analysis.analyzed_run import log_identity
from llmb.catalogue.records import PARALLEL, Window
from llmb.checkpoints.origin import Origin
from llmb.logs.files import ParsedFile, parse_file
from llmb.logs.outcome import FINISHED, LogOutcome, digest_of
from llmb.metrics.anomalies import Anomalies, find_anomalies
from llmb.metrics.statistics import describe
from llmb.metrics.throughput import SECONDS_PER_DAY
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import RunFolder
from llmb.runs.identity import RunIdentity, Value, conditions_of, identity_of
from llmb.runs.record import RunRecord, read_record
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import figures_of, measured_packing
from llmb.runs.short_id import short_id
from llmb.runs.steps import Step, read_steps

LOGGED = "logged"
"""The convention of a FLOP rate that the log prints: whatever its framework counts."""
ASSUMED = "layout.assumed"
"""Key of a configuration whose layout is that of the recipe, because the log does not tell its own."""
BATCH: tuple[str, ...] = ("mbs", "gbs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRun:
    """What is not known is None. ``configuration`` has the keys of a run's identity, as far as they are known."""

    file: ParsedFile
    id: str
    """Short; of a run folder the one that all commands know."""
    configuration: Mapping[str, Value] = field(default_factory=dict)
    software: Mapping[str, Value] = field(default_factory=dict)
    figures: Literal["exact", "rounded"] | None = None
    """Whether step times are those of ``metrics.jsonl``, or rounded as the log prints them."""
    nodes: tuple[str, ...] = ()
    time_s: float | None = None
    """When the run began, in seconds since 1970; without a record, when its log was last written."""
    label: str | None = None
    origin: Origin | None = None
    folder: Path | None = None
    """The run folder, if the log lies in one."""
    unread_record: str | None = None
    """Why the record beside the log cannot be read, so that only the log counts."""
    anomalies: Anomalies | None = None
    """Anomalies of the window's steps; None without step times."""
    mfu_pct: Mapping[str, float | None] = field(default_factory=dict)
    """By convention; empty if it is not known."""
    tokens_per_s_per_gpu: float | None = None
    days_per_1t_tokens: float | None = None
    run_id: str | None = None
    """That of the record."""
    content: str | None = None
    """Digest of a run with a record: equal for copies that were not changed."""
    copy_of: str | None = None
    """Why the run does not count: another file has it, too."""

    @property
    def outcome(self) -> LogOutcome:
        return self.file.outcome

    @property
    def key(self) -> str | None:
        """Equal for repeats: the same configuration and the same software. None if neither is known."""
        known = {**self.configuration, **self.software}
        return RunIdentity(configuration=known).key if known else None

    def text(self, key: str) -> str | None:
        """A value of the configuration as text."""
        value = self.configuration.get(key)
        return None if value is None else str(value)

    def number(self, key: str) -> int | None:
        value = self.configuration.get(key)
        return value if isinstance(value, int) else None

    @property
    def gpus(self) -> int | None:
        return self.number("layout.gpus")

    @property
    def node_count(self) -> int | None:
        return len(self.nodes) or self.number("nodes")

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes and batch sizes that are known."""
        values = {name: self.number(f"layout.{name}") for name in (*PARALLEL, *BATCH)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def layout_source(self) -> Literal["record", "log", "recipe"] | None:
        """Who tells the layout; the recipe's is an assumption."""
        if not self.layout:
            return None
        return "record" if self.folder else "recipe" if self.configuration.get(ASSUMED) else "log"

    @property
    def layout_text(self) -> str:
        return layout_text(self.layout)

    @property
    def recipe_text(self) -> str:
        """Such as ``pretrain_llama3.1 8b bf16``; empty if it is not known."""
        return " ".join(filter(None, map(self.text, ("workload", "size", "dtype"))))

    def spoiled(self, reason: str) -> Self:
        """The run as an invalid one, without figures."""
        unknown = ParsedRun(file=ParsedFile(self.file.path, without_figures(self.outcome, reason)), id=self.id)
        figures = ("figures", "anomalies", "mfu_pct", "tokens_per_s_per_gpu", "days_per_1t_tokens")
        return replace(self, file=unknown.file, **{name: getattr(unknown, name) for name in figures})

    def with_figures(self, mfu_pct: Mapping[str, float | None], tokens_per_s_per_gpu: float | None = None) -> Self:
        """With what the catalogue knows of the log's configuration."""
        gpus = self.gpus
        days = 1e12 / (tokens_per_s_per_gpu * gpus) / SECONDS_PER_DAY if tokens_per_s_per_gpu and gpus else None
        return replace(self, mfu_pct=mfu_pct, tokens_per_s_per_gpu=tokens_per_s_per_gpu, days_per_1t_tokens=days)


def without_figures(outcome: LogOutcome, reason: str) -> LogOutcome:
    """The outcome of an invalid run, without its figures."""
    return replace(outcome, status="invalid", reason=reason, step_time_s=None, tflops_per_gpu=None, step_times_s=())


def layout_text(layout: Mapping[str, int]) -> str:
    """Such as ``tp4 pp8 mbs1 gbs252``, without parallel sizes of 1."""
    return " ".join(f"{name}{value}" for name, value in layout.items() if value > 1 or name in BATCH)


def known_run(file: ParsedFile) -> ParsedRun:
    """The run that a file which was parsed is the log of."""
    path = file.path.absolute()
    folder = RunFolder(path.parent)
    is_run, unread_record = path.name == folder.log.name and folder.record.is_file(), None
    if is_run:
        try:
            return _recorded(file, folder, read_record(folder))
        except OSError as error:
            unread_record = error.strerror or "it cannot be read"
        except BrokenRecord as error:
            unread_record = error.what
    return ParsedRun(
        file=file,
        id=short_id(str(folder.path if is_run else path)),
        unread_record=unread_record,
        configuration=log_identity(file).configuration if file.outcome.steps else {},
        figures="rounded" if file.outcome.step_time_s else None,
        time_s=_written_s(file.path),
        anomalies=_anomalies(file.outcome),
    )


def _anomalies(outcome: LogOutcome) -> Anomalies | None:
    times, window = outcome.step_times_s, outcome.window
    if not window or len(times) != window.last - window.first + 1:  # steps have to follow each other
        return None
    return find_anomalies(times, window.first)


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _recorded(file: ParsedFile, folder: RunFolder, record: RunRecord) -> ParsedRun:
    environment = record.environment
    file = _with_planned_window(file, record)
    steps = _steps(folder)
    contradiction = why_contradicting(record, steps, log_gpus=file.outcome.gpus)
    if contradiction and (file.outcome.status in FINISHED or record.status == "success"):
        outcome, exact = without_figures(file.outcome, contradiction), False
    else:
        outcome, exact = _with_exact_times(_as_recorded(file.outcome, record, steps), steps)
    figures = {}
    if outcome.step_time_s and outcome.window:
        packing = measured_packing(record.plan, _inside(steps, outcome.window)) if exact else None
        figures = figures_of(record.plan, outcome.step_time_s.mean, packing)
    return ParsedRun(
        file=ParsedFile(file.path, outcome),
        id=record.id,
        configuration=identity_of(record).configuration,
        software={key: value for key, value in conditions_of(record).items() if key.startswith("software.")},
        figures=("exact" if exact else "rounded") if outcome.step_time_s else None,
        nodes=environment.nodes if environment else (),
        time_s=datetime.fromisoformat(record.started_at).timestamp() if record.started_at else None,
        label=record.label,
        origin=record.plan.origin,
        folder=folder.path,
        anomalies=_anomalies(outcome),
        run_id=record.run_id,
        content=digest_of(outcome.digest, [(step.step, step.step_time_s) for step in steps]),
        mfu_pct=figures.get("mfu_pct", {}),
        tokens_per_s_per_gpu=figures.get("tokens_per_s_per_gpu"),
        days_per_1t_tokens=figures.get("days_per_1t_tokens"),
    )


def _with_planned_window(file: ParsedFile, record: RunRecord) -> ParsedFile:
    """A log does not tell the window that the run was planned with; the record does. Another rule was asked for."""
    read, window = file.outcome.window, record.window
    if read is None or read.rule != DEFAULT_RULE or read == window:
        return file
    again = parse_file(file.path, f"{window.first}-{window.last}").outcome
    return ParsedFile(file.path, replace(again, window=window) if again.window else again)


def _steps(folder: RunFolder) -> list[Step]:
    """Empty for a program that writes its steps to the log alone, and for a file that is damaged."""
    try:
        return read_steps(folder.steps)
    except (OSError, BrokenRecord):
        return []


def _inside(steps: list[Step], window: Window) -> list[Step]:
    return [step for step in steps if window.first <= step.step <= window.last]


def _as_recorded(outcome: LogOutcome, record: RunRecord, steps: list[Step]) -> LogOutcome:
    """The record knows what the log may not: whose it is, whether the run is still running, and how it ended."""
    if outcome.status == "not_training_log":
        why = f": {record.reason}" if record.reason else ""
        return replace(outcome, status="no_data", reason=f"no step line; the run is {record.status} by its record{why}")
    if record.status == "invalid":
        return without_figures(outcome, record.reason or "invalid by its record")
    if record.status == "failed" and outcome.status in FINISHED:
        failed = without_figures(outcome, f"the run failed, by its record: {record.reason}")
        return replace(failed, status="incomplete")
    if outcome.status != "incomplete":
        return outcome
    if record.status == "failed":
        return replace(outcome, reason=f"the run failed, by its record: {record.reason}")
    if record.status in ("queued", "running"):
        done = "no step" if outcome.max_step is None else f"step {outcome.max_step}"
        return replace(outcome, reason=f"the run has not ended, by its record; {done} is the last one in the log")
    asked = outcome.window
    window = asked if asked and asked.rule != record.window.rule else record.window
    if record.status == "success" and len(_inside(steps, window)) == window.last - window.first + 1:
        reason = f"steps {window.first}-{window.last} of {record.plan.last_step + 1} (attempt {len(record.attempts)})"
        times = describe([step.step_time_s for step in _inside(steps, window)])
        return replace(outcome, status="success", reason=reason, window=window, step_time_s=times)
    return outcome


def _with_exact_times(outcome: LogOutcome, steps: list[Step]) -> tuple[LogOutcome, bool]:
    """With the step times of ``metrics.jsonl`` if it has all of the window, and whether it does."""
    window = outcome.window
    if not outcome.step_time_s or not window:
        return outcome, False
    inside = _inside(steps, window)
    if len(inside) != window.last - window.first + 1 or any(step.profiled for step in inside):
        return outcome, False
    times = tuple(step.step_time_s for step in inside)
    return replace(outcome, step_times_s=times, step_time_s=describe(times)), True
