# SPDX-License-Identifier: Apache-2.0
"""Measures the device's own kernels, and compares results with them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.cases import Subject
from benchmarks.engine.processes import failure_reason, run_limited
from benchmarks.engine.records import CaseResult, Ceilings, Document
from benchmarks.engine.shapes import LISTS, floor_of, job_of, measured_of, request_of
from llmb.nodes.bench.protocol import TIMING_PROGRAM, Timings

GPU_LIMIT_S, CPU_LIMIT_S = 150.0, 600.0
GPU_COPY_BYTES, CPU_COPY_BYTES = 2**31, 2**25


def without_floor(document: Document, subjects: Sequence[Subject]) -> list[Subject]:
    """Those whose kernels are not in the document yet, each dtype once."""
    known = document.ceilings or Ceilings(measured=None)
    new = {subject.label: subject for subject in subjects if not known.floor(subject.name, subject.recipe.dtype)}
    return list(new.values())


def with_kernels(document: Document, subjects: Sequence[Subject], folder: Path, limit_s: float) -> Document:
    """Measures the kernels that the subjects need."""
    known = document.ceilings or Ceilings(measured=None)
    longest_s = CPU_LIMIT_S if _on_cpu(subjects) else GPU_LIMIT_S
    measured, reason = measure(subjects, folder, min(limit_s, longest_s))
    if measured is None:
        return document.model_copy(update={"ceilings": known.model_copy(update={"reason": reason})})
    floors = (*known.floors, *(floor_of(subject.name, subject.recipe, measured) for subject in subjects))
    together = {**measured, **{name: (known.measured or {}).get(name, []) + measured[name] for name in LISTS}}
    return document.model_copy(update={"ceilings": Ceilings(measured=together, floors=floors)})


def measure(subjects: Sequence[Subject], folder: Path, limit_s: float) -> tuple[dict[str, Any] | None, str | None]:
    """Runs in a separate process, so that its memory is freed for the engines. Returns the reason if it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    recipes = [subject.recipe for subject in subjects]
    on_cpu = _on_cpu(subjects)
    copied = CPU_COPY_BYTES if on_cpu else GPU_COPY_BYTES
    job = job_of(request_of(recipes, "cpu" if on_cpu else "cuda", copied))
    asked, answered = folder / "ceilings-request.json", folder / "ceilings.json"
    asked.write_text(job.model_dump_json())
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", TIMING_PROGRAM, str(asked), str(answered)]
    ended = run_limited(command, os.environ, folder / "ceilings.log", limit_s)
    if ended.exit_code == 0:
        return measured_of(job, Timings.model_validate_json(answered.read_text())), None
    return None, f"stopped after {ended.wall_s:.0f} s" if ended.exit_code is None else failure_reason(ended)


def _on_cpu(subjects: Sequence[Subject]) -> bool:
    return subjects[0].recipe.gpu_type == "cpu"


def with_shares(case: CaseResult, ceilings: Ceilings | None) -> CaseResult:
    """``product_share_pct``: the necessary FLOPs (causal) per second divided by the rate of the model's products alone.

    ``kernel_share_pct``: the time that products and attention alone would take, divided by the step's time, and
    ``sustained_share_pct`` the same with products at the rate that is sustained.
    """
    floor = ceilings.floor(case.model, case.dtype) if ceilings else None
    if case.status != "done" or floor is None or floor.products_s is None or floor.products_tflops is None:
        return case
    shares: dict[str, float] = {}
    tflops = (case.tflops or {}).get("causal")
    if tflops is not None:
        shares["product_share_pct"] = 100 * tflops / floor.products_tflops
    if floor.attention_s is not None:
        step_s = median(case.step_times_s) / case.ga
        shares["kernel_share_pct"] = 100 * (floor.products_s + floor.attention_s) / step_s
        if floor.sustained:
            kept = floor.products_s / floor.sustained + floor.attention_s
            shares["sustained_share_pct"] = 100 * kept / step_s
    return case.model_copy(update=shares)
