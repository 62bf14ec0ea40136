# SPDX-License-Identifier: Apache-2.0
"""A log one of whose lines has another batch, unit or clock is no silent measurement, whichever program wrote it."""

import io
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmb.jobs.read_run import run_of_log
from llmb.readers.logs.log_files import ParsedFile
from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log
from llmb.readers.logs.step_line import format_step_line

STEPS, WINDOW = 50, range(36, 44)
START = datetime(2026, 4, 28, 14, 23)


class Line:
    """The values of one line: what a step of all takes and does, unless it is the changed one."""

    def __init__(self, step: int, s: float, gbs: int) -> None:
        self.step, self.gbs = step, gbs
        self.s = s * (1 + 0.002 * (step * 7 % 5 - 2))
        self.time = self.s
        """As it is printed."""
        self.at = START + timedelta(seconds=s * step)
        self.samples = gbs * (step + 1)


def megatron(line: Line) -> str:
    return (
        f" [{line.at:%Y-%m-%d %H:%M:%S}] iteration {line.step + 1:8d}/{STEPS:8d} |"
        f" consumed samples: {line.samples:12d} |"
        f" elapsed time per iteration (ms): {1000 * line.time:.1f} | learning rate: 1.0E-06 |"
        f" global batch size: {line.gbs:5d} | lm loss: 1.1E+01 | grad norm: 2.870 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |\n"
    )


def llmb(line: Line) -> str:
    return format_step_line(
        step=line.step, steps=STEPS, lr=1e-4, global_batch_size=line.gbs, peak_memory_bytes=1, memory_allocated_bytes=1,
        loss=9.5, step_time_s=line.time, tflops_per_gpu=None, consumed_samples=line.samples,
    ) + "\n"  # fmt: skip


def nemo2(line: Line) -> str:
    return (
        f"0: Training epoch 0, iteration {line.step}/{STEPS - 1} | lr: 1.5e-07 | global_batch_size: {line.gbs} |"
        f" global_step: {line.step} | max_memory: 7 | reduced_train_loss: 11.9 |"
        f" train_step_timing in s: {line.time:.4g} | consumed_samples: {line.samples} | TFLOPS_per_GPU: 6e+02\n"
    )


def maxtext(line: Line) -> str:
    head = f"Config param steps: {STEPS}\n" if line.step == 0 else ""
    return (
        f"{head}completed step: {line.step}, seconds: {line.time:.3f}, TFLOP/s/device: 500.0,"
        f" Tokens/s/device: {line.gbs * 1024 / line.s:.3f}, total_weights: {8192 * line.gbs}, loss: 9.5\n"
    )


def torchtitan(line: Line) -> str:
    begin = f"[rank0]:[titan] {line.at:%Y-%m-%d %H:%M:%S},000 - root - INFO - "
    head = (
        f"{begin}Building device mesh with parallelism: pp=1, dp_shard=8, tp=1\n"
        f"{begin}Trainer is initialized with local batch size 1, global batch size {line.gbs}, gradient accumulation"
        f" steps {line.gbs // 8}, sequence length 1024, total steps {STEPS} (warmup 1)\n"
    )
    return (head if line.step == 0 else "") + (
        f"{begin}step: {line.step + 1:2d}  loss: 7.8201  grad_norm: 2.0213  memory: 41.20GiB(51.78%)"
        f"  tps: {line.gbs * 128 / line.time:,.3f}  tflops: 333.65  mfu: 33.74%\n"
    )


def trainer(line: Line) -> str:
    head = "Total optimization steps = 50\n" if line.step == 0 else ""
    total = int((line.at - START).total_seconds() + line.s)
    clock = f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
    bar = f"{2 * line.step}%|#| {line.step + 1}/{STEPS} [{clock}<00:10, {line.s:.2f}s/it]"
    return f"{head}\r {bar}\n{{'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 4.5e-05, 'epoch': 0.1}}\n"


Change = Callable[[Line, float], None]


def other_batch(line: Line, factor: float) -> None:
    line.gbs = max(1, int(line.gbs * factor))


def other_samples(line: Line, factor: float) -> None:
    line.samples = int(line.samples * factor)


def other_unit(line: Line, factor: float) -> None:
    line.time *= 1000 if factor > 1 else 0.001


def other_clock(line: Line, factor: float) -> None:
    line.at += timedelta(hours=3 if factor > 1 else -3)


def later_clock(line: Line, factor: float) -> None:
    line.at += timedelta(minutes=8 * factor)


CASES: list[tuple[Callable[[Line], str], Change]] = [
    *((form, change) for form in (megatron, llmb, nemo2) for change in (other_batch, other_samples, other_unit)),
    *((maxtext, change) for change in (other_batch, other_unit)),
    (torchtitan, other_unit),
    *((form, other_clock) for form in (megatron, torchtitan)),
    (trainer, later_clock),
]


def warned(text: str) -> bool:
    """Whether it is no success, or anything is noted beside its figures."""
    log = read_log(io.BytesIO(text.encode()), "35-45")
    run = run_of_log(ParsedFile(Path("/logs/run.out"), judge_log(log)))
    found = run.anomalies
    return run.status != "success" or bool(run.outcome.warnings) or bool(found and found.outliers)


@pytest.mark.parametrize(("form", "change"), CASES, ids=lambda part: part.__name__)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    s=st.floats(3.0, 30.0),
    gbs=st.sampled_from([8, 48, 128, 2048]),
    changed=st.sampled_from(WINDOW),
    factor=st.sampled_from([0.125, 0.5, 2.0, 8.0]),
)
def test_a_changed_line_is_not_silent(
    form: Callable[[Line], str], change: Change, s: float, gbs: int, changed: int, factor: float
) -> None:
    lines = [Line(step, s, gbs) for step in range(STEPS)]
    assert not warned("".join(map(form, lines)))
    change(lines[changed], factor)
    assert warned("".join(map(form, lines)))
