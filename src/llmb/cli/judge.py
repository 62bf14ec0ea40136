# SPDX-License-Identifier: Apache-2.0
"""``llmb judge``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.analyzed_run import AnalyzedRun, LeftOut
from llmb.analysis.explain_run import explain_judged
from llmb.analysis.find_runs import find_all_runs
from llmb.analysis.judge_run import Against, Judged, judge_acceptance, judge_runs
from llmb.analysis.write_expectations import write_expectations
from llmb.cli.completion import gpu_types
from llmb.cli.completion import runs as complete_runs
from llmb.cli.options import Json
from llmb.cli.root import install_here, say
from llmb.errors import InvalidRun, NoVerdict, Regressed, UsageError
from llmb.report.output import print_json, print_table, print_tables
from llmb.report.verdict_report import (
    acceptance_table,
    judge_document,
    left_out_lines,
    verdict_tables,
)
from llmb.verdict.acceptance import AcceptanceSet, find_acceptance_set
from llmb.verdict.causes import Explanation
from llmb.verdict.records import worst
from llmb.verdict.tolerance import given_tolerance

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_runs,
        help="Run folder, folder of runs or logs, log, label, campaign, id of a job or run, 'latest', date(s).",
    ),
]
AgainstRuns = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="RUNS",
        help="Judge against these runs, named as RUN is. Default: against the published figure.",
        show_default=False,
    ),
]
Expect = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Judge against the step times of this YAML file.", show_default=False),
]
WriteExpectations = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Judge nothing; write a new file for --expect from RUN.", show_default=False),
]
GpuType = Annotated[
    str | None,
    typer.Option(
        "--gpu-type",
        autocompletion=gpu_types,
        help="GPU type of logs that do not report it, for their published figure.",
        show_default=False,
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="SET",
        help="Judge every recipe of this acceptance set by its runs among RUN: h100, h100-128, h100-node, b200, gb200.",
        show_default=False,
    ),
]
MaxSlowdown = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="PCT",
        help="How much slower than the reference a run may be, in percent. Default: by the kind of reference.",
        show_default=False,
    ),
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Also rank the causes of the step time, with the command that confirms each."),
]


@app.command()
def judge(
    runs: Runs,
    against: AgainstRuns = None,
    expect: Expect = None,
    write_expectations: WriteExpectations = None,
    acceptance: Acceptance = None,
    tolerance: MaxSlowdown = None,
    gpu_type: GpuType = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Say whether runs are as fast as they should be, and what differs from what they are compared with.

    Against a published figure or an expectation, each run has a verdict of its own; with --against, repeats are judged
    together, because the next run may have other nodes and other temperatures. Exit codes: 0 every verdict is 'pass' or
    'improved', 5 one is 'regressed', 6 none of these and one is 'inconclusive', 'not comparable' or 'invalid'.

    Examples:

    - `llmb judge latest`

    - `llmb judge new-driver --against old-driver`

    - `llmb judge latest --explain`

    - `llmb judge results --expect expected.yaml --json`

    - `llmb judge acceptance-campaign --acceptance h100`
    """
    limit = given_tolerance(tolerance, "--tolerance")
    _check_options(against, expect, write_expectations, acceptance, tolerance)
    if explain and (acceptance or write_expectations):
        raise UsageError("--explain is for verdicts on runs", do="leave it out, or judge the runs by themselves")
    install = install_here()
    selected = find_all_runs(runs, install, say)
    found, left_out = selected.runs, selected.left_out
    if not found:
        lines = "\n".join(f"  {line}" for line in left_out_lines(left_out))
        raise UsageError(f"no run to judge in {selected.title}\n{lines}".rstrip(), do="'llmb runs' shows all")
    if write_expectations:
        _write(write_expectations, found)
        return
    if acceptance:
        acceptance_set = find_acceptance_set(acceptance)
        judged = judge_acceptance(acceptance_set, found)
        _print_acceptance(acceptance_set, judged, left_out, json=json)
    else:
        reference = Against(runs=against, expectations=expect, tolerance=limit, gpu_type=gpu_type)
        judged = judge_runs(found, reference, install, say)
        explanations = [explain_judged(one) for one in judged] if explain else []
        _print(judged, left_out, explanations, json=json)
    _raise_unless_passed(judged, published=not (against or expect or acceptance))


def _check_options(
    against: str | None,
    expect: Path | None,
    write_expectations: Path | None,
    acceptance: str | None,
    tolerance: float | None,
) -> None:
    """Raises UsageError."""
    given = {
        "--against": against,
        "--expect": expect,
        "--write-expectations": write_expectations,
        "--acceptance": acceptance,
    }
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise UsageError(f"{' and '.join(several)} cannot be combined", do="give one of them")
    if tolerance is not None and (acceptance or write_expectations):
        raise UsageError(f"--tolerance has no effect with {several[0]}", do="leave it out")


def _write(path: Path, found: Sequence[AnalyzedRun]) -> None:
    count = write_expectations(path, found)
    say(f"{count} {'entry' if count == 1 else 'entries'} written to {path}")


def _print(
    judged: Sequence[Judged], left_out: Sequence[LeftOut], explanations: Sequence[Explanation | None], *, json: bool
) -> None:
    if json:
        print_json(judge_document(judged, left_out, explanations))
        return
    print_tables(verdict_tables(judged, explanations))
    for line in left_out_lines(left_out):
        say(line)


def _print_acceptance(
    acceptance_set: AcceptanceSet, judged: Sequence[Judged], left_out: Sequence[LeftOut], *, json: bool
) -> None:
    if json:
        print_json(judge_document(judged, left_out, acceptance=acceptance_set))
        return
    print_table(acceptance_table(acceptance_set, judged))
    for line in left_out_lines(left_out):
        say(line)


def _raise_unless_passed(judged: Sequence[Judged], *, published: bool) -> None:
    """Raises Regressed, NoVerdict or InvalidRun; ``published``: nothing but published figures was asked for."""
    verdict = worst(one.verdict for one in judged)
    if verdict in ("pass", "improved"):
        return
    count = sum(one.verdict.verdict == verdict for one in judged)
    what = f"{verdict}, {count} of {len(judged)}" if len(judged) > 1 else verdict
    no_figure = any(one.verdict.verdict == "not comparable" and one.verdict.reference is None for one in judged)
    logs = any(run.record is None for one in judged for run in one.runs)
    do = f"give --against or --expect{', or --gpu-type for logs' if logs else ''}" if published and no_figure else None
    raise {"regressed": Regressed, "invalid": InvalidRun}.get(verdict, NoVerdict)(what, do=do)
