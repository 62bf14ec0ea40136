# SPDX-License-Identifier: Apache-2.0
"""Checks of the scheduler: its set-up, and what it says of this node."""

from collections.abc import Iterator
from typing import NamedTuple

from llmb.health.facts import WantedFacts
from llmb.health.rules import Finding, names_of, rule, skipped
from llmb.missing import Missing
from llmb.schedulers.port import SchedulerSetup, Trait

CHECKED: tuple[Trait, ...] = ("tracking", "binding", "selection", "gpus", "mpi", "containers")


class Silent(NamedTuple):
    """A scheduler that should answer here, and does not."""

    reason: str


def scheduler_checks(
    setup: SchedulerSetup | Silent | Missing, title: str, gpus: int, wanted: WantedFacts
) -> Iterator[Finding]:
    """``gpus`` are those that this node shows."""
    if isinstance(setup, Missing):
        yield from skipped(names_of("scheduler"), setup.reason)
        return
    of = rule("scheduler_answer")
    if isinstance(setup, Silent):
        yield of.found("warn", setup.reason)
        yield from skipped([name for name in names_of("scheduler") if name != of.name], f"{title} does not answer")
        return
    yield of.passed("yes")
    of = rule("scheduler_version")
    yield of.passed(f"{title} {setup.version}") if setup.version else of.skipped(f"{title} does not show it")
    yield from _node(setup, title, gpus)
    for trait in CHECKED:
        yield _trait(trait, setup, wanted)


def _trait(trait: Trait, setup: SchedulerSetup, wanted: WantedFacts) -> Finding:
    of = rule(f"scheduler_{trait}")
    plugin = setup.traits.get(trait)
    if plugin is None:
        return of.skipped("its commands do not show it")
    if plugin.fit:
        return of.passed(plugin.value)
    if trait == "gpus" and not wanted.needs_gpus:
        return of.skipped(f"{plugin.value}, and no GPU is expected")
    if trait == "containers":
        asked = wanted.runtime == "pyxis"
        return of.found("fail", plugin.value) if asked else of.skipped(f"{plugin.value}, and none is requested")
    return of.found("warn", plugin.value)


def _node(setup: SchedulerSetup, title: str, gpus: int) -> Iterator[Finding]:
    of = rule("scheduler_node")
    if setup.node is None:
        yield of.skipped(f"this machine is not a node of {title}, such as a login node")
        yield rule("scheduler_node_gpus").skipped(f"this machine is not a node of {title}")
        return
    reason = f": {setup.node.reason}" if setup.node.reason and not setup.node.usable else ""
    yield of.found("pass" if setup.node.usable else "fail", f"{setup.node.state}{reason}")
    of = rule("scheduler_node_gpus")
    if setup.node.gpus is None:
        yield of.skipped(f"{title} counts no GPUs of this node")
    else:
        text = f"{setup.node.gpus} in {title}, {gpus} here"
        yield of.found("pass" if setup.node.gpus == gpus else "fail", text)
