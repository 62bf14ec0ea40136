# SPDX-License-Identifier: Apache-2.0
"""``llmb compare``."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from llmb.analysis.compare_runs import compare_runs
from llmb.analysis.comparison import Comparison
from llmb.analysis.find_runs import earlier_runs, find_sides
from llmb.cli.common import Json, Junit
from llmb.cli.root import install_here, say
from llmb.errors import NoVerdict, Regressed
from llmb.report.compare_report import compare_csv, compare_markdown, compare_tables
from llmb.report.junit import comparison_cases, write_junit
from llmb.report.output import print_output
from llmb.report.table import Table
from llmb.verdict.judgement import given_tolerance

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class CompareFormat(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


Vary = Annotated[
    list[str] | None,
    typer.Option(
        help="What may differ within a row: dtype, scale, layout, release, program, gpu-type, or a key of the"
        " configuration. May be repeated; several are separated by commas."
    ),
]


@app.command()
def compare(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE", help="A folder, a log, an archive, a label, a campaign, an id, 'latest' or dates."
        ),
    ],
    after: Annotated[
        str | None,
        typer.Argument(metavar="AFTER", help="The same. Without it, groups within BEFORE are compared: see --vary."),
    ] = None,
    vary: Vary = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How much slower a candidate may be without being a regression, in percent. "
            "Default: 1 on the same nodes, else 3."
        ),
    ] = None,
    form: Annotated[CompareFormat, typer.Option("--format", help="Output format.")] = CompareFormat.TABLE,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Compare two groups of runs, recipe by recipe: is one faster than the other, beyond their noise?

    Runs are repeats of each other if their records have the same configuration, whatever they are called. A row has the
    medians of the runs' means, the change with its 95 % interval, the noise between repeats, and the verdict. Beneath
    it: what differs in the records, and the runs that were left out. Where a step is not the same work on both sides,
    throughput per GPU is compared.

    Exit codes: 0 no row is slower, 5 a row regressed, 6 a row is inconclusive or not comparable.

    Examples:

    - `llmb compare driver-570 driver-575`: runs by the labels that `llmb run --label` gave them

    - `llmb compare 2026-11-01..2026-11-07 2026-11-08 --tolerance 2`

    - `llmb compare results/before results/after --format markdown`

    - `llmb compare my-campaign --vary dtype`: the speed-up of fp8 over bf16

    - `llmb compare my-campaign --vary scale`: weak and strong scaling

    - `llmb compare engines.json --vary program`: engine with engine
    """
    limit = given_tolerance(tolerance, "--tolerance")
    names = tuple(name.strip() for text in vary or () for name in text.split(",") if name.strip())
    install = install_here()
    sides = find_sides(before, after, install, say)
    earlier = earlier_runs(install, say)
    comparison = compare_runs(*sides, vary=names, tolerance_pct=limit and limit.pct, earlier=earlier)
    write_junit(junit, "compare", lambda: comparison_cases(comparison))
    print_output(_shown(comparison, CompareFormat.JSON if json else form))
    raise_unless_passed(comparison)


def _shown(comparison: Comparison, form: CompareFormat) -> dict[str, Any] | str | list[Table]:
    match form:
        case CompareFormat.TABLE:
            return compare_tables(comparison)
        case CompareFormat.MARKDOWN:
            return compare_markdown(comparison)
        case CompareFormat.CSV:
            return compare_csv(comparison)
        case CompareFormat.JSON:
            return comparison.model_dump(mode="json")


def raise_unless_passed(comparison: Comparison) -> None:
    """Raises Regressed if any row did, NoVerdict if the comparison allows no conclusion."""
    slower = [row.recipe for row in comparison.rows if row.verdict == "regressed"]
    if slower:
        raise Regressed(f"{len(slower)} of {len(comparison.rows)} recipes regressed: {'; '.join(slower)}")
    if comparison.verdict in ("pass", "improved"):
        return
    if not comparison.rows:
        both = len({one.side for one in comparison.unmatched}) > 1
        do = "'--vary KEY' lets what differs differ; the table shows the recipes of each side" if both else None
        raise NoVerdict("not comparable: no recipe was measured on both sides", do=do)
    open_ = [one.recipe for one in comparison.rows if one.verdict not in ("pass", "improved")]
    open_ += [one.recipe for one in comparison.unmatched if one.side == "before" and one.reason]
    raise NoVerdict(f"{comparison.verdict}: {'; '.join(open_)}")
