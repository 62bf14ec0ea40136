# SPDX-License-Identifier: Apache-2.0
"""Verdicts on nodes by their pairs, as tables and as a JSON document."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmb.bench.pairs import NodeVerdict, PairFigures, PairwiseResult
from llmb.report.table import Table, duration, known, result_table
from llmb.shown_text import printable

HostList = Callable[[Sequence[str]], str]
"""Names of nodes as a list in the scheduler's syntax."""
WORDS = {True: "fit", False: "UNFIT", None: "undecided"}
ORDER = (False, None, True)
MOST_FIT = 16
"""Above that fit nodes are only in the list below."""


def pairs_document(result: PairwiseResult, host_list: HostList) -> dict[str, Any]:
    """``fit`` of a node is null if it is undecided. Its keys are a contract."""
    names = [verdict.node for verdict in result.nodes]
    return {
        "started_at": result.started_at,
        "expected_s": result.expected_s,
        "limit_s": result.limit_s,
        "took_s": result.took_s,
        "nodes": [verdict.model_dump(mode="json") for verdict in result.nodes],
        "notes": list(result.notes),
        "fit_nodes": host_list(result.named(fit=True)),
        "unfit_nodes": host_list(result.named(fit=False)),
        "undecided_nodes": host_list(result.named(fit=None)),
        "group": None if result.group is None else _figures(result.group),
        "alone": [{"node": names[one.node], **_figures(one.figures), "problem": one.problem} for one in result.alone],
        "pairs": [
            {
                "nodes": [names[pair.first], names[pair.second]],
                "round": pair.round,
                **_figures(pair.figures),
                "problem": pair.problem,
            }
            for pair in result.pairs
        ],
    }


def _figures(figures: PairFigures) -> dict[str, float | None]:
    return figures.model_dump()


def pairs_tables(result: PairwiseResult, host_list: HostList) -> Iterator[Table]:
    """A row per node, the worst first; then the lists, and what is to be known besides."""
    yield _rows(result)
    yield _lists(result, host_list)


def _rows(result: PairwiseResult) -> Table:
    took = f"{duration(result.took_s)} (expected: {duration(result.expected_s)}, at most {duration(result.limit_s)})"
    table = result_table(f"{len(result.nodes)} nodes alone and in pairs, in {took}", "node", "", "by what")
    table.caption = "\n".join(printable(f"{note}.") for note in _notes(result)) or None
    fit = result.named(fit=True)
    for verdict in sorted(result.nodes, key=lambda one: ORDER.index(one.fit)):
        if not verdict.fit or len(fit) <= MOST_FIT:
            evidence = "\n".join(map(printable, verdict.evidence)) or _own(result, verdict)
            table.add_row(printable(verdict.node), WORDS[verdict.fit], evidence)
    return table


def _notes(result: PairwiseResult) -> Iterator[str]:
    yield from result.notes
    if result.group:
        yield f"All {len(result.named(fit=True))} fit nodes at once: {_text(result.group)}"


def _own(result: PairwiseResult, verdict: NodeVerdict) -> str:
    """What a fit node measured: alone, and the best of its pairs."""
    place = result.nodes.index(verdict)
    alone = next((one.figures for one in result.alone if one.node == place), PairFigures())
    pairs = (pair.figures for pair in result.pairs if pair.has((place,)) and not pair.problem)
    best = max(pairs, key=lambda figures: figures.gb_per_s or 0.0, default=PairFigures())
    parts = (f"{what} {_text(figures)}" for what, figures in (("alone", alone), ("in pairs", best)) if _text(figures))
    return "; ".join(parts)


def _text(figures: PairFigures) -> str:
    latency = None if figures.latency_s is None else 1e6 * figures.latency_s
    units = ((figures.tflops, "TFLOPS"), (figures.gb_per_s, "GB/s"), (latency, "us"))
    return ", ".join(f"{known(value)} {unit}" for value, unit in units if value is not None)


def _lists(result: PairwiseResult, host_list: HostList) -> Table:
    table = result_table("Nodes", "", "number", "list", right=("number",))
    unfit = result.named(fit=False)
    for name, fit in (("fit", True), ("unfit", False), ("undecided", None)):
        nodes = result.named(fit=fit)
        if nodes or fit is not None:
            table.add_row(name, str(len(nodes)), printable(host_list(nodes)) or "none")
    if unfit:
        table.caption = printable(f"Without them: llmb submit --exclude unfit, or --exclude {host_list(unfit)}")
    return table
