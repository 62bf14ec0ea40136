# SPDX-License-Identifier: Apache-2.0
"""Reads traces of the PyTorch profiler."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from llmb.traces.classify import MEMORY_COPY, Activity, Label, Rules
from llmb.traces.json_events import TraceFile
from llmb.traces.timeline import LAST_NS, Recorder, Timeline, TracedStep, counted, make_timeline

STEP_NAME = re.compile(r"(?:ProfilerStep#|step )(\d{1,9})")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})|^profile_(\d{1,9})\b")
MOST_GROUPS = 500
MORE_GROUPS = "(further groups)"
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation", "gpu_user_annotation")
_NO_GROUP = ("", "undefined")


def rank_in_name(path: Path) -> int | None:
    """The rank in a file name, if there is one."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1] or match[2]) if match else None


@dataclass(slots=True)
class _Collected:
    """What is kept of a trace while it is read."""

    rules: Rules
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    device_ends: dict[int, int] = field(default_factory=dict)
    """When the device finished the work that a step had launched."""
    kernels: Recorder = field(default_factory=Recorder)
    threads: dict[tuple[str, str], Recorder] = field(default_factory=lambda: defaultdict(Recorder))
    groups: set[str] = field(default_factory=set)
    without_time: int = 0
    """Events that are left out."""

    def take(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X" or event.get("cat") not in _CATEGORIES:
            return
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        if start is None or duration is None or duration < 0:
            self.without_time += 1
        else:
            self._take(event, start, start + duration)

    def _take(self, event: dict[str, Any], start: int, end: int) -> None:
        name = str(event.get("name"))
        match event["cat"]:
            case "kernel":
                self.kernels.add(start, end, name, self._kernel(name, event.get("args")))
            case "gpu_memcpy" | "gpu_memset":
                self.kernels.add(start, end, name, MEMORY_COPY)
            case "cpu_op":
                self._operator(event, start, end, self.rules.operator(name))
            case "user_annotation":
                if step := STEP_NAME.fullmatch(name):
                    self.steps[int(step[1])] = (start, end)
                elif (label := self.rules.operator(name)) and label.activity is Activity.COMMUNICATION:
                    self._operator(event, start, end, label)
            case "gpu_user_annotation":
                if step := STEP_NAME.fullmatch(name):
                    self.device_ends[int(step[1])] = max(end, self.device_ends.get(int(step[1]), end))

    def _operator(self, event: dict[str, Any], start: int, end: int, label: Label | None) -> None:
        if label:
            self.threads[str(event.get("pid")), str(event.get("tid"))].add(start, end, str(event.get("name")), label)

    def _kernel(self, name: str, args: object) -> Label:
        label = self.rules.kernel(name)
        if label.activity is not Activity.COMMUNICATION or not isinstance(args, dict):
            return label
        kind = self.rules.collective(str(args.get("Collective name", "")))
        described = str(args.get("Process Group Description", ""))
        group = described if described not in _NO_GROUP else args.get("Process Group Name")
        return label._replace(kind=kind or label.kind, group=None if group is None else self._group(str(group)))

    def _group(self, name: str) -> str:
        """Each group is looked at in each step, so that there must not be as many as events."""
        if len(self.groups) < MOST_GROUPS:
            self.groups.add(name)
        return name if name in self.groups else MORE_GROUPS


def _nanoseconds(microseconds: object) -> int | None:
    """None for what is no time."""
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return None
    return round(microseconds * 1000) if -LAST_NS < microseconds * 1000 < LAST_NS else None


def read_chrome(path: Path, rules: Rules) -> Timeline:
    """Reads one trace. CPU operators count only if the trace has no GPU kernels.

    Raises UsageError if the file is not a trace. A trace without steps gives a timeline without steps.
    """
    file = TraceFile(path)
    collected = _Collected(rules)
    for event in file.events():
        collected.take(event)
    notes = []
    if collected.without_time:
        notes.append(f"left out: {counted(collected.without_time, 'event')} without a valid time")
    distributed = file.header.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    if rank is not None and not is_rank(rank):
        notes.append(f"the trace's rank is {str(rank)[:40]!r}, which is no number")
    rank = rank if is_rank(rank) else rank_in_name(path)
    if len(collected.kernels):
        steps = device_steps(collected.steps, collected.device_ends)
        return make_timeline(path.name, rank, "gpu", steps, [collected.kernels], notes)
    steps = [TracedStep(number, *span) for number, span in collected.steps.items()]
    return make_timeline(path.name, rank, "cpu", steps, list(collected.threads.values()), notes)


def is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


def device_steps(host: dict[int, tuple[int, int]], device_ends: dict[int, int]) -> list[TracedStep]:
    """The time that a GPU spent on each step, as the host may run ahead of it.

    A step begins when its range on the host begins or when the GPU has finished the work of earlier steps, whichever
    is later. It ends when that range ends or when the GPU has finished the work that the step launched, whichever is
    later.
    """
    steps: list[TracedStep] = []
    done = 0
    for number, (start, end) in sorted(host.items(), key=lambda item: item[1]):
        begin = max(start, done)
        finish = max(begin, end, device_ends.get(number, end))
        steps.append(TracedStep(number, begin, finish))
        done = max(done, device_ends.get(number, 0))
    return steps
