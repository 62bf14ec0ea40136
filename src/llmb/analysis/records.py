# SPDX-License-Identifier: Apache-2.0
"""One run in the form in which it is judged and compared, whichever program trained it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmb.catalogue.records import Recipe, Window
from llmb.logs.files import ParsedFile
from llmb.metrics.statistics import Statistics
from llmb.runs.identity import RunIdentity, Value
from llmb.runs.record import RunRecord

_AROUND_EXPERIMENT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:_\d+)*\.out(?:\.gz)?$")
"""Parts of a log's name that are left out: the account, and the numbers of the job and of its start."""


def log_identity(file: ParsedFile) -> RunIdentity:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedRun:
    """A run that ended. One without a record is known by its log alone: ``record`` and ``recipe`` may be None."""

    id: str
    """Short; what commands accept and print."""
    path: Path
    """Its run folder, or its log if it has no record."""
    identity: RunIdentity
    conditions: Mapping[str, Value] = field(default_factory=dict)
    """What may differ between repeats, under dotted keys: software, hardware, nodes, steps, seed."""
    label: str | None = None
    campaign: str | None = None
    started_s: float | None = None
    """Seconds since 1970."""
    status: str
    reason: str | None = None
    window: Window | None = None
    step_times_s: tuple[float, ...] = ()
    """Step times of the window's steps, in order, without profiled ones; empty unless the run has statistics."""
    step_time_s: Statistics | None = None
    nodes: tuple[str, ...] = ()
    disturbing: tuple[str, ...] | None = None
    """Other work on its nodes; None if that was not looked for."""
    recipe: Recipe | None = None
    record: RunRecord | None = None
    source: str | None = None
    """The run's own id, or what its log has of it: equal for copies. None if only ``path`` is known."""
    content: str | None = None
    """Equal for copies that were not changed."""

    @property
    def disturbed(self) -> str | None:
        """What disturbed the run, as one text."""
        return "; ".join(self.disturbing or ()) or None

    @property
    def counted_as(self) -> str:
        """Equal for what counts as one run."""
        return self.source or str(self.path)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that was found and not used."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """What a selection stands for."""

    title: str
    runs: tuple[AnalyzedRun, ...]
    left_out: tuple[LeftOut, ...] = ()
