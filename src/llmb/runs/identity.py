# SPDX-License-Identifier: Apache-2.0
"""What makes two runs repeats of each other, and what may differ between repeats. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from llmb.catalogue.records import Record
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord

KEY_DIGITS = 10
Value = str | int | float | bool | None
SETTINGS = (
    "emulate_fp8",
    "recompute",
    "compiled",
    "attention_backend",
    "keep_logits",
    "force_load_balancing",
    "checkpoint_interval",
    "nccl_trace",
)
"""Those of the plan that may change the time of a step."""


class RunIdentity(Record):
    """The whole configuration of a run: everything that decides what is computed, and how. Keys are dotted."""

    configuration: dict[str, Value]

    @property
    def key(self) -> str:
        """Equal for repeats, and only for them."""
        text = json.dumps(self.configuration, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


class Difference(Record):
    """A key whose values differ; a value is None if that side does not have it."""

    key: str
    before: Value
    after: Value


def identity_of(record: RunRecord) -> RunIdentity:
    """By the record alone, whatever the run and its folder are called."""
    plan = record.plan
    recipe = plan.recipe
    parts: dict[str, Any] = {
        "program": record.program,
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
    }
    return RunIdentity(configuration=flat(parts))


def _settings(plan: Plan) -> dict[str, Any]:
    """Those that the plan's program has."""
    chosen = {name: getattr(plan, name) for name in SETTINGS if hasattr(plan, name)}
    return chosen | ({"parallelism": plan.parallelism.model_dump(mode="json")} if isinstance(plan, EnginePlan) else {})


def _digest(record: Record) -> str:
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:KEY_DIGITS]


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Value]:
    """Nested values under dotted keys; a sequence becomes text."""
    found: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[above + name] = value if isinstance(value, Value) else ",".join(map(str, value))
    return found


def differences(before: Mapping[str, Value], after: Mapping[str, Value]) -> tuple[Difference, ...]:
    """By key, in alphabetical order."""
    keys = sorted(before.keys() | after.keys())
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(Difference(key=key, before=one, after=other) for key, one, other in pairs if one != other)
