# SPDX-License-Identifier: Apache-2.0
"""Results as JUnit XML for CI systems. Undecided cases are skipped, with the reason, and never pass.

The format is described at https://github.com/testmoapp/junitxml.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from xml.etree import ElementTree

from llmb.base.errors import EnvironmentProblem
from llmb.nodes.doctor.check_records import ANSWER, NodeReport
from llmb.runs.folder import write_atomically
from llmb.runs.result import VerdictName

if TYPE_CHECKING:  # no command needs all of these
    from llmb.jobs.campaigns.campaign import Campaign
    from llmb.jobs.job import Job
    from llmb.launch.programs.conclude import EndedRun
    from llmb.runs.analyzed_run import ExcludedRun
    from llmb.verdict.compare_runs import Comparison
    from llmb.verdict.judge_run import Judged

Outcome = Literal["pass", "failure", "error", "skipped"]
NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, such as those that color text on terminals."""
VERDICTS: dict[VerdictName, Outcome] = {
    "pass": "pass",
    "improved": "pass",
    "regressed": "failure",
    "invalid": "error",
    "inconclusive": "skipped",
    "not comparable": "skipped",
}
"""Outcomes by verdict."""
RUN_OUTCOMES: dict[str, Outcome] = {"success": "pass", "failed": "failure"}
"""Outcomes by status of a run; any other status is an error."""


class JunitCase(NamedTuple):
    group: str
    """The first part of the case's name, such as a node, a recipe or a job."""
    name: str
    outcome: Outcome
    text: str = ""
    """The reason why the case did not pass, or details."""
    seconds: float | None = None


def write_junit(path: Path | None, suite: str, cases: Callable[[], Iterable[JunitCase]]) -> None:
    """Write the file, unless ``path`` is None. Raise EnvironmentProblem if it cannot be written."""
    if path is None:
        return
    try:
        write_atomically(path, junit_text(suite, list(cases())))
    except OSError as error:
        do = "set --junit to a file in a writable folder"
        raise EnvironmentProblem(f"cannot write the JUnit file: {error.strerror}", where=str(path), do=do) from error


def junit_text(suite: str, cases: Sequence[JunitCase]) -> str:
    counts = Counter(case.outcome for case in cases)
    numbers = {"tests": len(cases), "failures": counts["failure"], "errors": counts["error"]}
    numbers["skipped"] = counts["skipped"]
    attributes = {"name": f"llmb {suite}", **{name: str(number) for name, number in numbers.items()}}
    root = ElementTree.Element("testsuites", attributes)
    below = ElementTree.SubElement(root, "testsuite", attributes)
    for case in cases:
        _add(below, suite, case)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(below: ElementTree.Element, suite: str, case: JunitCase) -> None:
    # Dots in a class name separate packages, and names of recipes and nodes contain dots.
    name = _shown(f"{case.group}: {case.name}")
    element = ElementTree.SubElement(below, "testcase", {"classname": f"llmb.{suite}", "name": name})
    if case.seconds is not None:
        element.set("time", f"{case.seconds:.3f}")
    if case.outcome == "pass":
        if case.text:
            ElementTree.SubElement(element, "system-out").text = _shown(case.text)
        return
    ElementTree.SubElement(element, case.outcome, {"message": _shown(case.text)})


def _shown(text: str) -> str:
    return NOT_XML.sub("�", text)


def node_cases(reports: Iterable[NodeReport]) -> Iterator[JunitCase]:
    """Yield one case per check of each node. Warnings pass with their text, or are skipped if a node did not answer."""
    for report in reports:
        for check in report.checks:
            found = "; ".join(filter(None, ("" if check.value is None else str(check.value), check.advice)))
            if check.status == "warn" and check.name == ANSWER:
                yield JunitCase(report.node, check.name, "skipped", found)
            else:
                outcome: Outcome = "failure" if check.status == "fail" else "pass"
                warning = "warning: " if check.status == "warn" else ""
                yield JunitCase(report.node, check.name, outcome, f"{warning}{found}")
        yield from (JunitCase(report.node, one.name, "skipped", one.reason) for one in report.not_checked)


def verdict_cases(judged: "Iterable[Judged]", left_out: "Iterable[ExcludedRun]") -> Iterator[JunitCase]:
    for one in judged:
        ids = ", ".join(run.id for run in one.runs) or "no run"
        yield JunitCase(one.title, ids, VERDICTS[one.verdict.verdict], one.verdict.sentence)
    yield from (JunitCase("left out", one.run, "skipped", one.reason) for one in left_out)


def comparison_cases(comparison: "Comparison") -> Iterator[JunitCase]:
    """Yield one case per recipe and excluded run. A recipe with only flawed runs after the change is an error."""
    for row in comparison.rows:
        change = "" if row.delta_pct is None else f"{row.delta_pct:+.2f} % step time"
        if row.ci95_pct:
            change += " ({:+.2f} to {:+.2f} %)".format(*row.ci95_pct)
        text = "; ".join(filter(None, (row.verdict, change, f"tolerance {row.tolerance_pct:g} %", row.reason)))
        yield JunitCase(row.recipe, "step time", VERDICTS[row.verdict], text)
    for one in comparison.unmatched:
        outcome: Outcome = "error" if one.side == "before" and one.reason else "skipped"
        yield JunitCase(one.recipe, "step time", outcome, one.reason or f"it was run {one.side} only")
    yield from (JunitCase(f"left out {one.side}", one.run, "skipped", one.reason) for one in comparison.left_out)


def job_cases(jobs: "Iterable[Job]") -> Iterator[JunitCase]:
    for job in jobs:
        name = job.subject or f"{job.workload} {job.size} {job.dtype} on {job.scale} x {job.gpu_type}"
        outcome = RUN_OUTCOMES.get(job.status, "error")
        took = job.ended_s - job.started_s if job.started_s and job.ended_s else None
        text = "" if outcome == "pass" else f"{job.status}: {job.reason or job.state}"
        yield JunitCase(f"{job.kind} {job.job_id or job.key}", name, outcome, text, took)


def run_cases(recipes: "Iterable[Iterable[EndedRun]]", left_out: Iterable[str]) -> Iterator[JunitCase]:
    """Yield one case per run on this machine, and one per line about jobs that cannot run."""
    for run in chain.from_iterable(recipes):
        outcome, result = RUN_OUTCOMES.get(run.result.status, "error"), run.result
        text = "" if outcome == "pass" else f"{result.status}: {result.reason}"
        yield JunitCase(f"run {run.record.id}", run.plan.recipe.title(), outcome, text)
    yield from (JunitCase("left out", line, "skipped", line) for line in left_out)


def campaign_cases(campaign: "Campaign", left_out: Iterable[str]) -> Iterator[JunitCase]:
    outcomes: dict[str, Outcome] = {"submitted": "pass", "refused": "failure"}
    for job in campaign.jobs:
        asked = job.wanted.request
        name = f"{job.key or job.where} {asked.workload} {asked.size} {asked.dtype} on {asked.scale} x {asked.gpu_type}"
        texts = {"submitted": f"job {job.job_id}", "refused": job.reason or "refused"}
        text = texts.get(job.state, f"not queued: {job.state}")
        yield JunitCase("jobs", name, outcomes.get(job.state, "skipped"), text)
    for line in left_out:
        yield JunitCase("left out", line.partition(": ")[2] or line, "skipped", line)
