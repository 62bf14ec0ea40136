# SPDX-License-Identifier: Apache-2.0
"""Runs one case in a separate process and converts its output to a result."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import Case
from benchmarks.engine.engines.job import Job, Measured
from benchmarks.engine.engines.registry import ENGINES, LLMB, engine_version
from benchmarks.engine.processes import Ended, failure_reason, run_limited, tail
from benchmarks.engine.records import CaseResult, Settings
from benchmarks.engine.store import code_of
from llmb.base.statistics import describe
from llmb.catalogue.records import Dtype
from llmb.catalogue.throughput import parameter_count, throughput, why_too_fast
from llmb.launch.programs.engine.program import shipped_variables
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.record import engine_plan, read_record
from llmb.runs.steps import read_steps

GIB = 2**30
REFUSED = (2, 3)
"""Exit codes with which llmb reports that it cannot train this, or not on this machine."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def blank(case: Case) -> CaseResult:
    """What is known of a case before it runs."""
    recipe, engine = case.subject.recipe, case.engine
    layout, model = recipe.layout, recipe.model
    return CaseResult(
        engine=engine,
        variant=case.variant,
        engine_version=engine_version(engine),
        model=case.subject.name,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        proxy=recipe.proxy,
        layers=layout.layers,
        vocab_size=model.vocab_size,
        experts=model.moe.experts if model.moe else None,
        parameters=parameter_count(model)[0],
        mbs=layout.mbs,
        ga=layout.ga,
        gbs=layout.gbs,
        seq_len=layout.seq_len,
        round=case.round,
        status="not_run",
        code=code_of(engine),
        peak_tflops=recipe.peak_tflops,
        published_mfu_pct=case.subject.target.mfu_pct if case.subject.target else None,
    )


def run_case(case: Case, settings: Settings, folder: Path, limit_s: float) -> CaseResult:
    """``folder`` is where the process writes its files; its time limit is ``limit_s`` seconds."""
    known = blank(case)
    folder.mkdir(parents=True, exist_ok=True)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    command = llmb_command(case, settings) if case.engine == LLMB else adapter_command(case, settings, folder)
    environ = {**os.environ, **variables(case, settings), "LLMB_INSTALL": str(folder / "install")}
    ended = run_limited(command, environ, folder / "log.txt", limit_s)
    known = known.model_copy(update={"started_at": started, "wall_s": ended.wall_s})
    if ended.exit_code is None:
        stopped = {"status": "stopped", "reason": f"stopped after {ended.wall_s:.0f} s", "log_tail": tail(ended)}
        return known.model_copy(update=stopped)
    read = read_llmb if case.engine == LLMB else read_adapter
    return read(case, known, ended, folder)


def variables(case: Case, settings: Settings) -> dict[str, str]:
    """All engines get what llmb gives its own processes, whatever each would choose; what the user has set stays."""
    given = shipped_variables("cpu" if settings.gpu_type == "cpu" else "cuda", os.environ)
    if not any(name in os.environ for name in ALLOCATOR):
        given[ALLOCATOR[0]] = f"expandable_segments:{settings.expandable_segments}"
    return {**{name: value for name, value in given.items() if name not in os.environ}, **case.settings.environ}


def llmb_command(case: Case, settings: Settings) -> list[str]:
    """The command that a user would call, with the window over the timed steps."""
    recipe, profiled = case.subject.recipe, case.settings.profiled_steps
    steps = settings.warmup_steps + settings.steps
    command = [sys.executable, "-m", "llmb.cli.main", "run", "--json"]
    command += ["-w", recipe.workload, "-s", recipe.size, "--dtype", recipe.dtype, "--gpu-type", recipe.gpu_type]
    command += ["--scale", "1", "--gbs", str(recipe.layout.gbs), "--seed", str(settings.seed)]
    command += ["--steps", str(steps + profiled), "--window", f"{settings.warmup_steps}-{steps - 1}"]
    command += ["--compile" if settings.compiled else "--no-compile"]
    if recipe.task != "pretrain":
        command += ["--synthetic", "--document-tokens", "0"]
    if profiled:
        command += ["--profile", "--profiler", "torch"]
        command += ["--profile-start-step", str(steps), "--profile-stop-step", str(steps + profiled)]
    return [*command, *case.settings.options, *shlex.split(settings.llmb_options)]


def adapter_command(case: Case, settings: Settings, folder: Path) -> list[str]:
    recipe = case.subject.recipe
    job = Job(
        engine=case.engine,
        model=recipe.model,
        training=recipe.training,
        dtype=recipe.dtype,
        mbs=recipe.layout.mbs,
        ga=recipe.layout.ga,
        seq_len=recipe.layout.seq_len,
        warmup_steps=settings.warmup_steps,
        timed_steps=settings.steps,
        seed=settings.seed,
        device="cpu" if settings.gpu_type == "cpu" else "cuda",
        compiled=settings.compiled,
    )
    (folder / "job.json").write_text(job.model_dump_json())
    program = ENGINES[case.engine].program
    assert program is not None
    return [sys.executable, "-m", program, str(folder / "job.json"), str(folder / "result.json")]


def read_llmb(case: Case, known: CaseResult, ended: Ended, _: Path) -> CaseResult:
    document = _json(ended.stdout)
    if ended.exit_code in REFUSED and document is None:
        return known.model_copy(update={"reason": refusal(ended.stderr)[:500]})
    if document is None or document["status"] != "success":
        reason = document["reason"] if document else failure_reason(ended)
        return known.model_copy(update={"status": "failed", "reason": reason, "log_tail": tail(ended)})
    window = range(document["window"]["first"], document["window"]["last"] + 1)
    folder = RunFolder(Path(document["run_dir"]))
    steps = read_steps(folder.steps)
    measured = Measured(
        parameters=known.parameters,
        step_times_s=tuple(step.step_time_s for step in steps if step.step in window),
        losses=tuple(step.loss for step in steps),
        peak_memory_bytes=max(step.peak_memory_bytes for step in steps),
        versions={},
        conventions=llmb_conventions(engine_plan(read_record(folder)), document["attention_backend"]),
    )
    profile = document.get("profile") or {}
    return with_figures(case, known.model_copy(update={"breakdown": profile.get("breakdown")}), measured)


def refusal(stderr: str) -> str:
    """The error that ``llmb run --json`` ended with, in one line; all of its output if that has none."""
    error = (_json(stderr.strip().rpartition("\n")[2]) or {}).get("error")
    parts = (error["what"], error["do"]) if error else (stderr,)
    return "; ".join(" ".join(part.split()) for part in parts if part)


def llmb_conventions(plan: EnginePlan, attention: str | None) -> tuple[str, ...]:
    """What llmb stores and computes in, as its run decided; ``attention`` is the backend that it chose."""
    fp32 = plan.recipe.dtype is Dtype.FP32
    weights = "weights and moments in fp32" if fp32 else "weights in bf16, fp32 master weights and moments"
    fp8 = (f"linear layers but the head in fp8, {plan.fp8_recipe} scaling",) if plan.fp8_recipe else ()
    small = ", of small logits by torch" if plan.device == "cpu" else ""
    return (
        f"{weights}, gradients accumulated in {plan.recipe.training.grad_reduce_dtype}",
        *fp8,
        *((f"attention by {attention}",) if attention else ()),
        f"logits {'kept' if plan.keep_logits else 'recomputed in chunks'}",
        f"compiled block by block, and the loss between its products{small}" if plan.compiled else "not compiled",
        "gradients clipped by their norm in fp64, AdamW in one pass, no weight decay of norms",
        "run by llmb run, step times as it logs them",
    )


def _json(text: str) -> dict[str, Any] | None:
    """A document on standard output, or None if the command ended without one."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def read_adapter(case: Case, known: CaseResult, ended: Ended, folder: Path) -> CaseResult:
    result = folder / "result.json"
    failed = {"status": "failed", "log_tail": tail(ended)}
    if ended.exit_code != 0 or not result.exists():
        return known.model_copy(update={**failed, "reason": failure_reason(ended)})
    measured = Measured.model_validate_json(result.read_text())
    if measured.parameters != known.parameters:
        reason = f"trained a different model: {measured.parameters:,} parameters instead of {known.parameters:,}"
        return known.model_copy(update={**failed, "reason": reason})
    if None in measured.losses:
        reason = f"the loss of step {measured.losses.index(None)} is not finite"
        return known.model_copy(update={**failed, "reason": reason})
    return with_figures(case, known, measured)


def with_figures(case: Case, known: CaseResult, measured: Measured) -> CaseResult:
    """Rates are those of the median step."""
    statistics = describe(measured.step_times_s)
    metrics = throughput(case.subject.recipe, statistics.median)
    if why := why_too_fast(metrics.tflops_per_gpu, metrics.peak_tflops):
        return known.model_copy(update={"status": "failed", "reason": why})
    versions = tuple(f"{name} {version}" for name, version in measured.versions.items())
    return known.model_copy(
        update={
            "status": "done",
            "conventions": (*measured.conventions, *versions),
            "step_times_s": measured.step_times_s,
            "step_time_s": asdict(statistics),
            "tokens_per_s": metrics.tokens_per_s,
            "tflops": metrics.tflops_per_gpu,
            "mfu_pct": metrics.mfu_pct,
            "peak_memory_gib": measured.peak_memory_bytes / GIB,
            "loss": {"first": measured.losses[0], "last": measured.losses[-1]},
        }
    )
