# SPDX-License-Identifier: Apache-2.0
"""Reads runs of programs that report steps only in their log: their progress, new steps, and result."""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from io import DEFAULT_BUFFER_SIZE, BytesIO
from pathlib import Path
from typing import Any

from llmb.base.input_files import open_regular
from llmb.base.missing import Missing
from llmb.base.statistics import Statistics, describe
from llmb.catalogue.records import Window
from llmb.catalogue.window import STEADY
from llmb.launch.programs.port import End
from llmb.readers.logs.formats.format import Format
from llmb.readers.logs.outcome import FINISHED, LogOutcome, judge_log
from llmb.readers.logs.reader import read_log
from llmb.readers.samples.sample_records import ResourceUse
from llmb.readers.samples.samples import Sampled, SampledWork, TimeSpan, samples_of_ended
from llmb.runs.conclusion import MOST_PROFILED, figures_of, if_possible, machine_report, resource_use
from llmb.runs.folder import ATTEMPT, RunFolder
from llmb.runs.plan import Plan
from llmb.runs.result import NO_EXPERTS, NOT_SUCCESSFUL, Loss, Result, Status
from llmb.runs.steps import StepNews
from llmb.runs.trace_reports import ProfileReport

NOT_SAMPLED = Missing("no llmb sampler ran during the run")
NOT_SEPARATED = Missing("the processes of the run are unknown: they are in the framework's container")
CLOCK_S = 1.0
"""The resolution of a log's time stamps in seconds."""
FURTHEST_CLOCK_S = 900.0
"""Maximum seconds between the log's last step and the last sample; time zones differ by at least this much."""
LOG_RULES = ("auto", "last", "all")
"""Window rules that are resolved from the content of the log."""


def result_of_log(
    plan: Plan,
    outcome: LogOutcome,
    end: End,
    log_format: Format,
    profile: ProfileReport | None = None,
    contradiction: str | None = None,
    samples: Sequence[Sampled] | Missing = NOT_SAMPLED,
    nodes: int | None = None,
) -> Result:
    """Return the result of a run from the end of its processes and the outcome of its log.

    ``samples`` are from llmb's samplers, and ``nodes`` is the number of the run's nodes, if known.

    An error of the framework during cleanup, after all steps, does not make a run fail.
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
    result = Result(
        status=status,
        reason=None if status == "success" else "; ".join(reasons),
        steps=outcome.steps or 0,
        step_time_s=times,
        loss=None if None in losses or status == "invalid" else Loss(first=_known(losses[0]), last=_known(losses[1])),
        peak_memory_gib=None,
        window=outcome.window if times and outcome.window and outcome.window.rule == STEADY else None,
        profile=profile,
        error_at_end=outcome.error_at_end if status == "success" else None,
        expert_load=Missing("the log does not report it") if plan.recipe.model.moe else NO_EXPERTS,
        **_sampled(plan, outcome, times, samples, nodes),
        **(figures_of(plan, times.mean) if times else {}),
    )
    return if_possible(result)


def samples_beside(folder: RunFolder) -> Sequence[Sampled] | Missing:
    """Return the samples that llmb's samplers wrote during a run, or the reason why there are none."""
    return samples_of_ended(folder.resources) or NOT_SAMPLED


def _sampled(
    plan: Plan,
    outcome: LogOutcome,
    times: Statistics | Missing,
    samples: Sequence[Sampled] | Missing,
    nodes: int | None,
) -> dict[str, Any]:
    if isinstance(samples, Missing):
        return dict.fromkeys(("resources", "other_work", "machine"), samples)
    used = times if isinstance(times, Missing) else _used(plan, outcome, samples)
    return {"resources": used, "other_work": NOT_SEPARATED, "machine": machine_report(samples, count=nodes)}


def _used(plan: Plan, outcome: LogOutcome, samples: Sequence[Sampled]) -> ResourceUse | Missing:
    spans, gpus = logged_spans(outcome), plan.recipe.layout.gpus
    sampled = {gpu.uuid for one in samples for gpu in one.start.gpus}
    last_s = max((one.samples[-1].time_s for one in samples if one.samples), default=None)
    if not spans or outcome.logged_last_s is None or last_s is None:
        return Missing("the log does not show when the steps of the window ended")
    if abs(last_s - outcome.logged_last_s) > FURTHEST_CLOCK_S:
        return Missing("the clock of the log differs from that of the nodes, perhaps by a time zone")
    if len(sampled) > gpus:
        return Missing(f"{len(sampled)} GPUs were sampled, but it is unknown which {gpus} of them trained")
    work = SampledWork(
        spans=spans,
        tokens=len(outcome.step_times_s) * plan.recipe.layout.gbs * plan.recipe.layout.seq_len,
        device=plan.device,
        nodes=(*(one.start.node for one in samples), *(["others"] if len(sampled) < gpus else [])),
    )
    return resource_use(samples, work)


def logged_spans(outcome: LogOutcome) -> tuple[TimeSpan, ...]:
    """Return the time spans of the window's steps, merged unless there is a pause between them, because time stamps in
    whole seconds locate a series of steps better than a single step."""
    spans: list[TimeSpan] = []
    ended_s = math.inf
    for logged_s, step_time_s in zip(outcome.logged_s, outcome.step_times_s, strict=False):
        begin_s = logged_s - step_time_s
        if spans and begin_s - ended_s <= CLOCK_S:
            begin_s = logged_s - step_time_s - (spans[-1].end_s - spans.pop().begin_s)
        spans.append(TimeSpan(begin_s, logged_s))
        ended_s = logged_s
    return tuple(TimeSpan(span.begin_s + CLOCK_S / 2, span.end_s + CLOCK_S / 2) for span in spans)


def _statistics(plan: Plan, status: Status, outcome: LogOutcome, log_format: Format) -> Statistics | Missing:
    if status != "success":
        return NOT_SUCCESSFUL
    if outcome.window is None:
        return Missing(outcome.reason)
    first = log_format.first_number
    window = [iteration - first for iteration in range(outcome.window.first, outcome.window.last + 1)]
    slow = [plan.slows_down(step) for step in window]
    if not any(slow):
        return outcome.step_time_s or Missing(outcome.reason)
    # The step after a profile may include the time of writing it.
    if not slow[-1] or sum(slow) > MOST_PROFILED * len(window) or len(outcome.step_times_s) != len(window):
        return Missing(f"{sum(slow)} of the {len(window)} steps of the window were profiled, which slows them down")
    return describe([time for time, is_slow in zip(outcome.step_times_s, slow, strict=True) if not is_slow])


def _known(loss: float | None) -> float:
    assert loss is not None
    return loss


def has_all_steps(plan: Plan, outcome: LogOutcome, log_format: Format) -> bool:
    return outcome.max_step is not None and outcome.max_step - log_format.first_number >= plan.last_step


def judge_latest_attempt(log: Path, window: Window, log_format: Format) -> LogOutcome:
    """Return the outcome of the latest attempt in the log, ignoring steps of earlier attempts.

    The window is applied to the step numbers in the log, as in NVIDIA's own parsers.
    """
    first = log_format.first_number
    rule = window.rule if window.rule in LOG_RULES else f"{max(window.first, first)}-{max(window.last, first)}"
    try:
        with open_regular(log, buffering=DEFAULT_BUFFER_SIZE) as stream:
            begin = _latest_attempt(stream.fileno())
            if not begin:
                return judge_log(read_log(stream, rule))
            stream.seek(begin)
            return judge_log(read_log(BytesIO(stream.read()), rule))
    except OSError as error:
        return LogOutcome("unreadable", f"the log cannot be read: {error.strerror}")


def _latest_attempt(handle: int) -> int:
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as log:
            return log.rfind(f"\n{ATTEMPT}".encode()) + 1
    except ValueError:
        return 0


class NewLogSteps:
    """Reads steps from new complete lines of a log; calls ``look`` first, which may create or replace the log."""

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
            if line.step != self.last:  # several ranks may log a step
                self.last = line.step
                number = line.step - self.first_number
                yield StepNews(number, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu)
