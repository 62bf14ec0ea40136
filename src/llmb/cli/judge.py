# SPDX-License-Identifier: Apache-2.0
"""``llmb judge`` and ``llmb compare``: judge runs, and compare groups of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmb.base.errors import NoVerdict, Regressed, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.window import check_rule
from llmb.cli.common import Json, Junit, is_verbose
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import complete_run, log_options, takes
from llmb.jobs.find_runs import earlier_runs, find_all_runs, find_sides, in_window
from llmb.jobs.judge_runs import Against, judge_runs
from llmb.reports.junit import comparison_cases, verdict_cases, write_junit
from llmb.reports.output import print_output
from llmb.reports.verdict_report import (
    acceptance_table,
    compare_csv,
    compare_markdown,
    compare_tables,
    judge_document,
    left_out_lines,
    verdict_tables,
)
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun
from llmb.runs.result import worst
from llmb.verdict.catalogue_figures import with_stated
from llmb.verdict.compare_runs import Comparison, compare_runs
from llmb.verdict.expectations_file import ExpectationEntry, Expectations, ExpectedStepTime, find_acceptance_set
from llmb.verdict.explain_run import explain_judged
from llmb.verdict.judge_run import Judged, is_pretended, judge_acceptance, write_expectations
from llmb.verdict.judgement import tolerance_of

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_run,
        help="Run folder, folder of runs or logs, log, archive, label, campaign, id, 'latest' or dates.",
    ),
]
BAD, SKIP = 1, 125
"""Exit codes of ``git bisect run`` for a bad commit, and for a commit that cannot be judged."""


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """Options for the reference of runs, the tolerance and the window."""

    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUNS",
            autocompletion=complete_run,
            help="Judge against these runs. Default: the published figure, else earlier runs, else a prediction.",
        ),
    ] = None
    expect: Annotated[
        str | None,
        typer.Option(metavar="FILE|S", help="Judge against the step times in this YAML file, or against S seconds."),
    ] = None
    write_expectations: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the step times of RUN to a new file for --expect, and judge nothing."),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="SET",
            help="Judge each recipe of this acceptance set by its runs in RUN. Sets: h100, h100-128, h100-node, b200,"
            " gb200.",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            help="Percent by which a run may be slower. Default: the value in the --expect file; 5.3 for a published "
            "figure; 1 for runs on the same nodes; a prediction's 95 % interval; else 3.",
        ),
    ] = None
    window: Annotated[
        str | None,
        typer.Option(
            help="Steps to average: last, auto, reference, A-B or, for logs, all. Default: the run's own window; for a"
            " log, its document's, or from 70 % to 90 % of the run."
        ),
    ] = None

    def options(self, *, explain: bool, bisect: bool) -> Against:
        """Return the reference; raise UsageError for options that are invalid or cannot be combined."""
        limit = tolerance_of(self.tolerance, "--tolerance")
        alone = {"--write-expectations": self.write_expectations, "--acceptance": self.acceptance}
        chosen: dict[str, object] = {"--against": self.against, "--expect": self.expect, **alone}
        given = [name for name, value in chosen.items() if value is not None]
        if self.window is not None:
            check_rule(self.window)
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} cannot be combined", do="pass only one")
        if self.tolerance is not None and any(name in alone for name in given):
            raise UsageError(f"--tolerance has no effect with {given[0]}", do="omit --tolerance")
        if bisect and self.write_expectations:
            raise UsageError("--bisect needs a verdict, but --write-expectations gives none", do="pass only one")
        if explain and any(name in alone for name in given):
            raise UsageError(f"--explain cannot be combined with {given[0]}", do="pass only one")
        return Against(runs=self.against, expectations=_expected(self.expect), tolerance=limit, window=self.window)


def _expected(text: str | None) -> Path | Expectations | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None if text is None else Path(text)
    if not 0 < seconds < inf:
        raise UsageError(f"--expect {text} is not a step time", do="pass seconds above 0, or a file")
    entry = ExpectedStepTime(step_time_s=seconds, source="given")
    return Expectations(Path("--expect"), None, (ExpectationEntry(entry, f"--expect {text}"),))


@app.command()
@takes(ReferenceOptions, log_options())
def judge(
    reference: ReferenceOptions,
    logs: dict[str, Any],
    runs: Runs,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also rank the causes of the step time, with commands that confirm them.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Exit with the codes that 'git bisect run' expects.")
    ] = False,
    junit: Junit = None,
    json: Json = False,
    *,
    ctx: typer.Context,
) -> None:
    """Judge whether runs are as fast as they should be, and show how they differ from their reference.

    Each run has its own verdict against a published figure or an expectation. With --against, repeats are judged
    together, because nodes and temperatures differ from run to run. Several verdicts are summarized in one row per
    recipe; -v shows each. Exit codes: 0 every verdict is 'pass' or 'improved'; 5 the worst is 'regressed'; 6 the worst
    is 'inconclusive', 'not comparable' or 'invalid'. With --bisect, 1 replaces 5 and 125 replaces 6.

    Examples:

    - `llmb judge latest`

    - `llmb judge new-driver --against old-driver`

    - `llmb judge latest --expect 1.2`: 1.2 s a step

    - `llmb judge train.log -w pretrain_llama3.1 -s 8b --dtype bf16 --gpu-type h100`

    - `llmb judge latest --explain`

    - `llmb judge latest --against week-45 --bisect`

    - `llmb judge results --expect expected.yaml --json --junit verdicts.xml`

    - `llmb judge acceptance-campaign --acceptance h100`
    """
    against, install = replace(reference.options(explain=explain, bisect=bisect), logs=logs), install_here()
    found, left_out = _runs_to_judge(runs, install, reference.window, logs)
    if path := reference.write_expectations:
        count = write_expectations(path, found)
        say(f"{count} {'entry' if count == 1 else 'entries'} written to {path}")
        return
    accepted = find_acceptance_set(reference.acceptance) if reference.acceptance else None
    judged = judge_acceptance(accepted, found) if accepted else judge_runs(found, against, install, say)
    explanations = [explain_judged(one) for one in judged] if explain else []
    write_junit(junit, "judge", lambda: verdict_cases(judged, left_out))
    if json:
        print_output(judge_document(judged, left_out, explanations, accepted))
    else:
        tables = verdict_tables(judged, explanations, verbose=is_verbose(ctx))
        print_output(acceptance_table(accepted, judged) if accepted else tables)
        say(*left_out_lines(left_out))
    published = not (reference.against or reference.expect or reference.acceptance)
    _raise_unless_passed(judged, published=published, bisect=bisect)


def _runs_to_judge(
    runs: list[str] | None, install: Path, window: str | None, logs: dict[str, Any]
) -> tuple[Sequence[AnalyzedRun], Sequence[ExcludedRun]]:
    selected = find_all_runs(runs, install, say)
    found = with_stated(in_window(selected.runs, window), logs, Catalogue())
    if not found:
        lines = "\n".join(f"  {line}" for line in left_out_lines(selected.left_out))
        raise UsageError(f"no run to judge in {selected.title}\n{lines}".rstrip(), do="see 'llmb runs' for all runs")
    return found, selected.left_out


def _raise_unless_passed(judged: Sequence[Judged], *, published: bool, bisect: bool) -> None:
    """``published`` is True if no reference was requested."""
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
    of_logs = ", or describe the logs: -w -s --dtype --scale --gpu-type" if logs else ""
    do = f"add --against or --expect{of_logs}" if published and no_figure else None
    error = Regressed(what, do=do) if verdict == "regressed" else NoVerdict(what, do=do)
    if bisect:
        error.exit_code = BAD if verdict == "regressed" else SKIP
    raise error


Vary = Annotated[
    list[str] | None,
    typer.Option(
        help="What may differ between the sides of a row: dtype, scale, layout, release, program, gpu-type or a key of "
        "the configuration, or several separated by commas. Repeatable."
    ),
]


def _side(name: str, text: str) -> Any:  # noqa: ANN401 (what typer makes)
    return typer.Argument(metavar=name, autocompletion=complete_run, help=text)


@app.command()
def compare(
    before: Annotated[str, _side("BEFORE", "Folder, log, archive, label, campaign, id, 'latest' or dates.")],
    after: Annotated[
        str | None, _side("AFTER", "Runs to compare with BEFORE. Default: compare groups within BEFORE, see --vary.")
    ] = None,
    vary: Vary = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Percent by which AFTER may be slower. Default: 1 on the same nodes, else 3; 10 for --vary scale."
        ),
    ] = None,
    form: Annotated[
        Literal["table", "markdown", "csv", "json"], typer.Option("--format", help="Output format.")
    ] = "table",
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Compare two groups of runs, recipe by recipe: do their step times differ by more than noise?

    Runs are repeats of each other if their records have the same configuration, regardless of their names. A row has
    the medians of the runs' means, the change with its 95 % interval, the noise between repeats, and the verdict. The
    table is followed by the differences between the records, and the runs that were left out. If the work of a step
    differs between the sides, throughput per GPU is compared.

    Exit codes: 0 no row is slower, 5 a row regressed, 6 a row is inconclusive or not comparable.

    Examples:

    - `llmb compare driver-570 driver-575`: runs by the labels that `llmb run --label` gave them

    - `llmb compare 2026-11-01..2026-11-07 2026-11-08 --tolerance 2`

    - `llmb compare results/before results/after --format markdown`

    - `llmb compare my-campaign --vary dtype`: the speed-up of fp8 over bf16

    - `llmb compare my-campaign --vary scale`: weak and strong scaling

    - `llmb compare engines.json --vary program`: engine with engine
    """
    limit = tolerance_of(tolerance, "--tolerance")
    names = tuple(name.strip() for text in vary or () for name in text.split(",") if name.strip())
    install = install_here()
    sides = find_sides(before, after, install, say)
    if empty := [side.title for side in sides if side and not (side.runs or side.left_out)]:
        raise UsageError(f"there are no runs in {' and '.join(empty)}", do="see 'llmb runs' for all runs")
    earlier = earlier_runs(install, say)
    comparison = compare_runs(*sides, vary=names, tolerance_pct=limit and limit.pct, earlier=earlier)
    write_junit(junit, "compare", lambda: comparison_cases(comparison))
    if json or form == "json":
        print_output(comparison.model_dump(mode="json"))
    else:
        shown = {"markdown": compare_markdown, "csv": compare_csv}.get(form)
        print_output(shown(comparison) if shown else compare_tables(comparison))
    raise_unless_passed(comparison)


def raise_unless_passed(comparison: Comparison) -> None:
    """Raise Regressed if any row regressed, NoVerdict if the comparison allows no conclusion."""
    slower = [row.recipe for row in comparison.rows if row.verdict == "regressed"]
    if slower:
        raise Regressed(f"{len(slower)} of {len(comparison.rows)} recipes regressed: {'; '.join(slower)}")
    if comparison.verdict in ("pass", "improved"):
        return
    if not comparison.rows:
        both = len({one.side for one in comparison.unmatched}) > 1
        do = "pass --vary KEY to allow a difference; the table shows the recipes of each side" if both else None
        raise NoVerdict("not comparable: no recipe was measured on both sides", do=do)
    open_ = [one.recipe for one in comparison.rows if one.verdict not in ("pass", "improved")]
    open_ += [one.recipe for one in comparison.unmatched if one.side == "before" and one.reason]
    raise NoVerdict(f"{comparison.verdict}: {'; '.join(open_)}")
