# SPDX-License-Identifier: Apache-2.0
"""Runs of programs whose steps are only in their log: progress, steps as they appear, and the result."""

import mmap
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

from llmb.catalogue.records import Window
from llmb.logs.formats.format import Format
from llmb.logs.outcome import FINISHED, LogOutcome, judge_log
from llmb.logs.reader import read_log
from llmb.metrics.statistics import Statistics
from llmb.metrics.window import STEADY
from llmb.missing import Missing
from llmb.programs.port import End
from llmb.resources.machine import MachineReport, find_events
from llmb.resources.read import samples_of_ended
from llmb.runs.failure import ATTEMPT
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.profile_report import ProfileReport
from llmb.runs.result import NOT_SUCCESSFUL, Loss, Result, Status, figures_of
from llmb.runs.steps import StepNews

NOT_SAMPLED = Missing("only runs of llmb's own engine are sampled")
LOG_RULES = ("auto", "last", "all")
"""Window rules that are resolved by what the log says of itself."""


def result_of_log(
    plan: Plan,
    outcome: LogOutcome,
    end: End,
    log_format: Format,
    profile: ProfileReport | None = None,
    contradiction: str | None = None,
    machine: MachineReport | Missing = NOT_SAMPLED,
) -> Result:
    """The result of a run that ended as ``end`` says, and whose log is judged as ``outcome``.

    A framework that has done every step may still fail while it cleans up: the run is a success then.
    """
    status: Status = "success" if outcome.status in FINISHED else "invalid" if outcome.status == "invalid" else "failed"
    reasons = [outcome.reason]
    if status == "success" and contradiction:
        status, reasons = "invalid", [contradiction]
    if end.cause:
        reasons.append(f"ended by {end.cause}")
    elif end.exit_code:
        reasons.append(f"exit code {end.exit_code}")
    losses = (outcome.loss_first, outcome.loss_last)
    times = _statistics(plan, status, outcome, log_format)
    return Result(
        status=status,
        reason=None if status == "success" else "; ".join(reasons),
        steps=outcome.steps or 0,
        step_time_s=times,
        loss=None if None in losses or status == "invalid" else Loss(first=_known(losses[0]), last=_known(losses[1])),
        peak_memory_gib=None,
        window=outcome.window if times and outcome.window and outcome.window.rule == STEADY else None,
        profile=profile,
        resources=NOT_SAMPLED,
        other_work=NOT_SAMPLED,
        machine=machine,
        **(figures_of(plan, times.mean) if times else {}),
    )


def machine_of(folder: RunFolder, nodes: int | None) -> MachineReport | Missing:
    """What happened on the nodes of a run, which are so many, if a sampler of llmb ran beside it."""
    samples = samples_of_ended(folder.resources)
    if isinstance(samples, Missing):
        return samples
    return find_events(samples, count=nodes) if samples else NOT_SAMPLED


def _statistics(plan: Plan, status: Status, outcome: LogOutcome, log_format: Format) -> Statistics | Missing:
    """The log has the statistics of the window as a whole, without a step that was profiled or with it."""
    if status != "success":
        return NOT_SUCCESSFUL
    if outcome.window is None:
        return Missing(outcome.reason)
    first = log_format.first_number
    window = [iteration - first for iteration in range(outcome.window.first, outcome.window.last + 1)]
    profiled = sum(plan.slows_down(step) for step in window)
    if profiled:
        return Missing(f"{profiled} of the {len(window)} steps of the window were profiled, which slows them down")
    return outcome.step_time_s or Missing(outcome.reason)


def _known(loss: float | None) -> float:
    assert loss is not None
    return loss


def has_all_steps(plan: Plan, outcome: LogOutcome, log_format: Format) -> bool:
    return outcome.max_step is not None and outcome.max_step - log_format.first_number >= plan.last_step


def judge_latest_attempt(log: Path, window: Window, log_format: Format) -> LogOutcome:
    """What the log shows of the latest start: steps of earlier ones do not count.

    The plan's window is in the numbers that the log prints, which NVIDIA's own parsers take.
    """
    first = log_format.first_number
    rule = window.rule if window.rule in LOG_RULES else f"{max(window.first, first)}-{max(window.last, first)}"
    try:
        with log.open("rb") as stream:
            begin = _latest_attempt(stream.fileno())
            if not begin:
                return judge_log(read_log(stream, rule))
            stream.seek(begin)
            return judge_log(read_log(BytesIO(stream.read()), rule))
    except OSError as error:
        return LogOutcome("unreadable", f"the log cannot be read: {error.strerror}")


def _latest_attempt(handle: int) -> int:
    """Where in a log the latest attempt begins; 0 for the only one, and for an empty log."""
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as log:
            return log.rfind(f"\n{ATTEMPT}".encode()) + 1
    except ValueError:
        return 0


class NewLogSteps:
    """Reads the complete lines that were added to a log. ``look`` is called before, to bring the log to its place."""

    def __init__(self, folder: RunFolder, log_format: Format, look: Callable[[], object] = lambda: None) -> None:
        self.path = folder.log
        self.look = look
        self.offset = 0
        self.last = -1
        self.first_number = log_format.first_number
        self.lines = log_format.reader()

    def new(self) -> Iterator[StepNews]:
        self.look()
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            text = stream.read()
        whole = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        self.offset += len(whole)
        for line in self.lines.find(whole):
            if line.step != self.last:  # several ranks may log it
                self.last = line.step
                number = line.step - self.first_number
                yield StepNews(number, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu)
