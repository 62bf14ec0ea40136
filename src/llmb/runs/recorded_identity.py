# SPDX-License-Identifier: Apache-2.0
"""What makes two runs repeats of each other, by their records, and what may differ between repeats. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from llmb.catalogue.records import Record
from llmb.runs.environment import Environment
from llmb.runs.identity import KEY_DIGITS, RunIdentity, Value, flat
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord

SETTINGS = (
    "emulate_fp8",
    "recompute",
    "compiled",
    "attention_backend",
    "keep_logits",
    "force_load_balancing",
    "capacity_factor",
    "checkpoint_interval",
    "nccl_trace",
)
"""Settings of the plan that may change the time of a step."""
VERSIONS = ("torch", "cuda", "cudnn", "nccl", "ptxas", "driver", "cuda_driver", "python")
MACHINE = ("device", "device_memory_gib", "cpu", "cpu_threads_per_rank")
GPU_LIMITS = (
    *("power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz"),
    *("application_sm_clock_mhz", "application_memory_clock_mhz", "persistence_mode", "mig_mode", "ecc_mode"),
)
"""Settings of a GPU that all of a run's GPUs should share."""
SPEED_PREFIXES = (
    *("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "NVIDIA_"),
    *("OMP_", "GOMP_", "MKL_", "MALLOC_", "GLOO_"),
)
NO_SPEED_SUFFIXES = ("_FILE", "_DIR", "_PATH", "_HOME", "_ID", "_VISIBLE_DEVICES", "_VERSION")


def identity_of(record: RunRecord) -> RunIdentity:
    """By the record alone, whatever the run and its folder are called."""
    return identity_of_plan(record.plan, record.program, record.arguments)


def identity_of_plan(plan: Plan, program: str, arguments: Mapping[str, str]) -> RunIdentity:
    """``arguments`` are those of a framework's script, by name."""
    recipe = plan.recipe
    parts: dict[str, Any] = {
        "program": program,
        "arguments": arguments,
        "workload": recipe.workload,
        "size": recipe.size,
        "task": recipe.task,
        "dtype": recipe.dtype.value,
        "gpu_type": recipe.gpu_type,
        "layout": recipe.layout.model_dump(mode="json"),
        "model": _digest(recipe.model),
        "data": plan.origin.data.name,
        "weights": plan.origin.weights.kind,
        "grad_reduce_dtype": recipe.training.grad_reduce_dtype,
        "fp8_recipe": plan.fp8_recipe,
        "lora": plan.lora and plan.lora.model_dump(mode="json"),
        "profiler": plan.profile and plan.profile.profiler,
        **_settings(plan),
        **({} if recipe.pretended_rank is None else {"pretended_rank": recipe.pretended_rank}),
    }
    return RunIdentity(configuration=flat(parts))


def _settings(plan: Plan) -> dict[str, Any]:
    """Settings that the plan's program has."""
    chosen = {name: getattr(plan, name) for name in SETTINGS if hasattr(plan, name)}
    return chosen | ({"parallelism": plan.parallelism.model_dump(mode="json")} if isinstance(plan, EnginePlan) else {})


def _digest(record: Record) -> str:
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:KEY_DIGITS]


def conditions_of(record: RunRecord) -> dict[str, Value]:
    """What may differ between repeats, under dotted keys; None is unknown. A list becomes text."""
    plan, environment = record.plan, record.environment
    nodes = environment.nodes if environment else ()
    network = record.result.network if record.result else None
    settings = record.settings.of_all() if record.settings else {}
    known = flat(
        {
            "software": _software(record),
            "hardware": _hardware(environment or None),
            "nodes": nodes or (record.job.nodes if record.job else None),
            "node_count": len(nodes) or None,
            "fabric": network.fabric if network else None,
            "variables": speed_variables(environment.variables if environment else {}),
            "attention_backend": environment.attention.backend if environment and environment.attention else None,
            "steps": plan.steps,
            "first_step": plan.first_step,
            "window": record.window.model_dump(),
            "seed": plan.seed,
            "label": record.label,
            "release": plan.recipe.release,
            "expectations": {"release": _releases(plan)},
        }
    )
    return {**known, **{key: value for key, value in settings.items() if known.get(key) is None}}


def speed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change the time of a step; others name jobs, files and folders, which differ for every run."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(SPEED_PREFIXES) and not name.endswith(NO_SPEED_SUFFIXES)
    }


def _software(record: RunRecord) -> dict[str, Any]:
    environment = record.environment
    seen = {name: getattr(environment, name) if environment else None for name in VERSIONS}
    own = {"llmb_version": record.llmb_version, "llmb_commit": record.llmb_commit}
    return {**seen, **own, "llmb_modified": record.llmb_modified, "image": record.image}


def _hardware(environment: Environment | None) -> dict[str, Any]:
    gpus = (environment.gpus if environment else None) or ()
    seen = {name: getattr(environment, name) if environment else None for name in MACHINE}
    return {
        **seen,
        "gpu_uuids": tuple(gpu.uuid for gpu in gpus if gpu.uuid) or None,
        **{name: _common([getattr(gpu, name) for gpu in gpus]) for name in GPU_LIMITS},
    }


def _common(values: Sequence[Value]) -> Value | tuple[Value, ...]:
    """The value that all have, else all that occur, in order; None if none is known."""
    known = sorted({value for value in values if value is not None}, key=str)
    return known[0] if len(known) == 1 else tuple(known) or None


def _releases(plan: Plan) -> tuple[str, ...] | None:
    return tuple(dict.fromkeys(item.release for item in plan.recipe.expectations)) or None
