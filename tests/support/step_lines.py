# SPDX-License-Identifier: Apache-2.0
"""Lines of steps, as the engine writes them into a log."""

from llmb.readers.logs.step_line import format_step_line


def step_line(step: int, steps: int = 50, **changes: object) -> str:
    """The line of a step, with its end; ``changes`` are fields that differ from the usual ones."""
    batch = changes.get("global_batch_size", 8)
    assert isinstance(batch, int)
    usual: dict[str, object] = {
        "lr": 1e-4,
        "global_batch_size": batch,
        "peak_memory_bytes": 1,
        "memory_allocated_bytes": 1,
        "loss": 12.5,
        "step_time_s": 2.5,
        "tflops_per_gpu": 600.0,
        "consumed_samples": batch * (step + 1),
    }
    return format_step_line(step=step, steps=steps, **(usual | changes)) + "\n"  # type: ignore[arg-type]
