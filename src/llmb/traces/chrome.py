# SPDX-License-Identifier: Apache-2.0
"""Reads traces of the PyTorch profiler."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.traces.classify import MEMORY_COPY, Activity, Label, Rules
from llmb.traces.json_events import TraceFile
from llmb.traces.timeline import Recorder, Timeline, TracedStep, make_timeline

STEP_NAME = re.compile(r"(?:ProfilerStep#|step )(\d+)")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)|^profile_(\d+)\b")
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
    threads: dict[tuple[object, object], Recorder] = field(default_factory=lambda: defaultdict(Recorder))

    def take(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X" or "dur" not in event:
            return
        name, category = str(event.get("name")), event.get("cat")
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        match category:
            case "kernel":
                self.kernels.add(start, end, name, self._kernel(name, event.get("args") or {}))
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
            self.threads[event.get("pid"), event.get("tid")].add(start, end, str(event.get("name")), label)

    def _kernel(self, name: str, args: dict[str, Any]) -> Label:
        label = self.rules.kernel(name)
        if label.activity is not Activity.COMMUNICATION:
            return label
        kind = self.rules.collective(str(args.get("Collective name", "")))
        described = str(args.get("Process Group Description", ""))
        group = described if described not in _NO_GROUP else args.get("Process Group Name")
        return label._replace(kind=kind or label.kind, group=None if group is None else str(group))


def read_chrome(path: Path, rules: Rules) -> Timeline:
    """Reads one trace. CPU operators count only if the trace has no GPU kernels.

    Raises UsageError if the file is not a trace. A trace without steps gives a timeline without steps.
    """
    file = TraceFile(path)
    collected = _Collected(rules)
    for event in file.events():
        collected.take(event)
    distributed = file.header.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    rank = rank_in_name(path) if rank is None else int(rank)
    if len(collected.kernels):
        steps = device_steps(collected.steps, collected.device_ends)
        return make_timeline(path.name, rank, "gpu", steps, [collected.kernels])
    steps = [TracedStep(number, *span) for number, span in collected.steps.items()]
    return make_timeline(path.name, rank, "cpu", steps, list(collected.threads.values()))


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
