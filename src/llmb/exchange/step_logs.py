# SPDX-License-Identifier: Apache-2.0
"""The steps of each run as a log of its own: for TensorBoard, and as MLPerf's logs have them."""

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.exchange.columns import STEPS, ExportedRun, RunSource
from llmb.runs.folder import new_file
from llmb.runs.steps import Step

EVENTS = "events.out.tfevents.llmb"
"""TensorBoard reads files with ``tfevents`` in their name; an equal name replaces the file of an earlier export."""
EVENTS_VERSION = "brain.Event:2"
NOT_SCALARS = ("run", "step", "in_window")


def write_tensorboard(runs: RunSource, folder: Path) -> Iterator[Path]:
    """A folder for each run, with a scalar for each number of a step. TensorBoard keeps 32 bits of a scalar."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    for run in runs():
        if not run.steps:
            continue
        path = folder / "tensorboard" / run.id / EVENTS
        with new_file(path) as partial, partial.open("wb") as file:
            records = RecordWriter(file)
            first = run.steps[0]
            records.write(Event(wall_time=_began_s(first), file_version=EVENTS_VERSION).SerializeToString())
            for step in run.steps:
                scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(run, step)]
                event = Event(wall_time=step.ended_s, step=step.step, summary=Summary(value=scalars))
                records.write(event.SerializeToString())
        yield path


def scalars_of(run: ExportedRun, step: Step) -> Iterator[tuple[str, float]]:
    """The numbers of a step, by the names of their columns."""
    for column in STEPS:
        value = None if column.name in NOT_SCALARS else column.value((run, step))
        if value is not None:
            yield column.name, float(value)


def write_mlperf(runs: RunSource, folder: Path) -> Iterator[Path]:
    """A log for each run, in the form of MLPerf's logging library. It is not a submission: no model is evaluated.

    A pretended rank has none.
    """
    for run in runs():
        if not run.steps or run.run.result.pretended:
            continue
        path = folder / "mlperf" / f"{run.id}.log"
        with new_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(_mlperf_lines(run))
        yield path


def _mlperf_lines(run: ExportedRun) -> Iterator[str]:
    plan, steps = run.run.plan, run.steps
    began_s, ended_s = _began_s(steps[0]), steps[-1].ended_s
    layout = plan.recipe.layout
    facts = {
        "submission_benchmark": f"{plan.recipe.workload} {plan.recipe.size} {plan.recipe.dtype}",
        "submission_platform": f"{plan.recipe.scale} x {plan.recipe.gpu_type}",
        "global_batch_size": layout.gbs,
        "max_sequence_length": layout.seq_len,
        "gradient_accumulation_steps": layout.ga,
        "seed": plan.seed,
    }
    started_at = run.run.record.started_at
    init_s = datetime.fromisoformat(started_at).timestamp() if started_at else began_s
    yield _mlperf_line("init_start", None, min(init_s, began_s), "INTERVAL_START")
    for key, value in facts.items():
        yield _mlperf_line(key, value, began_s)
    yield _mlperf_line("init_stop", None, began_s, "INTERVAL_END")
    yield _mlperf_line("run_start", None, began_s, "INTERVAL_START")
    for step in steps:
        stats = {
            "train_loss": step.loss if step.loss is not None and math.isfinite(step.loss) else None,
            "train_step_time": step.step_time_s,
            "throughput": layout.gbs / step.step_time_s if step.step_time_s else None,
        }
        samples = plan.samples_before(step.step + 1)
        yield _mlperf_line("tracked_stats", stats, step.ended_s, step=step.step, samples_count=samples)
    status = "success" if run.run.result.status == "success" else "aborted"
    yield _mlperf_line("run_stop", None, ended_s, "INTERVAL_END", status=status)


def _mlperf_line(key: str, value: Any, at_s: float, event: str = "POINT_IN_TIME", **more: Any) -> str:  # noqa: ANN401
    """``file`` and ``lineno`` are required, and name where a line was made."""
    document = {
        "namespace": "",
        "time_ms": round(1000 * at_s),
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": {"file": "llmb", "lineno": 0, **more},
    }
    return f":::MLLOG {json.dumps(document, allow_nan=False)}\n"


def _began_s(step: Step) -> float:
    return step.ended_s - step.step_time_s
