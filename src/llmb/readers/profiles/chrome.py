# SPDX-License-Identifier: Apache-2.0
"""Reads traces of the PyTorch profiler."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

from llmb.base.errors import UsageError
from llmb.base.input_files import open_file
from llmb.base.shown_text import counted
from llmb.readers.profiles.classify import MEMORY_COPY, Activity, Label, Rules
from llmb.readers.profiles.timeline import (
    EVER,
    LAST_NS,
    LAUNCH_NAME,
    Launches,
    Recorder,
    Timeline,
    TracedStep,
    make_timeline,
)

CHUNK_BYTES = 1 << 20
LONGEST_EVENT = 1 << 24
"""Approximate maximum number of characters in an event or the header."""
GZIP_MAGIC = b"\x1f\x8b"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")


@dataclass(slots=True)
class TraceFile:
    """A trace file. Iterate over ``events()`` once; ``header`` then has the fields that precede the events."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    """Number of the current event, from 1; 0 before the first."""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events. Raise UsageError if the file is not a trace, is truncated or cannot be read."""
        try:
            with io.BufferedReader(cast(io.RawIOBase, open_file(self.path))) as raw:
                if raw.peek(2)[:2] == GZIP_MAGIC:
                    with gzip.open(raw) as unpacked:
                        yield from self._parse(_text(cast(BinaryIO, unpacked)))
                else:
                    yield from self._parse(_text(raw))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(f"cannot be decompressed: {error}") from error
        except OSError as error:
            raise self._broken(f"cannot be read: {error.strerror}") from error

    def _parse(self, chunks: Iterator[str]) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder(strict=False).raw_decode
        text = self._skip_header(chunks)
        at, self.number = 0, 1
        while True:
            gap = _GAP.match(text, at)
            at = gap.end() if gap else at
            if text.startswith("]", at):
                return
            try:
                event, at = decode(text, at)
            except json.JSONDecodeError:
                text, at = self._more(chunks, text[at:]), 0
                continue
            except (ValueError, RecursionError) as error:  # a number of too many digits, too many levels
                raise self._broken(f"has an event that cannot be read: {error}") from error
            if not isinstance(event, dict):
                raise self._broken("has events that are not JSON objects")
            yield event
            self.number += 1

    def _more(self, chunks: Iterator[str], pending: str) -> str:
        """Return ``pending`` and as much again, or the rest: reparsing after every chunk would take quadratic time."""
        if len(pending) > LONGEST_EVENT:
            raise self._broken("is not valid JSON")
        parts, length = [pending], len(pending)
        for more in chunks:
            parts.append(more)
            length += len(more)
            if length >= 2 * len(pending):
                return "".join(parts)
        if length > len(pending):
            return "".join(parts)
        raise self._broken("is truncated within its events")

    def _skip_header(self, chunks: Iterator[str]) -> str:
        text = next(chunks, "").lstrip()
        if text.startswith("["):
            return text[1:]
        if not text.startswith("{"):
            raise self._broken("is not JSON")
        while not (match := _EVENTS.search(text)):
            parts, length = [text], 0
            while length <= len(text) and (more := next(chunks, "")):
                parts.append(more)
                length += len(more)
            if not length or length > LONGEST_EVENT:
                raise self._broken("has no 'traceEvents'")
            text = "".join(parts)
        try:
            self.header = json.loads(text[: match.start()] + '"traceEvents": []}', strict=False)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"is not valid JSON: {error}") from error
        return text[match.end() :]

    def _broken(self, what: str) -> UsageError:
        place = f" (event {self.number:,})" if self.number else ""
        return UsageError(
            f"not a trace: the file {what}{place}",
            where=str(self.path),
            do="pass a complete trace of PyTorch's profiler (.json, .json.gz) or an export of Nsight Systems (.sqlite)",
        )


def _text(stream: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    while chunk := stream.read(CHUNK_BYTES):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


STEP_NAME = re.compile(r"(?:ProfilerStep#|step )(\d{1,9})")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})|^profile_(\d{1,9})\b")
MOST_GROUPS = 500
LONGEST_NAME = 200
MORE_GROUPS = "(further groups)"
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
_CATEGORIES = (*("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation", "gpu_user_annotation"), *_LAUNCHES)
_NO_GROUP = ("", "undefined")
_OPTIMIZER = "Optimizer.step#"
"""Prefix of the names of the ranges with which PyTorch marks optimizer steps."""


def rank_in_name(path: Path) -> int | None:
    """Return the rank in a file name; None if the name contains none."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1] or match[2]) if match else None


@dataclass(slots=True)
class _Collected:
    rules: Rules
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    device_ends: dict[int, int] = field(default_factory=dict)
    """Times in nanoseconds at which the device finished the work launched by a step, by step number."""
    kernels: Recorder = field(default_factory=Recorder)
    threads: dict[tuple[str, str], Recorder] = field(default_factory=lambda: defaultdict(Recorder))
    groups: set[str] = field(default_factory=set)
    without_time: int = 0
    """Number of events skipped because they have no valid time."""
    updates: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds at which the host finished optimizer steps, by the range's name."""
    device_updates: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds at which the device finished optimizer steps, by the range's name."""
    launches: Launches = field(default_factory=Launches)
    categories: set[str] = field(default_factory=set)
    devices: set[int] = field(default_factory=set)
    """Numbers of the GPUs on which kernels ran."""
    repeated: int | None = None
    """A step that is marked several times."""
    device: str | None = None
    """Name of an unknown device, from the name or a label of a process."""

    def take(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if isinstance(category, str) and len(self.categories) < MOST_GROUPS:
            self.categories.add(category)
        if event.get("ph") == "M":
            self._take_process(event.get("args"))
        if event.get("ph") != "X" or category not in _CATEGORIES:
            return
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        if start is None or duration is None or duration < 0:
            self.without_time += 1
        else:
            self._take(event, start, start + duration)

    def _take_process(self, args: object) -> None:
        names = (args.get("name"), args.get("labels")) if isinstance(args, dict) else ()
        for name in names:
            if isinstance(name, str) and not self.device:
                self.device = self.rules.device_of_process(name[:LONGEST_NAME])

    @property
    def unknown_device(self) -> str | None:
        return self.device or next(filter(None, map(self.rules.device_of_category, sorted(self.categories))), None)

    def take_iterations(self) -> str | None:
        """Use the intervals between optimizer steps as steps; return a note, or None if there are too few."""
        name = max(self.updates, key=lambda name: len(self.updates[name]), default=None)
        ends = sorted(self.updates[name]) if name else []
        if len(ends) < 2:
            return None
        self.steps = dict(enumerate(pairwise(ends), 1))
        times = sorted(self.device_updates[name]) if name else []
        self.device_ends = dict(enumerate(times[1:], 1)) if len(times) == len(ends) else {}
        return f"no step is marked: iterations are from the end of one '{name}' to that of the next"

    def _take(self, event: dict[str, Any], start: int, end: int) -> None:
        name = str(event.get("name"))
        match event["cat"]:
            case "kernel":
                self.kernels.add(start, end, name, self._kernel(name, event.get("args")))
                self._launch(event, None)
            case "cuda_runtime" | "cuda_driver" | "hip_runtime":
                self._launch(event, start)
            case "gpu_memcpy" | "gpu_memset":
                self.kernels.add(start, end, name, MEMORY_COPY)
            case "cpu_op":
                self._operator(event, start, end, self.rules.operator(name))
            case "user_annotation":
                self._range(event, name, start, end)
            case "gpu_user_annotation":
                if step := STEP_NAME.fullmatch(name):
                    self.device_ends[int(step[1])] = max(end, self.device_ends.get(int(step[1]), end))
                elif name.startswith(_OPTIMIZER) and len(self.device_updates) < MOST_GROUPS:
                    self.device_updates[name[:LONGEST_NAME]].append(end)

    def _launch(self, event: dict[str, Any], start: int | None) -> None:
        args = event.get("args")
        correlation = args.get("correlation") if isinstance(args, dict) else None
        if type(correlation) is not int:
            return
        if start is None:
            self.launches.record(correlation)
        elif LAUNCH_NAME.fullmatch(str(event.get("name"))):
            self.launches.launch(correlation, start)

    def _range(self, event: dict[str, Any], name: str, start: int, end: int) -> None:
        if step := STEP_NAME.fullmatch(name):
            self.repeated = int(step[1]) if int(step[1]) in self.steps else self.repeated
            self.steps[int(step[1])] = (start, end)
        elif name.startswith(_OPTIMIZER) and len(self.updates) < MOST_GROUPS:
            self.updates[name[:LONGEST_NAME]].append(end)
        elif (label := self.rules.operator(name)) and label.activity is Activity.COMMUNICATION:
            self._operator(event, start, end, label)

    def _operator(self, event: dict[str, Any], start: int, end: int, label: Label | None) -> None:
        if label:
            self.threads[str(event.get("pid")), str(event.get("tid"))].add(start, end, str(event.get("name")), label)

    def _kernel(self, name: str, args: object) -> Label:
        label = self.rules.kernel(name)
        if isinstance(args, dict) and type(device := args.get("device")) is int:
            self.devices.add(device)
        if label.activity is not Activity.COMMUNICATION or not isinstance(args, dict):
            return label
        kind = self.rules.collective(str(args.get("Collective name", "")))
        described = str(args.get("Process Group Description", ""))
        group = described if described not in _NO_GROUP else args.get("Process Group Name")
        return label._replace(kind=kind or label.kind, group=None if group is None else self._group(str(group)))

    def _group(self, name: str) -> str:
        """Return ``name`` or, beyond a limit, one name for all other groups: each step examines every group."""
        if len(self.groups) < MOST_GROUPS:
            self.groups.add(name)
        return name if name in self.groups else MORE_GROUPS


def _nanoseconds(microseconds: object) -> int | None:
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return None
    return round(microseconds * 1000) if -LAST_NS < microseconds * 1000 < LAST_NS else None


def read_chrome(path: Path, rules: Rules, *, unmarked: bool = False) -> Timeline:
    """Read one trace.

    If ``unmarked``, unmarked traces have optimizer iterations or one step. Raise UsageError for an invalid trace.
    """
    file = TraceFile(path)
    collected = _Collected(rules)
    for event in file.events():
        collected.take(event)
    if len(collected.devices) > 1 or collected.repeated is not None:
        raise mixed(path, collected.repeated)
    notes = _notes_on_device(path, collected)
    if unmarked and not collected.steps and (iterations := collected.take_iterations()):
        notes.append(iterations)
    if collected.without_time:
        notes.append(f"left out: {counted(collected.without_time, 'event')} without a valid time")
    distributed, devices = (file.header.get(name) for name in ("distributedInfo", "deviceProperties"))
    rank, ranks = (distributed.get(name) if isinstance(distributed, dict) else None for name in ("rank", "world_size"))
    first = devices[0] if isinstance(devices, list) and devices else None
    device = first.get("name") if isinstance(first, dict) else None
    if rank is not None and not is_rank(rank):
        notes.append(f"the trace's rank is {str(rank)[:40]!r}, which is not a number")
    rank = rank if is_rank(rank) else rank_in_name(path)
    if len(collected.kernels):
        left_out, dropped = collected.launches.incomplete(collected.steps or ({0: EVER} if unmarked else {}))
        steps = [one for one in device_steps(collected.steps, collected.device_ends) if one.number not in left_out]
        unmarked = unmarked and not left_out
        made = make_timeline(path.name, rank, "gpu", steps, [collected.kernels], notes + dropped, unmarked=unmarked)
        name = device[:LONGEST_NAME] if isinstance(device, str) else None
        return replace(made, gpu_name=name, world_size=ranks if is_rank(ranks) else None)
    steps = [TracedStep(number, *span) for number, span in collected.steps.items()]
    threads = list(collected.threads.values())
    return make_timeline(path.name, rank, "cpu", steps, threads, notes, unmarked=unmarked)


def mixed(path: Path, step: int | None) -> UsageError:
    """Return the error for a trace of several GPUs or, if ``step`` is not None, with that step repeated."""
    return UsageError(
        "one process has kernels on several GPUs" if step is None else f"step {step} is marked several times",
        where=str(path),
        do="pass a trace of one rank on one GPU, in which no two steps have the same number",
    )


def _notes_on_device(path: Path, collected: _Collected) -> list[str]:
    device = collected.unknown_device
    if device and not len(collected.kernels):
        raise UsageError(
            f"unknown device in the trace: {device}",
            where=str(path),
            choices=("CPU", "GPUs of CUDA and ROCm"),
            do="use the vendor's tools: the trace's CPU operators do not show the device's work",
        )
    if device:
        return [f"the device is unknown: {device}; no rule covers its kernels"]
    launched = "cuda_runtime" in collected.categories and not len(collected.kernels)
    return ["the GPU's kernels were not recorded: these are operators on the CPU"] if launched else []


def is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


def device_steps(host: dict[int, tuple[int, int]], device_ends: dict[int, int]) -> list[TracedStep]:
    """Return each step's span on the GPU, in nanoseconds, from its host span and the end of its GPU work."""
    steps: list[TracedStep] = []
    last_end = 0
    for number, (start, end) in sorted(host.items(), key=lambda item: item[1]):
        begin = max(start, last_end)
        finish = max(begin, end, device_ends.get(number, end))
        steps.append(TracedStep(number, begin, finish))
        last_end = max(last_end, device_ends.get(number, 0))
    return steps
