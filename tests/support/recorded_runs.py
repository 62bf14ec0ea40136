# SPDX-License-Identifier: Apache-2.0
"""Run folders of runs that never were: on any GPU, with any step times. For what reads runs that ended."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fake_steps import steps_of

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.runs.choices import Choices
from llmb.runs.environment import DeviceMemory, Environment
from llmb.runs.folder import RunFolder
from llmb.runs.plan import make_plan
from llmb.runs.record import RunRecord, new_run_id, queued_record
from llmb.runs.steps import step_to_json

SXM = "NVIDIA H100 80GB HBM3"
START = datetime(2026, 11, 20, 10, tzinfo=UTC)
SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, -1, 1)
"""Of the deviation from the mean, repeated: it has no trend and no period of its own."""


def gpu_record(
    workload: str = "pretrain_llama3.1",
    size: str = "8b",
    scale: int = 8,
    *,
    dtype: str = "bf16",
    gpu_type: str = "h100",
    release: str | None = None,
    device: str | None = SXM,
    nodes: Sequence[str] = ("node1",),
    program: str = "engine",
    overrides: Overrides | None = None,
    **choices: Any,
) -> RunRecord:
    """A run of a recipe that never began."""
    request = Request(
        workload=workload,
        size=size,
        gpu_type=gpu_type,
        scale=scale,
        dtype=dtype,
        release=release,
        overrides=overrides or Overrides(),
    )
    plan = make_plan(resolve(Catalogue(), request), Choices(**choices), device="cuda")
    seen = device and environment(device, nodes, plan.recipe.layout.gpus // len(nodes))
    return queued_record(plan, (), program=program).model_copy(update={"environment": seen, "status": "running"})


def environment(device: str, nodes: Sequence[str] = ("node1",), ranks: int = 8) -> Environment:
    return Environment(
        python="3.12",
        torch="2.13.0",
        cuda="13.0",
        nccl="2.28",
        backend="nccl",
        float32_matmul_precision="high",
        system="Linux",
        device=device,
        device_memory_gib=79.6,
        device_memory=DeviceMemory(rank=0, free_gib=8.5, outside_gib=2.5),
        cpu_threads_per_rank=8,
        nodes=tuple(nodes),
        ranks_per_node=dict.fromkeys(nodes, ranks),
        variables={},
    )


def times_around(mean_s: float, spread_s: float = 0.02, steps: int = 50) -> list[float]:
    return [mean_s + SIGNS[step % len(SIGNS)] * spread_s for step in range(steps)]


def write_run(
    root: Path,
    record: RunRecord,
    step_times_s: Sequence[float],
    *,
    exit_code: int = 0,
    cancelled: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The folder of a run that ended, with these steps, below ``root``; its name does not tell one from another.

    ``files`` are others in it, by their paths.
    """
    number = len(list(root.glob("run_*"))) if root.is_dir() else 0
    folder = RunFolder(root / f"run_{1795298745 + number}" / "run")
    folder.path.mkdir(parents=True)
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps_of(step_times_s, record.plan)))
    folder.log.write_text("")
    for name, text in files.items():
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_text(text)
    began = record.model_copy(
        update={"run_id": new_run_id(), "started_at": (START + timedelta(seconds=number)).isoformat()}
    )
    finish_run(folder, began, End(exit_code, cancelled=cancelled))
    return folder.path
