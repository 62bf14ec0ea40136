# SPDX-License-Identifier: Apache-2.0
"""Parsed logs as a JSON document. The process that reads a log writes its part of it, unless other logs count in it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from llmb.analysis.analyzed_run import AnalyzedRun, needs_catalogue
from llmb.analysis.logged_run import known_run
from llmb.logs.configuration import INFERRED_RELEASE
from llmb.logs.files import parse_file
from llmb.metrics.anomalies import Anomalies
from llmb.report.output import json_text
from llmb.report.parse_report import (
    EncodedRun,
    ParseReport,
    all_statistics,
    date_of,
    known_times,
    text_of,
)

_RESULT_START = "\n" + 4 * " "
_NAME = f',{_RESULT_START}  "filename": '
_NO_RESULTS = '"results": []'


def read_runs(paths: Sequence[Path], rule: str) -> list[AnalyzedRun | EncodedRun]:
    """The runs that files are the logs of, in any order; encoded if its log is all that is known of a run.

    Each step is done for all logs before the next one: its code and data then stay in the core's caches, which takes
    four fifths of the time.
    """
    files = [parse_file(path, rule) for path in paths]
    runs = [known_run(file, rule) for file in files]
    alone = [run for run in runs if _is_alone(run)]
    results = [_result(run, "") for run in alone]
    texts = [_as_item(result) for result in results]
    others = [run for run in runs if not _is_alone(run)]
    return [*others, *map(_encoded, alone, texts)]


def _is_alone(run: AnalyzedRun) -> bool:
    """Whether neither a record nor, for all that is known yet, the catalogue has more of it."""
    return not (run.record or run.unread_record or run.text("gpu_type"))


def _encoded(run: AnalyzedRun, text: str) -> EncodedRun:
    before, name, after = text.partition(_NAME)
    return EncodedRun(
        log_path=run.log_path,
        status=run.outcome.status,
        digest=run.outcome.digest,
        is_named="workload" in run.configuration,
        before_name=before + name,
        after_name=after.removeprefix('""'),
    )


def dependent_on_others(encoded: Sequence[EncodedRun], runs: Sequence[AnalyzedRun]) -> list[EncodedRun]:
    """Encoded runs whose results other logs change: copies, and if ``runs`` need the catalogue, all that it names."""
    digests = Counter([*(run.digest for run in encoded), *(run.outcome.digest for run in runs)])
    of_catalogue = needs_catalogue(runs)
    return [run for run in encoded if (run.digest and digests[run.digest] > 1) or (of_catalogue and run.is_named)]


def parse_text(report: ParseReport) -> str:
    """The JSON document, whose results may be written already."""
    items = {run.log_path: _as_item(_result(run, report.name(run))) for run in report.runs}
    items |= {run.log_path: _named(run, report.names[run.log_path]) for run in report.encoded}
    sorted_items = [items[path] for path in sorted(items, key=lambda path: path.parts)]
    results = f'"results": [{_RESULT_START}{f",{_RESULT_START}".join(sorted_items)}\n  ]' if items else _NO_RESULTS
    return json_text(_document(report, [])).replace(_NO_RESULTS, results, 1) + "\n"


def parse_document(
    report: ParseReport, groups: list[dict[str, Any]] | None = None, scaling: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The JSON document of runs of which none is encoded; see ``_document``."""
    runs = sorted(report.runs, key=lambda run: run.log_path.parts)
    return _document(report, [_result(run, report.name(run)) for run in runs], groups, scaling)


def _document(
    report: ParseReport,
    results: list[dict[str, Any]],
    groups: list[dict[str, Any]] | None = None,
    scaling: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """An unknown value is null, and so are ``groups`` and ``scaling`` unless they are wanted."""
    return {
        "analysis": {
            "directories": list(report.directories),
            "window_rule": report.rule,
            "files": report.files,
        },
        "results": results,
        "groups": groups,
        "scaling": scaling,
        "summary": report.counts | {"files": report.files},
    }


def _as_item(result: dict[str, Any]) -> str:
    return json_text(result).replace("\n", _RESULT_START)


def _named(run: EncodedRun, name: str) -> str:
    return f"{run.before_name}{json_text(name)}{run.after_name}"


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
