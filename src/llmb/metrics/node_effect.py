# SPDX-License-Identifier: Apache-2.0
"""Whether the nodes of runs may explain the difference between two groups of runs."""

import math
from collections.abc import Sequence
from statistics import fmean

RunOnNodes = tuple[float, tuple[str, ...]]
"""The mean step time of a run in seconds, and its nodes."""
ERROR_RATE = 0.01
"""Probability that a node is named that has no effect, all nodes together."""
MOST_NAMED = 3


def node_effect(before: Sequence[RunOnNodes], after: Sequence[RunOnNodes]) -> str | None:
    """What has to be said of the nodes: which ran only one group, and which runs are slower with one node.

    None if both groups ran on the same nodes, which make no difference, and if the nodes of a run are unknown.
    """
    runs = (*before, *after)
    if not all(nodes for _, nodes in runs):
        return None
    used = [{node for _, nodes in group for node in nodes} for group in (before, after)]
    said = []
    if not used[0] & used[1]:
        said.append(f"the groups ran on different nodes ({_names(used[0])}; {_names(used[1])}), which may differ")
    elif used[0] != used[1]:
        only = [
            f"only the {which} group ran on {_names(nodes)}"
            for which, nodes in (("first", used[0] - used[1]), ("second", used[1] - used[0]))
            if nodes
        ]
        said.append(" and ".join(only))
    return "; ".join((*said, *_slow_nodes(before, after))) or None


def _slow_nodes(before: Sequence[RunOnNodes], after: Sequence[RunOnNodes]) -> list[str]:
    """Nodes with which runs differ from the others of their group, more than chance explains."""
    from scipy.special import stdtr  # takes longer to load than most commands take to run

    runs = (*before, *after)
    nodes = sorted({node for _, names in runs for node in names})
    said = []
    for node in nodes:
        strata = [
            ([math.log(mean) for mean, names in group if node in names],
             [math.log(mean) for mean, names in group if node not in names])
            for group in (before, after)
        ]  # fmt: skip
        informative = [(own, others) for own, others in strata if own and others]
        effect, error, freedom = _common_effect(informative)
        if freedom < 1 or not error:
            continue
        if 2 * float(stdtr(freedom, -abs(effect) / error)) < ERROR_RATE / len(nodes):
            word = "slower" if effect > 0 else "faster"
            said.append(f"runs on {node} were {abs(100 * math.expm1(effect)):.1f} % {word} than others of their group")
    return said[:MOST_NAMED]


def _common_effect(strata: Sequence[tuple[list[float], list[float]]]) -> tuple[float, float, int]:
    """The mean difference within strata, its standard error, and the degrees of freedom."""
    cells = [cell for stratum in strata for cell in stratum]
    freedom = sum(len(cell) - 1 for cell in cells)
    if freedom < 1:
        return 0.0, 0.0, 0
    variance = math.fsum((value - fmean(cell)) ** 2 for cell in cells for value in cell) / freedom
    weights = [1 / (1 / len(own) + 1 / len(others)) for own, others in strata]
    differences = [fmean(own) - fmean(others) for own, others in strata]
    effect = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
    return effect, math.sqrt(variance / sum(weights)), freedom


def _names(nodes: set[str]) -> str:
    ordered = sorted(nodes)
    more = f" and {len(ordered) - MOST_NAMED} more" if len(ordered) > MOST_NAMED else ""
    return ", ".join(ordered[:MOST_NAMED]) + more
