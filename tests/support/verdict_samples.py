# SPDX-License-Identifier: Apache-2.0
"""Samples of runs that are judged, and of the JSON document of verdicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmb.base.statistics import describe
from llmb.reports.verdict_report import judge_document
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun
from llmb.runs.conditions import RunIdentity
from llmb.verdict.judge_run import Judged
from llmb.verdict.judgement import without_reference


def run_with_times(times_s: Sequence[float], flaw: str | None = None, **fields: Any) -> AnalyzedRun:
    known = {
        "id": "1",
        "path": Path("run"),
        "identity": RunIdentity(configuration={"layout.gpus": 8}),
        "status": "success",
    }
    return AnalyzedRun(**known, reason=flaw, step_time_s=describe(times_s) if times_s else None, **fields)


def sample_judgement() -> dict[str, Any]:
    verdict = without_reference("not comparable", "")
    return judge_document([Judged("", (run_with_times([]),), verdict)], [ExcludedRun("", "")])
