# SPDX-License-Identifier: Apache-2.0
"""Folders of finished runs, with step times of the caller's choice, for tests of what reads them."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fake_steps import steps_of

from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.runs.environment import Environment
from llmb.runs.experiment import experiment_name, run_parent
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, read_record, write_record
from llmb.runs.result import NOT_SUCCESSFUL
from llmb.runs.steps import step_to_json

START = datetime(2026, 11, 1, 12, tzinfo=UTC)


def write_run(
    install: Path,
    plan: Plan,
    step_times_s: Sequence[float],
    *,
    number: int = 0,
    label: str | None = None,
    failed: str | None = None,
    environment: dict[str, Any] | None = None,
    **fields: Any,
) -> RunFolder:
    """A run that trained as many steps as it has times, ``number`` minutes after the first one."""
    name = experiment_name(plan)
    folder = RunFolder(run_parent(install, plan) / f"{name}_{1790000000 + number}" / name)
    folder.path.mkdir(parents=True)
    steps = steps_of(step_times_s, plan)
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
    folder.log.write_text("")
    begun = new_record(plan, ("llmb", "run"), label=label).model_copy(
        update={
            "started_at": (START + timedelta(minutes=number)).isoformat(timespec="seconds"),
            "environment": Environment.model_validate(_environment(plan) | (environment or {})),
            **fields,
        }
    )
    finish_run(folder, begun, End(0))
    if failed:
        fail(folder, failed)
    return folder


def fail(folder: RunFolder, reason: str) -> None:
    """Writes into the record that the run failed, whatever its steps are."""
    record = read_record(folder)
    assert record.result
    result = record.result.model_copy(update={"status": "failed", "reason": reason, "step_time_s": NOT_SUCCESSFUL})
    write_record(
        folder, record.model_copy(update={"status": "failed", "reason": reason, "exit_code": 4, "result": result})
    )


def noisy_times(mean_s: float, cv: float, steps: int, seed: int) -> list[float]:
    """Independent step times of a run whose own mean differs from ``mean_s`` by ``cv``, as those of repeats do."""
    generator = random.Random(seed)
    own = mean_s * (1 + generator.gauss(0, cv))
    return [own * (1 + generator.gauss(0, cv)) for _ in range(steps)]


def _environment(plan: Plan) -> dict[str, Any]:
    return {
        "python": "3.11.2",
        "torch": "2.13.0",
        "cuda": "12.8",
        "nccl": "2.27",
        "backend": "gloo",
        "float32_matmul_precision": "highest",
        "system": "Linux",
        "device": "cpu",
        "device_memory_gib": None,
        "cpu_threads_per_rank": 1,
        "nodes": ["node1"],
        "ranks_per_node": {"node1": plan.recipe.layout.gpus},
        "variables": {},
    }
