# SPDX-License-Identifier: Apache-2.0
"""The conditions of a run under dotted keys, its identity among them, and the differences between runs, rated."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from sys import intern
from typing import Any, Literal

from llmb.base.missing import Missing
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record, Window
from llmb.readers.samples.node_settings import PREFIXES, SET_OR_NOT, NodeSettings, NodesSettings
from llmb.readers.samples.node_settings import together as nodes_together
from llmb.runs.environment import Environment, GpuState
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord
from llmb.runs.result import (
    ERROR_AT_END,
    MACHINE_FAULT,
    NETWORK_FAULT,
    OTHER_WORK,
    UNLIKE_NODES,
    Condition,
    Effect,
    Faults,
    ReferenceKind,
    Result,
)

KEY_DIGITS = 10
Value = str | int | float | bool | None
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
DATA = Path(__file__).with_name("conditions.yaml")
ORDER: tuple[Effect, ...] = ("prevents", "weakens", "noted")
EXPLAINED = (NETWORK_FAULT, MACHINE_FAULT)
"""Faults that 'llmb judge --explain' describes in detail."""
_FIGURE = re.compile(r"(?<!\S)\d+(?:\.\d+)?(?!\S)")
BETWEEN_RUNS = " | "
"""Separator between the strings of several runs."""
Values = Mapping[str, str]
"""Conditions on one side of a comparison by dotted key; unknown conditions are missing."""
SETTINGS = (
    "emulate_fp8",
    "deterministic",
    "recompute",
    "compiled",
    "attention_backend",
    "communication",
    "free_sms",
    "group_experts",
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
"""Settings that should be equal for all GPUs of a run."""
SPEED_PREFIXES = (*("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "NVIDIA_"), *("OMP_", "GOMP_", "MKL_", "MALLOC_", "GLOO_"))
NO_SPEED_SUFFIXES = ("_FILE", "_DIR", "_PATH", "_HOME", "_ID", "_VISIBLE_DEVICES", "_VERSION")
MOST_NAMED = 3
"""Maximum number of nodes to name; more nodes are only counted."""
MOST_LISTED = 4
"""Maximum number of listed settings that differ between a run's nodes."""


def key_of(configuration: Mapping[str, Value]) -> str:
    """Return a digest of ``configuration``."""
    return hashlib.sha256(_ENCODER.encode(configuration).encode()).hexdigest()[:KEY_DIGITS]


class RunIdentity(Record):
    """The configuration that a run shares with its repeats, under dotted keys."""

    configuration: dict[str, Value]

    @property
    def key(self) -> str:
        """Return a key that repeats share."""
        return key_of(self.configuration)


class Difference(Record):
    """A key whose values differ; a value is None if that side lacks it."""

    key: str
    before: Value
    after: Value


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Value]:
    """Flatten nested values to dotted keys; a sequence becomes a comma-separated string."""
    flat_values: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat_values |= flat(value, f"{above}{name}.")
        else:
            flat_values[intern(above + name)] = value if isinstance(value, Value) else ",".join(map(str, value))
    return flat_values


def differences(before: Mapping[str, Value], after: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Return the keys with different values, sorted, with both values."""
    keys = sorted(before.keys() | after.keys())
    pairs = ((key, before.get(key), after.get(key)) for key in keys)
    return tuple(Difference(key=key, before=one, after=other) for key, one, other in pairs if one != other)


def identity_of(record: RunRecord) -> RunIdentity:
    """Return a run's identity from its record alone, regardless of the names of the run and its folder."""
    return identity_of_plan(record.plan, record.program, record.arguments)


def identity_of_plan(plan: Plan, program: str, arguments: Mapping[str, str]) -> RunIdentity:
    """Return a run's identity from its plan; ``arguments`` are a framework script's arguments, by name."""
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
        "model": hashlib.sha256(recipe.model.model_dump_json().encode()).hexdigest()[:KEY_DIGITS],
        "data": plan.origin.data.name,
        "weights": plan.origin.weights.kind,
        "grad_reduce_dtype": recipe.training.grad_reduce_dtype,
        "fp8_recipe": plan.fp8_recipe,
        "lora": plan.lora and plan.lora.model_dump(mode="json"),
        "profiler": plan.profile and plan.profile.profiler,
        **{name: getattr(plan, name) for name in SETTINGS if hasattr(plan, name)},
        **({"parallelism": plan.parallelism.model_dump(mode="json")} if isinstance(plan, EnginePlan) else {}),
        **({} if recipe.pretended_rank is None else {"pretended_rank": recipe.pretended_rank}),
    }
    return RunIdentity(configuration=flat(parts))


def conditions_of(record: RunRecord) -> dict[str, Value]:
    """Return the conditions that may differ between repeats, by dotted key: None if unknown, lists as text."""
    plan, environment = record.plan, record.environment
    nodes = environment.nodes if environment else ()
    network = record.result.network if record.result else None
    settings = record.settings.of_all() if record.settings else {}
    values = flat(
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
    return {**values, **{key: value for key, value in settings.items() if values.get(key) is None}}


def steps_text(window: Window) -> str:
    """Return a string such as ``35-44``, ``49`` for a single step, or ``last`` if that is the window's rule."""
    if window.rule == "last":
        return window.rule
    return str(window.first) if window.first == window.last else f"{window.first}-{window.last}"


def speed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change step times; omit variables that name jobs, files, devices and versions."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(SPEED_PREFIXES) and not name.endswith(NO_SPEED_SUFFIXES)
    }


def _software(record: RunRecord) -> dict[str, Any]:
    environment = record.environment
    versions = {name: getattr(environment, name) if environment else None for name in VERSIONS}
    versions |= (environment and environment.packages) or {}
    llmb = {"llmb_version": record.llmb_version, "llmb_commit": record.llmb_commit}
    return {**versions, **llmb, "llmb_modified": record.llmb_modified, "image": record.image}


def _hardware(environment: Environment | None) -> dict[str, Any]:
    gpus = (environment.gpus if environment else None) or ()
    machine = {name: getattr(environment, name) if environment else None for name in MACHINE}
    return {
        **machine,
        "gpu_uuids": tuple(gpu.uuid for gpu in gpus if gpu.uuid) or None,
        **{name: _common([getattr(gpu, name) for gpu in gpus]) for name in GPU_LIMITS},
    }


def _common(values: Sequence[Value]) -> Value | tuple[Value, ...]:
    different = sorted({value for value in values if value is not None}, key=str)
    return different[0] if len(different) == 1 else tuple(different) or None


def _releases(plan: Plan) -> tuple[str, ...] | None:
    return tuple(dict.fromkeys(item.release for item in plan.recipe.expectations)) or None


class Drift(Record):
    """A changed setting of a node. A value is None if the setting was unset or not reported."""

    node: str
    key: str
    before: str | None
    after: str | None
    important: bool
    """True if the change is likely to affect the time of a step."""


def gpu_limits(gpus: Sequence[GpuState]) -> dict[str, str]:
    """Return the settings of a node's GPUs by dotted key; if GPUs differ, the value lists all that occur."""
    every = {name: sorted({getattr(gpu, name) for gpu in gpus} - {None}) for name in GPU_LIMITS}
    return {f"hardware.{name}": ", ".join(map(_text, values)) for name, values in every.items() if values}


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of_run(record: RunRecord) -> NodesSettings | Missing:
    """Return the settings of a run's nodes, including their GPUs; Missing if the nodes' settings are missing."""
    settings, environment = record.settings, record.environment
    if isinstance(settings, Missing):
        return settings
    by_node: dict[str, list[GpuState]] = {node: [] for node in settings.nodes}
    for gpu in (environment.gpus if environment else None) or ():
        by_node.get(gpu.node, []).append(gpu)
    limits = {node: NodeSettings(values=gpu_limits(gpus), missing={}) for node, gpus in by_node.items()}
    return settings.with_others(nodes_together(limits))


def find_drift(before: NodesSettings, now: NodesSettings) -> tuple[Drift, ...]:
    """Return changed settings, important ones first. A new node is compared with the usual values in ``before``."""
    changes = (one for node in now.nodes for one in _of_node(node, before.of_node(node), now.of_node(node)))
    return tuple(sorted(changes, key=lambda one: (not one.important, one.key, str(one.after), str(one.before))))


def _of_node(node: str, before: dict[str, str], now: dict[str, str]) -> Iterable[Drift]:
    for key in before.keys() | now.keys():
        values = before.get(key), now.get(key)
        if values[0] != values[1] and rule_of(key).differs != "ignored" and is_comparable(key, *values):
            yield Drift(node=node, key=key, before=values[0], after=values[1], important=rule_of(key).important)


def is_comparable(key: str, *values: object) -> bool:
    """Return whether a difference is meaningful: all values must be known, unless the setting may be unset."""
    return key.startswith(SET_OR_NOT) or None not in values


def definite_differences(before: Mapping[str, Value], after: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Return differences between conditions of runs, except for settings that only one side reports."""
    of_settings = (SET_OR_NOT, *PREFIXES)
    both_tell = all(any(key.startswith(of_settings) for key in side) for side in (before, after))
    only_if_told = PREFIXES if both_tell else of_settings
    every = differences(before, after)
    return tuple(one for one in every if not (one.key.startswith(only_if_told) and None in (one.before, one.after)))


def faults_of(record: RunRecord, result: Result) -> Faults:
    """Return the disturbances of the run according to its result and its record."""
    unlike, code = unlike_nodes(record), record.exit_code
    faults = {**result.faults, **({UNLIKE_NODES: unlike} if unlike else {})}
    if result.status != "success" or not code:
        return faults
    return {**faults, ERROR_AT_END: (f"exit code {code}", *faults.get(ERROR_AT_END, ()))}


def unlike_nodes(record: RunRecord) -> tuple[str, ...]:
    """Describe the important settings that differ between the nodes of a run, if all nodes report them."""
    settings = settings_of_run(record)
    if not settings:
        return ()
    keys = sorted({key for values in settings.unlike.values() for key in values if rule_of(key).important})
    texts = [_unlike(title_of(key), settings.nodes_by_value(key)) for key in keys if _all_known(settings, key)]
    more = len(texts) - MOST_LISTED
    return (*texts[:MOST_LISTED], *([f"other settings that differ: {more}"] if more > 0 else []))


def _all_known(settings: NodesSettings, key: str) -> bool:
    return is_comparable(key, *settings.nodes_by_value(key))


def _unlike(title: str, groups: dict[str | None, list[str]]) -> str:
    each = sorted(groups.items(), key=lambda group: len(group[1]))
    return f"{title} is " + " and ".join(f"{value or 'unset'} on {nodes_text(nodes)}" for value, nodes in each)


def nodes_text(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= MOST_NAMED else f"{len(nodes)} nodes"


class ConditionRule(Record):
    """The effect of a difference in a key that matches one of the patterns ``keys``."""

    keys: tuple[str, ...]
    title: str
    """The title for display; empty if the key serves as title."""
    differs: Effect | Literal["ignored"] | dict[ReferenceKind, Effect]
    """The effect of different values, if necessary by kind of reference; predictions count as expectations."""
    unknown: Effect | Literal["ignored"] = "ignored"
    important: bool = False
    """True if a change of this setting on a node is likely to affect the time of a step."""
    why: str

    def effect(self, kind: ReferenceKind, *, both: bool) -> Effect | None:
        """Return the effect for this kind of reference; None if ignored. ``both`` is True if both values are known."""
        stated: ReferenceKind = "expectation" if kind == "prediction" else kind
        effect = self.unknown if not both else self.differs
        effect = effect[stated] if isinstance(effect, dict) else effect
        return None if effect == "ignored" else effect


class ConditionFile(Record):
    """The content of ``conditions.yaml``."""

    rules: tuple[ConditionRule, ...]


@cache
def condition_rules() -> tuple[ConditionRule, ...]:
    return read_file(DATA, ConditionFile, wrap="rules").rules


def rule_of(key: str) -> ConditionRule:
    """Return the first rule that matches a key; the last rule matches every key."""
    return next(rule for rule in condition_rules() if any(fnmatchcase(key, pattern) for pattern in rule.keys))


def title_of(key: str) -> str:
    """Return the title of the condition ``key``; the key itself without a title, or if the rule has patterns."""
    rule = rule_of(key)
    exact = not any("*" in pattern for pattern in rule.keys)
    return rule.title if exact and rule.title else key


def differing(conditions: Iterable[Condition]) -> str:
    """Return a string such as ``program and CUDA graphs (worth 10 to 50 %) differ``."""
    *first, last = dict.fromkeys(f"{title_of(condition.key)}{worth(condition)}" for condition in conditions)
    return f"{', '.join(first)} and {last} differ" if first else f"{last} differs"


def worth(condition: Condition) -> str:
    """Format the slowdown that a condition causes; empty if unknown."""
    return "" if condition.slower_pct is None else " (worth {:g} to {:g} %)".format(*condition.slower_pct)


def find_conditions(own: Values, reference: Values, kind: ReferenceKind) -> tuple[Condition, ...]:
    """Return the conditions that differ and are not ignored, sorted by effect, the strongest first."""
    conditions = []
    for key in own.keys() | reference.keys():
        values = own.get(key), reference.get(key)
        if values[0] == values[1]:
            continue
        effect = rule_of(key).effect(kind, both=None not in values)
        if effect:
            conditions.append(Condition(key=key, own=values[0], reference=values[1], effect=effect))
    return tuple(sorted(conditions, key=lambda condition: (ORDER.index(condition.effect), condition.key)))


def disturbances(own: Values, reference: Values) -> Iterator[Condition]:
    """Yield the disturbances of either side's runs; even a disturbance of both sides counts as a difference."""
    for key in dict.fromkeys((*own, *reference)):
        effect = rule_of(key).effect("baseline", both=False)
        assert effect, "the data file does not ignore it"
        yield Condition(key=key, own=own.get(key), reference=reference.get(key), effect=effect)


def fault_texts(faults: Faults, run_id: str) -> dict[str, str]:
    """Format each fault as one string; faults in ``EXPLAINED`` name the command that explains them for ``run_id``."""
    more = f" (see 'llmb judge {run_id} --explain')"
    return {key: "; ".join(texts) + (more if key in EXPLAINED else "") for key, texts in faults.items()}


def together(sides: Iterable[Values]) -> dict[str, str]:
    """Combine the strings of several runs by key: join distinct strings, and turn numbers of other work into ranges."""
    every = list(sides)
    keys = dict.fromkeys(key for side in every for key in side)
    texts = {key: BETWEEN_RUNS.join(dict.fromkeys(side[key] for side in every if key in side)) for key in keys}
    if OTHER_WORK in texts and len(every) > 1:
        texts[OTHER_WORK] = _ranges([side[OTHER_WORK] for side in every if OTHER_WORK in side], len(every))
    return texts


def _ranges(texts: Iterable[str], runs: int) -> str:
    alike: dict[str, list[list[str]]] = {}
    for part in "; ".join(texts).split("; "):
        alike.setdefault(_FIGURE.sub("{}", part), []).append(_FIGURE.findall(part))
    return "; ".join(
        f"{form.format(*map(_range, zip(*figures, strict=True)))} during {len(figures)} of {runs} runs"
        for form, figures in alike.items()
    )


def _range(figures: tuple[str, ...]) -> str:
    return " to ".join(dict.fromkeys((min(figures, key=float), max(figures, key=float))))


def condition_values(values: Mapping[str, object], *, unset: str | None = None) -> dict[str, str]:
    """Format values; a value that is None becomes ``unset`` or, if that is None, is omitted."""
    texts = {key: unset if value is None else _condition_text(value) for key, value in values.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _condition_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def merged(sides: Iterable[Values]) -> dict[str, str]:
    """Return the distinct values of each key, separated by commas; omit conditions that not all runs report."""
    every = list(sides)
    keys = set.intersection(*(set(side) for side in every)) if every else set()
    return {key: ", ".join(sorted({side[key] for side in every})) for key in keys}
