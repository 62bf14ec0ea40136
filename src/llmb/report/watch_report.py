# SPDX-License-Identifier: Apache-2.0
"""A run that is watched: as a table for a live view, as lines, and as a JSON document."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmb.analysis.watched import Forecast, ForecastComparison, Outlook, Pace
from llmb.catalogue.records import Convention
from llmb.metrics.throughput import MFU, Throughput, throughput
from llmb.report.recipe_report import CONVENTION_NAMES
from llmb.report.table import Table, duration, interval_of, number, result_table
from llmb.runs.plan import Plan
from llmb.runs.steps import StepNews
from llmb.shown_text import printable

BAR = 24
MOST_STEPS = 10
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedTitle:
    """What is watched. ``plan`` is None for a log without a record."""

    path: Path
    job_id: str | None = None
    plan: Plan | None = None

    @property
    def text(self) -> str:
        name = self.plan.recipe.title() if self.plan else printable(self.path.name)
        return f"{name}, job {self.job_id}" if self.job_id else name


def watch_tables(title: WatchedTitle, seen: Outlook, most_steps: int = MOST_STEPS) -> Iterator[Table]:
    """What there is to know of the run, and its last steps."""
    table = result_table(title.text, "", "")
    for name, text in _rows(title, seen):
        table.add_row(name, text)
    yield table
    if seen.steps and most_steps > 0:
        yield _steps_table(seen, most_steps)


def _rows(title: WatchedTitle, seen: Outlook) -> Iterator[tuple[str, str]]:
    for concern in seen.concerns:
        yield "WARNING", printable(concern.text)
    yield "state", _state_text(seen)
    if seen.steps:
        yield "steps", _bar(seen) + _steps_text(seen)
    if seen.pace:
        yield "step time s", f"{number(seen.steps[-1].step_time_s)} last, {_pace_text(seen.pace)}"
    if seen.forecast:
        yield "last step", _forecast_text(seen.forecast, seen.at_s)
    if seen.circumstances.limit_left_s is not None and seen.circumstances.state != "ended":
        yield "time limit", _limit_text(seen.circumstances.limit_left_s)
    if seen.comparison:
        yield "expected", _comparison_text(seen.comparison)
    if seen.steps and seen.steps[-1].loss is not None:
        first = "" if seen.first_loss is None else f", {number(seen.first_loss)} at the first step"
        yield "loss", f"{number(seen.steps[-1].loss)}{first}"
    yield from _speed_rows(title, seen)


def _speed_rows(title: WatchedTitle, seen: Outlook) -> Iterator[tuple[str, str]]:
    if speed := _speed(title, seen.pace):
        per_gpu = f", {number(speed.tokens_per_s_per_gpu)} per GPU" if speed.peak_tflops else ""
        yield "tokens/s", f"{number(speed.tokens_per_s)}{per_gpu}"
        known = [(CONVENTION_NAMES[item], value) for item in Convention if (value := speed.mfu_pct[item]) is not None]
        if known:
            yield "MFU %", ", ".join(f"{number(value)} ({name})" for name, value in known)
        elif speed.peak_tflops:
            yield "MFU %", f"n/a: {speed.reasons[MFU]}"
    elif seen.steps and seen.steps[-1].tflops_per_gpu is not None:
        yield "TFLOPS per GPU", f"{number(seen.steps[-1].tflops_per_gpu)} in the log"


def _speed(title: WatchedTitle, pace: Pace | None) -> Throughput | None:
    pretends = title.plan is not None and title.plan.recipe.pretended_rank is not None
    if title.plan is None or pretends or pace is None or not pace.step_time_s.mean > 0:
        return None
    return throughput(title.plan.recipe, pace.step_time_s.mean, lora=title.plan.lora)


def _state_text(seen: Outlook) -> str:
    here = seen.circumstances
    attempt = f", attempt {here.attempt}" if here.attempt > 1 else ""
    nodes = f" on {here.nodes}" if here.nodes and here.state != "queued" else ""
    since = ""
    if here.since_start_s is not None and here.state != "ended":
        since = f" for {duration(here.since_start_s)}" + (", no step yet" if here.state == "starting" else "")
    why = f": {printable(here.why)}" if here.why else ""
    return f"{here.state}{nodes}{attempt}{since}{why}"


def _bar(seen: Outlook) -> str:
    if not seen.total:
        return ""
    filled = min(BAR, BAR * seen.done // seen.total)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] "


def _steps_text(seen: Outlook) -> str:
    if seen.total is None:
        return f"{seen.done} done"
    return f"{seen.done} of {seen.total} ({100 * seen.done // max(seen.total, 1)} %)"


def _pace_text(pace: Pace) -> str:
    times = pace.step_time_s
    interval = ""
    if pace.steady and times.ci95:
        interval = f" ({interval_of(times.ci95)})"
    steady = "" if pace.steady else "not steady yet, "
    which = (
        f"steps {pace.first_step}-{pace.last_step}" if pace.last_step > pace.first_step else f"step {pace.last_step}"
    )
    figures = f"{number(times.median)} median, {number(times.mean)} mean{interval}"
    return f"{figures}; {steady}{which}"


def _forecast_text(ends: Forecast, at_s: float) -> str:
    if not ends.steps_left:
        return "done"
    interval = ends.remaining_s_ci95
    spread = f" ± {duration((interval[1] - interval[0]) / 2)}" if interval else ", roughly"
    return f"in {duration(ends.remaining_s)}{spread}, at {_clock(at_s + ends.remaining_s, at_s)}"


def _clock(then_s: float, now_s: float) -> str:
    form = "%H:%M:%S" if then_s - now_s < DAY_S else "%Y-%m-%d %H:%M"
    return datetime.fromtimestamp(then_s).strftime(form)


def _limit_text(left_s: float) -> str:
    return f"in {duration(left_s)}" if left_s > 0 else f"{duration(-left_s)} ago"


def _comparison_text(comparison: ForecastComparison) -> str:
    expected = comparison.expected
    return f"{number(expected.step_time_s)} s per step, {printable(expected.source)}: {_standing_text(comparison)}"


def _standing_text(comparison: ForecastComparison) -> str:
    delta, interval = comparison.delta_pct, comparison.interval_pct
    if delta is None or interval is None:
        more = comparison.more_steps
        return "too early to tell" + (f", {more} more steps at least" if more else ": steps are not steady")
    low, high = sorted(map(abs, interval)) if delta < 0 else interval
    word = "slower" if delta >= 0 else "faster"
    undecided = {"undecided": ", undecided", "as expected": ", as expected"}.get(comparison.standing, "")
    return f"{abs(delta):.1f} % {word} ({low:.1f} to {high:.1f} %){undecided}"


def _steps_table(seen: Outlook, most: int) -> Table:
    columns = ("step", "time s", "loss", "gradient norm")
    table = result_table("Last steps", *columns, right=columns)
    for step in seen.steps[-most:]:
        values = (step.step_time_s, step.loss, step.grad_norm)
        table.add_row(str(step.step), *("" if value is None else number(value) for value in values))
    return table


def watch_line(seen: Outlook) -> str:
    """One line for an output that is not a terminal."""
    here = seen.circumstances
    if here.state in ("queued", "starting") or not seen.steps:
        return _state_text(seen)
    last = seen.steps[-1]
    total = "" if seen.total is None else f"/{seen.total}"
    parts = [f"step {seen.done}{total}", f"{number(last.step_time_s)} s"]
    parts += [] if last.loss is None else [f"loss {number(last.loss)}"]
    parts += [f"median {number(seen.pace.step_time_s.median)} s"] if seen.pace else []
    if seen.forecast and seen.forecast.steps_left:
        parts.append(f"{duration(seen.forecast.remaining_s)} left")
    if here.state == "ended":
        parts.append(_state_text(seen))
    return "  ".join(parts)


def watch_document(title: WatchedTitle, seen: Outlook, result: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON of ``llmb watch``; its keys are a contract. ``result`` is that of a run that has ended."""
    here, speed = seen.circumstances, _speed(title, seen.pace)
    return {
        "title": title.text,
        "path": str(title.path),
        "job_id": title.job_id,
        "state": here.state,
        "reason": here.why,
        "nodes": here.nodes,
        "attempt": here.attempt,
        "steps_done": seen.done,
        "steps_total": seen.total,
        "since_last_step_s": seen.since_last_s,
        "last_steps": [_step_document(step) for step in seen.steps[-MOST_STEPS:]],
        "pace": seen.pace and asdict(seen.pace),
        "tokens_per_s": speed and speed.tokens_per_s,
        "tokens_per_s_per_gpu": speed and speed.tokens_per_s_per_gpu,
        "tflops_per_gpu": speed and speed.tflops_per_gpu,
        "mfu_pct": speed and speed.mfu_pct,
        "forecast": seen.forecast and _forecast_document(seen.forecast, seen.at_s),
        "time_limit_left_s": here.limit_left_s,
        "expectation": seen.comparison and asdict(seen.comparison),
        "concerns": [asdict(concern) for concern in seen.concerns],
        "result": result,
    }


def _step_document(step: StepNews) -> dict[str, Any]:
    """JSON has no NaN: a value that is not finite is null, and a concern names it."""
    values = {name: value for name, value in step._asdict().items() if name != "whole"}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _forecast_document(ends: Forecast, at_s: float) -> dict[str, Any]:
    then = datetime.fromtimestamp(at_s + ends.remaining_s, UTC)
    return {**asdict(ends), "ends_at": then.isoformat(timespec="seconds")}
