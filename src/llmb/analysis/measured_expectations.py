# SPDX-License-Identifier: Apache-2.0
"""Measured runs as a file of expectations, which those that come after them are judged by."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import yaml

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of, grouped
from llmb.analysis.judge_run import measured_run, times_of
from llmb.errors import EnvironmentProblem, UsageError, see
from llmb.resources.settings import PREFIXES
from llmb.runs.folder import write_atomically
from llmb.verdict.conditions import merged, rule_of
from llmb.verdict.expectations_file import ExpectedLayout, ExpectedStepTime

RECIPE = ("workload", "size", "dtype", "gpu_type", "program", "data")
DIGITS, LINE = 6, 120
HEADER = """\
# Step times that runs are judged by: llmb judge RUN --expect THIS-FILE
# A run is judged by the entry that names most of its recipe. 'tolerance_pct' (here, or in an entry) is how much slower
# it may be, in percent; 'conditions' select nothing: a verdict says which of them differ.
"""


def write_expectations(path: Path, runs: Iterable[AnalyzedRun]) -> int:
    """Writes a new file with an entry for each group of repeats; returns their number.

    Raises UsageError if the file exists, or if the recipe of a run is not known; EnvironmentProblem if it cannot be
    written.
    """
    if path.exists():
        raise UsageError("the file already exists", where=str(path), do="name another file, or remove it")
    entries = [_entry(group) for group in grouped(run for run in runs if flaw_of(run) is None)]
    if not entries:
        raise UsageError("none of these runs is a measurement", do="'llmb judge' without this option says why")
    try:
        write_atomically(path, _expectations_text(entries))
    except OSError as error:
        do = "name another file"
        raise EnvironmentProblem(f"cannot write it: {error.strerror}", where=str(path), do=do) from error
    return len(entries)


def _expectations_text(entries: Sequence[ExpectedStepTime]) -> str:
    listed = [entry.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for entry in entries]
    file = {"expectations": listed}
    return HEADER + yaml.safe_dump(file, sort_keys=False, default_flow_style=None, allow_unicode=True, width=LINE)


def _entry(group: Sequence[AnalyzedRun]) -> ExpectedStepTime:
    values = merged(measured_run(run).conditions for run in group)
    if "workload" not in values:
        do = f"write the entry by hand; {see('judge-a-run')}"
        raise UsageError(
            "a log without the record of its run does not tell its recipe", where=str(group[0].path), do=do
        )
    times = times_of(group)
    assert times, "runs without statistics are left out before"
    sizes = {name: values[f"layout.{name}"] for name in ExpectedLayout.model_fields if f"layout.{name}" in values}
    recipe = {name: values[name] for name in RECIPE if name in values}
    used = {*RECIPE, "window", "steps", "layout.gpus", *(f"layout.{name}" for name in sizes)}
    nodes = sorted({node for run in group for node in run.nodes})
    return ExpectedStepTime(
        **recipe,
        scale=int(values["layout.gpus"]) if "layout.gpus" in values else None,
        layout=ExpectedLayout(**{name: int(size) for name, size in sizes.items()}),
        step_time_s=_rounded(times.mean),
        step_time_s_ci95=times.ci95 and (_rounded(times.ci95[0]), _rounded(times.ci95[1])),
        window=values.get("window"),
        runs=len(group),
        source=_source(group),
        conditions={
            **{key: value for key, value in sorted(values.items()) if key not in used and _matters(key)},
            **({"nodes": ", ".join(nodes)} if nodes else {}),
        },
    )


def _rounded(seconds: float) -> float:
    """As precise as a step time is."""
    return float(f"{seconds:.{DIGITS}g}")


def _matters(key: str) -> bool:
    """Settings of nodes are too many for a file that is read and edited; the run's record has them."""
    return rule_of(key).differs != "ignored" and not key.startswith(PREFIXES)


def _source(group: Sequence[AnalyzedRun]) -> str:
    started = [run.started_s for run in group if run.started_s is not None]
    day = f" {datetime.fromtimestamp(max(started)).date().isoformat()}" if started else ""
    return f"measured{day}: {', '.join(run.id for run in group)}"
