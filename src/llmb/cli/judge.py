# SPDX-License-Identifier: Apache-2.0
"""``llmb judge``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.analyzed_run import LeftOut
from llmb.analysis.explain_run import explain_judged
from llmb.analysis.find_runs import find_all_runs, in_window
from llmb.analysis.judge_run import Against, Judged, is_pretended, judge_acceptance, judge_runs
from llmb.analysis.measured_expectations import write_expectations
from llmb.cli.common import Json, Junit
from llmb.cli.completion import gpu_types
from llmb.cli.completion import runs as complete_runs
from llmb.cli.root import install_here, say
from llmb.errors import NoVerdict, Regressed, UsageError
from llmb.metrics.window import check_rule
from llmb.report.junit import verdict_cases, write_junit
from llmb.report.output import print_output
from llmb.report.verdict_report import (
    acceptance_table,
    judge_document,
    left_out_lines,
    verdict_tables,
)
from llmb.verdict.conditions import worst
from llmb.verdict.expectations_file import find_acceptance_set
from llmb.verdict.judgement import given_tolerance

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_runs,
        help="Run folder, folder of runs or logs, log, archive, label, campaign, id, 'latest', date(s).",
    ),
]
AgainstRuns = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="RUNS",
        help="Judge against these runs, named as RUN is. Default: against the published figure.",
    ),
]
Expect = Annotated[Path | None, typer.Option(metavar="FILE", help="Judge against the step times of this YAML file.")]
WriteExpectations = Annotated[
    Path | None,
    typer.Option("--write-expectations", metavar="FILE", help="Judge nothing; write a new file for --expect from RUN."),
]
GpuType = Annotated[
    str | None,
    typer.Option(
        "--gpu-type",
        autocompletion=gpu_types,
        help="GPU type of logs that do not report it, for their published figure.",
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="SET",
        help="Judge every recipe of this acceptance set by its runs among RUN: h100, h100-128, h100-node, b200, gb200.",
    ),
]
MaxSlowdown = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="PCT",
        help="How much slower than the reference a run may be, in percent. Default: by the kind of reference.",
    ),
]
WindowRule = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="Steps to average: last, all, auto, reference or A-B. Default: a run's own, and of a reference document's "
        "log those that the document takes.",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Also rank the causes of the step time, with the command that confirms each.")
]
Bisect = Annotated[bool, typer.Option("--bisect", help="Exit with the codes of 'git bisect run', see above.")]
BAD, SKIP = 1, 125
"""Exit codes by which ``git bisect run`` knows a bad commit, and one that cannot be judged."""


@app.command()
def judge(
    runs: Runs,
    against: AgainstRuns = None,
    expect: Expect = None,
    expectations_file: WriteExpectations = None,
    acceptance: Acceptance = None,
    tolerance: MaxSlowdown = None,
    gpu_type: GpuType = None,
    window: WindowRule = None,
    explain: Explain = False,
    bisect: Bisect = False,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Say whether runs are as fast as they should be, and what differs from what they are compared with.

    Against a published figure or an expectation, each run has a verdict of its own; with --against, repeats are judged
    together, because the next run may have other nodes and other temperatures. Exit codes: 0 every verdict is 'pass' or
    'improved', 5 one is 'regressed', 6 none of these and one is 'inconclusive', 'not comparable' or 'invalid'. With
    --bisect, 1 replaces 5 and 125 replaces 6.

    Examples:

    - `llmb judge latest`

    - `llmb judge new-driver --against old-driver`

    - `llmb judge latest --explain`

    - `llmb judge latest --against week-45 --bisect`

    - `llmb judge results --expect expected.yaml --json --junit verdicts.xml`

    - `llmb judge acceptance-campaign --acceptance h100`
    """
    limit = given_tolerance(tolerance, "--tolerance")
    alone = {"--write-expectations": expectations_file, "--acceptance": acceptance}
    if window is not None:
        check_rule(window)
    _check_options({"--against": against, "--expect": expect}, alone, tolerance, explain=explain, bisect=bisect)
    install = install_here()
    selected = find_all_runs(runs, install, say)
    found, left_out = in_window(selected.runs, window), selected.left_out
    if not found:
        raise _no_run(selected.title, left_out)
    if expectations_file:
        count = write_expectations(expectations_file, found)
        say(f"{count} {'entry' if count == 1 else 'entries'} written to {expectations_file}")
        return
    accepted = find_acceptance_set(acceptance) if acceptance else None
    if accepted:
        judged = judge_acceptance(accepted, found)
    else:
        reference = Against(runs=against, expectations=expect, tolerance=limit, gpu_type=gpu_type, window=window)
        judged = judge_runs(found, reference, install, say)
    explanations = [explain_judged(one) for one in judged] if explain else []
    write_junit(junit, "judge", lambda: verdict_cases(judged, left_out))
    if json:
        print_output(judge_document(judged, left_out, explanations, accepted))
    else:
        print_output(acceptance_table(accepted, judged) if accepted else verdict_tables(judged, explanations))
        for line in left_out_lines(left_out):
            say(line)
    _raise_unless_passed(judged, published=not (against or expect or acceptance), bisect=bisect)


def _no_run(title: str, left_out: Sequence[LeftOut]) -> UsageError:
    lines = "\n".join(f"  {line}" for line in left_out_lines(left_out))
    return UsageError(f"no run to judge in {title}\n{lines}".rstrip(), do="'llmb runs' shows all")


def _check_options(
    references: Mapping[str, object],
    alone: Mapping[str, object],
    tolerance: float | None,
    *,
    explain: bool,
    bisect: bool,
) -> None:
    """Values by option; those of ``alone`` take no tolerance and are not explained. Raises UsageError."""
    given = [name for name, value in {**references, **alone}.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined", do="give one of them")
    if tolerance is not None and any(name in alone for name in given):
        raise UsageError(f"--tolerance has no effect with {given[0]}", do="leave it out")
    if bisect and "--write-expectations" in given:
        raise UsageError("--bisect is for verdicts, and --write-expectations gives none", do="leave it out")
    if explain and any(name in alone for name in given):
        raise UsageError("--explain is for verdicts on runs", do="leave it out, or judge the runs by themselves")


def _raise_unless_passed(judged: Sequence[Judged], *, published: bool, bisect: bool) -> None:
    """Raises Regressed or NoVerdict; ``published``: nothing but published figures was asked for."""
    verdict = worst(one.verdict for one in judged)
    if verdict in ("pass", "improved"):
        return
    count = sum(one.verdict.verdict == verdict for one in judged)
    what = f"{verdict}, {count} of {len(judged)}" if len(judged) > 1 else verdict
    no_figure = any(
        one.verdict.verdict == "not comparable"
        and one.verdict.reference is None
        and not any(map(is_pretended, one.runs))
        for one in judged
    )
    logs = any(run.record is None for one in judged for run in one.runs)
    do = f"give --against or --expect{', or --gpu-type for logs' if logs else ''}" if published and no_figure else None
    error = Regressed(what, do=do) if verdict == "regressed" else NoVerdict(what, do=do)
    if bisect:
        error.exit_code = BAD if verdict == "regressed" else SKIP
    raise error
