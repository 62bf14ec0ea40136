# SPDX-License-Identifier: Apache-2.0
"""A sample of the JSON document of verdicts."""

from pathlib import Path
from typing import Any

from llmb.reports.verdict_report import judge_document
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun
from llmb.runs.conditions import RunIdentity
from llmb.verdict.judge_run import Judged
from llmb.verdict.judgement import without_reference


def sample_judgement() -> dict[str, Any]:
    run = AnalyzedRun(id="", path=Path("run"), identity=RunIdentity(configuration={}), status="success")
    verdict = without_reference("not comparable", "")
    return judge_document([Judged("", (run,), verdict)], [ExcludedRun("", "")])
