# SPDX-License-Identifier: Apache-2.0
"""A log with what is known of its run, from the record beside it in a run folder, else from the log alone. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from llmb.catalogue.records import PARALLEL
from llmb.checkpoints.origin import Origin
from llmb.logs.configuration import INFERRED_RELEASE
from llmb.metrics.anomalies import Anomalies, find_anomalies
from llmb.metrics.throughput import SECONDS_PER_DAY
from llmb.runs.identity import RunIdentity, Value

if TYPE_CHECKING:  # where records are known, what reads logs is not needed
    from llmb.logs.files import ParsedFile
    from llmb.logs.outcome import LogOutcome
    from llmb.traces.nccl_network import Network

LOGGED = "logged"
"""The convention of a FLOP rate that the log prints: whatever its framework counts."""
ASSUMED = "layout.assumed"
"""Key of a configuration whose layout is that of the recipe, because the log does not tell its own."""
BATCH: tuple[str, ...] = ("mbs", "gbs")
_AROUND_EXPERIMENT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:_\d+)*\.out(?:\.gz)?$")
"""Parts of a log's name that are left out: the account, and the numbers of the job and of its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRun:
    """What is not known is None. ``configuration`` has the keys of a run's identity, as far as they are known."""

    file: "ParsedFile"
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
    recorded_release: str | None = None
    """Release of the recipe, by the record."""
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
    network: "Network | None" = None
    """None if neither a record nor the log tells."""
    copy_of: str | None = None
    """Why the run does not count: another file has it, too."""

    @property
    def outcome(self) -> "LogOutcome":
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
    def release(self) -> str | None:
        """Release of the reference document."""
        return self.recorded_release or self.text("release")

    @property
    def release_source(self) -> Literal["record", "path", "form of the name"] | None:
        """Who tells the release; only names of one release have the form of theirs."""
        if self.release is None:
            return None
        if self.recorded_release:
            return "record"
        return "form of the name" if self.configuration.get(INFERRED_RELEASE) else "path"

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
        unknown = ParsedRun(file=replace(self.file, outcome=without_figures(self.outcome, reason)), id=self.id)
        figures = ("figures", "anomalies", "mfu_pct", "tokens_per_s_per_gpu", "days_per_1t_tokens")
        return replace(self, file=unknown.file, **{name: getattr(unknown, name) for name in figures})

    def with_figures(self, mfu_pct: Mapping[str, float | None], tokens_per_s_per_gpu: float | None = None) -> Self:
        """With what the catalogue knows of the log's configuration."""
        gpus = self.gpus
        days = 1e12 / (tokens_per_s_per_gpu * gpus) / SECONDS_PER_DAY if tokens_per_s_per_gpu and gpus else None
        return replace(self, mfu_pct=mfu_pct, tokens_per_s_per_gpu=tokens_per_s_per_gpu, days_per_1t_tokens=days)


def without_figures(outcome: "LogOutcome", reason: str) -> "LogOutcome":
    """The outcome of an invalid run, without its figures."""
    return replace(outcome, status="invalid", reason=reason, step_time_s=None, tflops_per_gpu=None, step_times_s=())


def layout_text(layout: Mapping[str, int]) -> str:
    """Such as ``tp4 pp8 mbs1 gbs252``, without parallel sizes of 1."""
    return " ".join(f"{name}{value}" for name, value in layout.items() if value > 1 or name in BATCH)


def log_identity(file: "ParsedFile") -> RunIdentity:
    """Equal for logs of repeats.

    The name counts as a whole if it does not tell what was trained: two runs are not taken for repeats because nothing
    is known of either.
    """
    outcome = file.outcome
    known = dict(outcome.configuration)
    if outcome.format:
        known["program"] = outcome.format
    if "workload" not in known:
        known["experiment"] = _AROUND_EXPERIMENT.sub("", file.path.name)
    return RunIdentity(configuration=known)


def anomalies_of(outcome: "LogOutcome") -> Anomalies | None:
    """None unless the steps of the window follow each other."""
    times, window = outcome.step_times_s, outcome.window
    if not window or len(times) != window.last - window.first + 1:
        return None
    return find_anomalies(times, window.first)
