# SPDX-License-Identifier: Apache-2.0
"""Writes the log line and the line of ``metrics.jsonl`` of each step, on the first rank."""

import sys
from types import TracebackType
from typing import Self

from llmb.catalogue.records import Convention
from llmb.engine.device import Memory
from llmb.logs.step_line import format_invalid_line, format_step_line
from llmb.metrics.throughput import throughput
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.steps import Step, step_to_json


class Reporter:
    """Writes each step immediately, so that a crash loses at most the current step."""

    def __init__(self, folder: RunFolder, plan: Plan) -> None:
        self.plan = plan
        # A restarted run has its earlier steps there.
        self.stream = folder.steps.open("a", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def report(self, step: Step, memory: Memory) -> None:
        recipe = self.plan.recipe
        tflops = throughput(recipe, step.step_time_s).tflops_per_gpu[Convention.FULL]
        line = format_step_line(
            step=step.step,
            steps=self.plan.last_step + 1,
            lr=step.lr,
            global_batch_size=recipe.layout.gbs,
            peak_memory_bytes=memory.peak_bytes,
            memory_allocated_bytes=memory.allocated_bytes,
            loss=step.loss,
            step_time_s=step.step_time_s,
            tflops_per_gpu=tflops,
            consumed_samples=self.plan.samples_before(step.step + 1),
        )
        sys.stdout.write(line + "\n")
        if not step.finite:
            sys.stdout.write(format_invalid_line(step.values_text()) + "\n")
        sys.stdout.flush()
        self.stream.write(step_to_json(step) + "\n")
