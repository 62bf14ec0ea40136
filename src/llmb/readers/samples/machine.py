# SPDX-License-Identifier: Apache-2.0
"""Finds faults of a run's nodes: counters that rose, and kernel messages."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from llmb.base.record import Record
from llmb.catalogue.data_files import read_file
from llmb.readers.samples.counters import KERNEL
from llmb.readers.samples.sample_records import CounterReading
from llmb.readers.samples.samples import Sampled

DATA = Path(__file__).with_name("machine.yaml")
State = Literal["clean", "doubtful", "faulty", "unknown"]
SEVERITY: tuple[State, ...] = ("clean", "unknown", "doubtful", "faulty")
AREAS = {
    "gpu": "counters of the GPUs",
    "rdma": "counters of ports with RDMA",
    "network": "counters of network interfaces",
    "tcp": "counters of TCP",
    "pci": "PCIe errors",
    "host_memory": "errors of the host's memory",
    "cpu": "throttling of the CPUs",
    "memory": "paging and out-of-memory kills",
    "cgroup": "out-of-memory kills in the job's control group",
    KERNEL: "the kernel's log",
}
"""The areas' names for display."""
DECISIVE = ("gpu", "rdma")
"""Areas that must be readable for a node to be considered clean."""
ENDED_EARLY = "not read at the end: the sampler was killed, or the node was lost"
MOST_EVENTS = 200
"""Maximum number of recorded events; if there are more, the worst are recorded."""
MOST_NAMED, MOST_NODES = 3, 2
"""Maximum number of kinds, and of nodes of each kind, that a verdict names."""


class CounterRule(Record):
    """The meaning of a rise in any counter that matches one of ``keys``."""

    keys: tuple[str, ...]
    kind: str
    state: Literal["doubtful", "faulty"]
    least: int = 1
    """The least rise that counts."""
    per_s: float = 0.0
    """The least rise per second."""
    pct_of: str | None = None
    pct: float = 0.0
    """The least rise in percent of the rise of the counter ``pct_of``."""
    between_nodes: bool = False
    """True if the rule applies only to runs on several nodes."""
    why: str | None = None
    """The reason for the least rise that counts."""

    def counts(self, rise: int, seconds: float, of: int) -> bool:
        """Return whether a rise within ``seconds`` is large enough; ``of`` is the rise of the counter ``pct_of``."""
        return rise >= self.least and rise >= self.per_s * seconds and (not self.pct_of or 100 * rise >= self.pct * of)


class KernelLogRule(Record):
    """The meaning of a line in the kernel's log that matches the pattern."""

    pattern: str
    kind: str
    state: Literal["clean", "doubtful", "faulty"]
    why: str | None = None


class KindText(Record):
    """A kind of event, for display."""

    title: str
    advice: str


class MachineRules(Record):
    """The content of ``machine.yaml``."""

    kinds: dict[str, KindText]
    counters: tuple[CounterRule, ...]
    kernel: tuple[KernelLogRule, ...]

    @model_validator(mode="after")
    def _check(self) -> "MachineRules":
        if (
            unknown := {*(rule.kind for rule in self.counters), *(rule.kind for rule in self.kernel)}
            - self.kinds.keys()
        ):
            raise ValueError(f"kinds without a text: {', '.join(sorted(unknown))}")
        return self


class MachineEvent(Record):
    """A counter that rose on a node, or the messages of one kind and state that the node's kernel logged."""

    node: str
    kind: str
    state: Literal["doubtful", "faulty"]
    counter: str
    """The name, ``area/device/name``; ``kernel_log`` for kernel messages, which are counted."""
    before: int
    after: int
    text: str | None = None
    """The first kernel message; None for a counter."""
    advice: str


class Unread(Record):
    """A source that could not be read on some nodes, which are unknown if ``nodes`` is empty."""

    what: str
    reason: str
    nodes: tuple[str, ...]


class MachineReport(Record):
    """The events on the nodes of a run from its start to its end."""

    state: State
    """The state of the worst event; without events, ``unknown`` if a decisive source was not read, else ``clean``."""
    events: tuple[MachineEvent, ...]
    """The worst first."""
    events_left_out: int = 0
    unread: tuple[Unread, ...]

    @property
    def kinds(self) -> tuple[tuple[MachineEvent, ...], ...]:
        """The events grouped by kind and state, the worst first."""
        kinds: dict[tuple[str, str], list[MachineEvent]] = {}
        for event in self.events:
            kinds.setdefault((event.kind, event.state), []).append(event)
        return tuple(map(tuple, kinds.values()))

    @property
    def faults(self) -> tuple[str, ...]:
        """Descriptions of the worst kinds of events, and the number of the others, for a verdict."""
        texts = [kind_text(events) for events in self.kinds]
        more = len(texts) - MOST_NAMED
        kinds = "kind" if more == 1 else "kinds"
        return (*texts[:MOST_NAMED], *([f"{more} more {kinds} of events"] if more > 0 else []))

    @property
    def faulty_nodes(self) -> tuple[str, ...]:
        """Nodes that should be drained."""
        return tuple(dict.fromkeys(event.node for event in self.events if event.state == "faulty"))


@cache
def machine_rules() -> MachineRules:
    return read_file(DATA, MachineRules)


def find_events(sampled: Sequence[Sampled], nodes: Sequence[str] = (), count: int | None = None) -> MachineReport:
    """Report a run's events. ``nodes`` are all nodes of the run, empty if unknown; it has at least ``count`` nodes."""
    events, unread = list[MachineEvent](), dict[tuple[str, str], list[str]]()
    names = {one.start.node for one in sampled}
    for node in (node for node in nodes if node not in names):
        unread.setdefault(("all counters", "the node was not sampled"), []).append(node)
    if count and count > len(names):
        unread["all counters", f"{count - len(names)} of {count} nodes were not sampled"] = []
    for one in sampled:
        events += _merged(_events(one, between_nodes=len({*nodes, *names}) > 1))
        for area, reason in _unread(one):
            unread.setdefault((AREAS.get(area, area), reason), []).append(one.start.node)
    events.sort(key=lambda event: -SEVERITY.index(event.state))
    decisive = [AREAS[area] for area in DECISIVE] + ["all counters"]
    undecided = any(what in decisive for what, _ in unread)
    state: State = events[0].state if events else "unknown" if undecided else "clean"
    return MachineReport(
        state=state,
        events=tuple(events[:MOST_EVENTS]),
        events_left_out=max(len(events) - MOST_EVENTS, 0),
        unread=tuple(
            Unread(what=what, reason=reason, nodes=tuple(dict.fromkeys(names)))
            for (what, reason), names in unread.items()
        ),
    )


def _unread(one: Sampled) -> Iterator[tuple[str, str]]:
    if not one.ended:
        yield "all counters", ENDED_EARLY
    yield from {area: why for reading in one.readings for area, why in reading.unread.items()}.items()


def _events(one: Sampled, *, between_nodes: bool) -> Iterator[MachineEvent]:
    if one.ended:
        rises = _rises(one.start.node, one.readings[0], one.readings[-1])
        yield from (event for event, rule in rises if between_nodes or not rule.between_nodes)
    for reading in one.readings:
        yield from _said(one.start.node, reading.kernel)


def _rises(node: str, before: CounterReading, after: CounterReading) -> Iterator[tuple[MachineEvent, CounterRule]]:
    seconds = after.read_at_s - before.read_at_s
    rises = {
        key: value - before.counters.get(key, 0)
        for key, value in after.counters.items()
        if key.partition("/")[0] in before.read
    }
    for key, rise in rises.items():
        rule = _rule_of(key) if rise > 0 else None
        if rule and rule.counts(rise, seconds, rises.get(rule.pct_of or "", 0)):
            event = MachineEvent(
                node=node,
                kind=rule.kind,
                state=rule.state,
                counter=key,
                before=before.counters.get(key, 0),
                after=after.counters[key],
                advice=machine_rules().kinds[rule.kind].advice,
            )
            yield event, rule


@cache
def _rule_of(key: str) -> CounterRule | None:
    rules = machine_rules().counters
    return next((rule for rule in rules if any(fnmatchcase(key, pattern) for pattern in rule.keys)), None)


def _said(node: str, lines: Iterable[str]) -> Iterator[MachineEvent]:
    for line in lines:
        rule = next((rule for rule in machine_rules().kernel if re.search(rule.pattern, line)), None)
        if rule and rule.state != "clean":
            advice = machine_rules().kinds[rule.kind].advice
            yield MachineEvent(
                node=node,
                kind=rule.kind,
                state=rule.state,
                counter=KERNEL,
                before=0,
                after=1,
                text="".join(character if character.isprintable() else "?" for character in line),
                advice=advice,
            )


def _merged(events: Iterable[MachineEvent]) -> Iterator[MachineEvent]:
    """Merge the kernel's lines of one kind and state into one event."""
    by_text: dict[tuple[str, str], MachineEvent] = {}
    for event in events:
        if event.counter != KERNEL:
            yield event
            continue
        key = event.kind, event.state
        by_text[key] = by_text[key].model_copy(update={"after": by_text[key].after + 1}) if key in by_text else event
    yield from by_text.values()


def kind_text(events: Sequence[MachineEvent]) -> str:
    """Return a string such as ``retransmissions on node7: packet_seq_err of mlx5_0 rose by 5,120``."""
    nodes = list(dict.fromkeys(event.node for event in events))
    where = " and ".join(nodes) if len(nodes) <= MOST_NODES else f"{len(nodes)} nodes"
    more = f" and {len(events) - 1} more" if len(events) > 1 else ""
    title = machine_rules().kinds[events[0].kind].title
    return f"{title} on {where}: {event_text(events[0])}{more}"


def event_text(event: MachineEvent) -> str:
    """Describe an event without its node."""
    if event.counter == KERNEL:
        times = f" ({event.after} such lines)" if event.after > 1 else ""
        return f"the kernel logged '{event.text}'{times}"
    _, device, name = event.counter.split("/", 2)
    of = "" if device in ("node", "job") else f" of {device}"
    return f"{name}{of} rose by {event.after - event.before:,}"
