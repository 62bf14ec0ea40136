# SPDX-License-Identifier: Apache-2.0
"""The JSON documents whose keys are a contract, and their schemas."""

import json
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from json_types import Schema, schema_of

from llmb.catalogue.published import Expectation
from llmb.catalogue.records import Convention, Dtype, Unspecified, Window
from llmb.jobs import pace
from llmb.jobs.job import Job
from llmb.jobs.pace import State
from llmb.jobs.settings_in_effect import Setting
from llmb.launch.documents.launch_scripts import FileState
from llmb.nodes.bench.measurements import Measurement, MeasurementFile
from llmb.nodes.bench.pairs import PairFigures
from llmb.nodes.doctor import check_records as health
from llmb.prediction.prediction import BeyondNvlink
from llmb.prediction.scale import Goodput, TrainingCost
from llmb.prediction.search import Goal
from llmb.prediction.uncertainty import ErrorSource
from llmb.readers.anomalies import Anomalies
from llmb.readers.logs.outcome import Status
from llmb.reports.doctor_report import DriftReport
from llmb.reports.output import json_text
from llmb.runs.analyzed_run import ExcludedRun
from llmb.runs.checkpoints.origin import DataOrigin, WeightsOrigin
from llmb.runs.choices import DpSharding, GradientSync, Recompute
from llmb.runs.plan import PredictedStep
from llmb.runs.result import Result, Verdict
from llmb.runs.trace_reports import NetworkUse
from llmb.setup.prepare.hub import AccessState, NeededRepository, TokenSource
from llmb.verdict import compare_runs
from llmb.verdict.expectations_file import AcceptanceSet
from llmb.verdict.explain_run import Explanation


class RecipeIdentity(TypedDict):
    workload: str
    size: str
    dtype: Dtype
    gpu_type: str
    scale: int
    release: str | None
    task: str
    proxy: bool
    layers: NotRequired[int]
    full_layers: NotRequired[int | None]


class RecipeLayout(TypedDict):
    fits: bool


class LabeledOrigin(TypedDict):
    weights: WeightsOrigin
    data: DataOrigin
    text: str


class JudgedRun(TypedDict):
    id: str
    path: str
    label: str | None


class LoggedStatistics(TypedDict):
    mean: float
    median: float | None
    std: float | None
    cv: float | None
    ci95: tuple[float, float] | None
    min: float | None
    max: float | None


class WatchedStep(TypedDict):
    step: int
    step_time_s: float | None
    loss: float | None
    grad_norm: float | None
    tflops_per_gpu: float | None
    profiled: bool


class TimeLeft(TypedDict):
    steps_left: int
    remaining_s: float
    ends_at: str


class LoggedLoss(TypedDict):
    first: float | None
    last: float | None


class ParsedGroup(TypedDict):
    workload: str | None
    size: str | None
    dtype: str | None
    gpu_type: str | None
    program: str | None
    gpus: int | None
    layout: dict[str, int]
    identity: str | None
    differs: tuple[str, ...]
    runs: tuple[str, ...]
    run_means_s: tuple[float, ...]
    median_s: float
    std_s: float | None
    spread_pct: float | None
    mfu_pct: float | None
    mfu_convention: str | None


class ParsedScale(TypedDict):
    gpus: int
    layout: str
    gbs: int | None
    runs: tuple[str, ...]
    median_s: float | None
    efficiency_pct: float | None
    days_per_1t_tokens: float | None
    published_s: float | None
    published_efficiency_pct: float | None
    published_days_per_1t_tokens: float | None
    published_source: str | None


class ParsedScaling(TypedDict):
    recipe: str
    gpu_type: str | None
    program: str | None
    scaling: Literal["weak", "strong", "mixed"] | None
    scales: tuple[ParsedScale, ...]


class CheckedNodes(TypedDict):
    """With the report of a single node also at the top."""

    status: health.Status
    nodes: tuple[health.NodeReport, ...]
    node: NotRequired[str]
    checked_at: NotRequired[str]
    checks: NotRequired[tuple[health.Check, ...]]
    not_checked: NotRequired[tuple[health.NotChecked, ...]]
    clock_ahead_s: NotRequired[float | None]
    clock_uncertainty_s: NotRequired[float | None]
    started_at: NotRequired[str]
    folder: NotRequired[str]
    fit_nodes: NotRequired[str]
    unfit_nodes: NotRequired[str]
    unchecked_nodes: NotRequired[str]


class MeasuredChange(TypedDict):
    measured_at: str
    latest: Measurement
    previous_at: str | None
    previous: Measurement | None
    change_pct: float | None


class MeasuredDevice(TypedDict):
    node: str
    local_rank: int
    uuid: str | None
    device: str
    tflops: float
    below_median_pct: float
    slow: bool


DECLARED: Mapping[str, Mapping[str, Any]] = {
    "run": {
        "": Result,
        "recipe": RecipeIdentity,
        "unspecified": tuple[Unspecified, ...],
        "origin": LabeledOrigin,
        "window": Window,
        "expectations": tuple[Expectation, ...],
        "expectations_reason": str | None,
        "predicted": PredictedStep | None,
        "predicted_reason": str | None,
    },
    "parse": {
        "results[].status": Status,
        **{f"results[].{key}": str | None for key in ("workload", "size", "dtype", "gpu_type", "program", "date")},
        **{f"results[].{key}": str | None for key in ("identity", "label")},
        **{f"results[].{key}": int | None for key in ("gpus", "nodes")},
        **{f"results[].{key}": float | None for key in ("tokens_per_s_per_gpu", "days_per_1t_tokens")},
        "analysis.directories": tuple[str, ...],
        "results[].layout": Mapping[str, int],
        "results[].mfu_pct": Mapping[str, float | None],
        "results[].layout_source": Literal["record", "log", "recipe"] | None,
        "results[].format": str | None,
        "results[].warnings": tuple[str, ...],
        "results[].anomalies": Anomalies | None,
        "results[].network": NetworkUse | None,
        "groups": tuple[ParsedGroup, ...] | None,
        "scaling": tuple[ParsedScaling, ...] | None,
        "results[].node_names": tuple[str, ...],
        "results[].date_source": Literal["record", "file"] | None,
        "results[].figures": Literal["exact", "rounded"] | None,
        "results[].window": Window | None,
        "results[].steps": int | None,
        "results[].attempts": int | None,
        "results[].max_iteration": int | None,
        "results[].step_time_s": LoggedStatistics | None,
        "results[].tflops_per_gpu": LoggedStatistics | None,
        "results[].origin": LabeledOrigin | None,
        "results[].loss": LoggedLoss | None,
        "summary": Mapping[str, int],
    },
    "watch": {
        "job_id": str | None,
        "state": State,
        "reason": str | None,
        "nodes": str | None,
        "steps_total": int | None,
        "since_last_step_s": float | None,
        "last_steps": tuple[WatchedStep, ...],
        "pace": pace.Pace | None,
        "tokens_per_s": float | None,
        "tokens_per_s_per_gpu": float | None,
        "tflops_per_gpu": dict[str, float | None] | None,
        "mfu_pct": dict[str, float | None] | None,
        "forecast": TimeLeft | None,
        "time_limit_left_s": float | None,
        "expectation": pace.PaceComparison | None,
        "result": dict[str, Any] | None,
    },
    "runs": {"runs[]": Job},
    "judge": {
        "": Verdict,
        "acceptance": AcceptanceSet | None,
        "judged[]": Verdict,
        "judged[].step_time_s": float | None,
        "judged[].runs": tuple[JudgedRun, ...],
        "judged[].explanation": Explanation | None,
        "left_out": tuple[ExcludedRun, ...],
    },
    "doctor": {"": CheckedNodes},
    "doctor --against": {"": DriftReport},
    "install": {
        "status": Literal["installed", "planned"],
        "steps[].state": Literal["done", "kept", "open"],
        "jobs[].cluster": str | None,
    },
    "prepare image": {"runtime": Literal["pyxis", "apptainer"]},
    "jobs list": {"jobs[]": Job},
    "compare": {"": compare_runs.Comparison},
    "memory": {
        "recipe": RecipeIdentity,
        "unspecified[]": Unspecified,
        "method": Literal["exact", "estimate"],
        "capacity_gib": float | None,
        "fits": bool | None,
        "remedies[].slower_pct": float | None,
    },
    "predict": {
        "recipe": RecipeIdentity,
        "unspecified[]": Unspecified,
        "ci95_s": tuple[float, float],
        "errors": dict[str, dict[str, float | str]],
        "error_sources[]": ErrorSource,
        "calibration_factors": dict[str, float],
        "breakdown_s": dict[str, float],
        "energy_j_per_token_at_most": float | None,
        "training": TrainingCost | None,
        "beyond_nvlink": tuple[BeyondNvlink, ...],
        "scaling": dict[str, Any] | None,
        "goodput": Goodput | None,
        "days_per_1t_tokens": float | None,
        "reasons": dict[str, str],
        **{f"{name}.{each}": float | None for name in ("mfu_pct", "tflops_per_gpu") for each in Convention},
        "memory.peak_gib": float | None,
        "memory.fits": bool | None,
        "memory.needed_gib": float | None,
        "memory.capacity_gib": float | None,
        "memory.reason": str | None,
        "unvalidated": tuple[str, ...],
    },
    "plan": {
        "recipe": RecipeIdentity,
        "unspecified[]": Unspecified,
        "goal": Goal,
        **{
            f"{place}.{name}": kind
            for place in ("layouts[]", "recipe_layout")
            for name, kind in {
                "first_stage_layers": int | None,
                "last_stage_layers": int | None,
                "recompute": Recompute,
                "dp_sharding": DpSharding,
                "gradient_sync": GradientSync,
                "ci95_s": tuple[float, float],
                "breakdown_s": dict[str, float],
                "price_per_1t_tokens": float | None,
                "training": TrainingCost | None,
                "beyond_nvlink": tuple[BeyondNvlink, ...],
            }.items()
        },
        "recipe_layout": RecipeLayout | None,
        "recipe_left_out": str | None,
        "constraints": dict[str, int | float | str],
        "better_than_recipe_pct": float | None,
        "left_out": dict[str, int],
        "unvalidated": tuple[str, ...],
    },
    "bench": {"": MeasurementFile, "measurements[].peak_pct": float | None},
    "bench list": {"changes[]": MeasuredChange},
    "bench gpus": {
        "median_tflops": float | None,
        "devices[]": MeasuredDevice,
        "failed": tuple[dict[str, str], ...],
        "missing_nodes": tuple[str, ...],
        "exclude": str | None,
    },
    "bench collectives --pairwise": {
        "nodes[].fit": bool | None,
        "nodes[].evidence": tuple[str, ...],
        "notes": tuple[str, ...],
        "group": PairFigures | None,
        **{f"{place}[].{name}": float | None for place in ("alone", "pairs") for name in PairFigures.model_fields},
        **{f"{place}[].problem": str | None for place in ("alone", "pairs")},
    },
    "config check": {"files[].state": FileState, "files[].differs": tuple[str, ...]},
    "config show": {
        "install_root": Setting,
        "settings[]": Setting,
        "variables[]": Setting,
        "files[].reference_form": str | None,
        "files[].not_taken": tuple[str, ...],
    },
    "prepare access": {
        "token": TokenSource | None,
        "repositories[]": NeededRepository,
        "repositories[].state": AccessState,
        "repositories[].reason": str | None,
    },
}
"""Types that a sample does not show, by document and path. These documents have a frozen schema."""


def schemas(documents: Mapping[str, Any]) -> dict[str, Schema]:
    """By the name of the document; ``documents`` has a sample of each."""
    written = {name: json.loads(json_text(documents[name])) for name in DECLARED}
    return {name: schema_of([written[name]], parts) for name, parts in DECLARED.items()}
