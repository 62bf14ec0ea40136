# SPDX-License-Identifier: Apache-2.0
"""Parsed logs as a JSON document."""

from dataclasses import asdict
from typing import Any, Literal

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.logs.configuration import INFERRED_RELEASE
from llmb.metrics.anomalies import Anomalies
from llmb.report.parse_report import ParseReport, all_statistics, date_of, known_times, text_of


def parse_document(
    report: ParseReport, groups: list[dict[str, Any]] | None = None, scaling: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The JSON document. An unknown value is null, and so are ``groups`` and ``scaling`` unless they are wanted."""
    return {
        "analysis": {
            "directories": list(report.directories),
            "window_rule": report.rule,
            "files": report.files,
        },
        "results": [_result(run, report.name(run)) for run in report.runs],
        "groups": groups,
        "scaling": scaling,
        "summary": report.counts | {"files": report.files},
    }


def _result(run: AnalyzedRun, name: str) -> dict[str, Any]:
    outcome = run.outcome
    losses = {"first": outcome.loss_first, "last": outcome.loss_last}
    return {
        "run": run.id,
        "filename": name,
        "path": text_of(run.log_path),
        "status": outcome.status,
        "reason": outcome.reason,
        "copy_of": run.copy_of,
        **{key: run.text(key) for key in ("workload", "size", "dtype", "gpu_type", "program")},
        "gpus": run.gpus,
        "layout": run.layout,
        "layout_source": run.layout_source,
        "release": run.release,
        "release_source": _release_source(run),
        "identity": run.key,
        "label": run.label,
        "nodes": run.node_count,
        "node_names": list(run.nodes),
        "date": date_of(run),
        "date_source": None if run.started_s is None else "record" if run.record else "file",
        "window": outcome.window and outcome.window.model_dump(),
        "format": outcome.format,
        "steps": outcome.steps,
        "attempts": outcome.attempts,
        "max_iteration": outcome.max_step,
        "figures": run.figures,
        "step_time_s": known_times(outcome) or None,
        "clock_error_s": outcome.clock_error_s,
        "warnings": list(outcome.warnings),
        "anomalies": run.anomalies and _anomalies(run.anomalies),
        "tflops_per_gpu": outcome.tflops_per_gpu and all_statistics(outcome.tflops_per_gpu),
        "mfu_pct": dict(run.mfu_pct),
        "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
        "days_per_1t_tokens": run.days_per_1t_tokens,
        "origin": run.origin and run.origin.document(),
        "network": run.network and {"faults": [], **run.network.model_dump(mode="json")},
        "loss": losses if any(value is not None for value in losses.values()) else None,
    }


def _anomalies(found: Anomalies) -> dict[str, Any]:
    return {
        "outliers": [asdict(outlier) for outlier in found.outliers],
        "drift_pct": found.drift_pct,
        "drift_ci95_pct": found.drift_ci95_pct,
        "period_steps": found.period_steps,
        "period_excess_s": found.period_excess_s,
    }


def _release_source(run: AnalyzedRun) -> Literal["record", "path", "form of the name"] | None:
    """Who tells the release; only names of one release have the form of theirs."""
    if run.release is None:
        return None
    if run.recipe and run.recipe.release:
        return "record"
    return "form of the name" if run.configuration.get(INFERRED_RELEASE) else "path"
