# SPDX-License-Identifier: Apache-2.0
"""Reads the log that NCCL writes with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL, as a stream.

``node7:4001:4123 [3] NCCL INFO AllReduce: opCount 2 sendbuff 0x7f.. recvbuff 0x7f.. count 1024 datatype 7 op 0 root 0
comm 0x55.. [nranks=8] stream 0x55..``; the counter is hexadecimal, the rest decimal. Every rank writes its own line for
each collective, with its own handle of the communicator (``comm``).
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from llmb.errors import UsageError
from llmb.logs.step_line import STEP_LINE_HEAD
from llmb.traces.folders import NCCL_STEPS_END

CHUNK_BYTES = 1 << 22
MOST_KEYS = 100_000
"""With more different calls, sizes are grouped by powers of two."""
# The text that distinguishes calls is matched as one string and parsed once per call: most of the time is spent here.
_CALL = re.compile(rb"NCCL INFO ([A-Za-z]++): opCount [^ ]++ sendbuff [^ ]++ recvbuff [^ ]++ (count [^\]\r\n]++\])")
_FIELDS = re.compile(rb"count (\d+) datatype (\d+) op \d+ root -?\d+ comm (\S+) \[nranks=(\d+)\]")
_INIT_END = b"Init COMPLETE"
_INIT = re.compile(rb"NCCL INFO .*?\bcomm (\S+) rank \d+ nranks \d+ .*?commId (\S+) ")
_WRITER = re.compile(rb"(\S+:\d+):\d+ \[\d+\] NCCL INFO")
_STEP = re.compile(rb"%s\d{1,9}, iteration (\d{1,9})/" % STEP_LINE_HEAD)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one rank. ``most`` is greater than ``least`` if sizes are grouped by powers of two."""

    operation: str
    least: int
    most: int
    datatype: int
    handle: str
    """Handle of the communicator, in the file that it is from."""
    ranks: int


@dataclass(slots=True)
class Calls:
    """The number of times that a call was made, and its number of elements in all."""

    number: int = 0
    elements: int = 0


Kind = tuple[str, int, int]
"""Operation, code of the datatype, ranks of the communicator."""


@dataclass(slots=True)
class NcclLog:
    """The content of the logs of one run, all read together."""

    calls: dict[Call, Calls] = field(default_factory=dict)
    communicators: dict[str, str] = field(default_factory=dict)
    """The identifier that all ranks of a communicator have in common, by handle; logged with NCCL_DEBUG_SUBSYS=INIT."""
    writers: dict[str, str] = field(default_factory=dict)
    """The process of each handle."""
    steps: dict[int, dict[Kind, Calls]] = field(default_factory=dict)
    """The calls of each step, if steps are known."""
    coarse: bool = False
    """Sizes are grouped by powers of two."""

    def add(self, call: Call, number: int) -> None:
        self._add(call, number, number * call.least)
        if len(self.calls) > MOST_KEYS and not self.coarse:
            self.coarse = True
            exact, self.calls = self.calls, {}
            for one, calls in exact.items():
                self._add(one, calls.number, calls.elements)

    def add_to_step(self, step: int, kinds: dict[Kind, Calls]) -> None:
        own = self.steps.setdefault(step, {})
        for kind, calls in kinds.items():
            sums = own.setdefault(kind, Calls())
            sums.number += calls.number
            sums.elements += calls.elements

    def _add(self, call: Call, number: int, elements: int) -> None:
        calls = self.calls.setdefault(_coarse(call) if self.coarse else call, Calls())
        calls.number += number
        calls.elements += elements


def _coarse(call: Call) -> Call:
    least = 1 << (call.least.bit_length() - 1) if call.least else 0
    return Call(call.operation, least, max(0, 2 * least - 1), call.datatype, call.handle, call.ranks)


def read_nccl_logs(paths: Sequence[Path]) -> NcclLog:
    """Reads all of ``paths`` together, each the log of one or more ranks. Empty if no line is NCCL's.

    Raises UsageError if a file cannot be read.
    """
    log = NcclLog()
    for number, path in enumerate(paths):
        try:
            with path.open("rb", buffering=0) as stream:
                _read(stream, log, f"{number}:", _noted_steps(path))
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return log


def _noted_steps(path: Path) -> list[tuple[int, int]]:
    """Pairs of offset and step: where in the log steps begin, as noted by ``llmb run --nccl-trace``."""
    notes = path.with_suffix(NCCL_STEPS_END)
    if not notes.exists():
        return []
    pairs = [line.split() for line in notes.read_text().splitlines()]
    return [(int(offset), int(step)) for step, offset in pairs]


def _read(stream: BinaryIO, log: NcclLog, file: str, noted: Sequence[tuple[int, int]]) -> None:
    waiting: dict[Kind, Calls] = {}
    known: dict[tuple[bytes, bytes], Call | None] = {}
    for position, text in _chunks(stream):
        for part, step in _parts_noted(text, position, noted) if noted else _parts_ended(text):
            for key, number in Counter(_CALL.findall(part)).items():
                if key not in known:
                    known[key] = _call(key, part, log, file)
                call = known[key]
                if call:
                    log.add(call, number)
                    sums = waiting.setdefault((call.operation, call.datatype, call.ranks), Calls())
                    sums.number += number
                    sums.elements += number * call.least
            if step is not None:
                log.add_to_step(step, waiting)
            if noted or step is not None:
                waiting = {}
            if len(known) > MOST_KEYS:
                known.clear()
        _note_communicators(text, log, file)


def _call(key: tuple[bytes, bytes], part: bytes, log: NcclLog, file: str) -> Call | None:
    """Parses the line of a call; None if the line has another form."""
    operation, tail = key
    fields = _FIELDS.fullmatch(tail)
    if not fields:
        return None
    count, datatype, pointer, ranks = fields.groups()
    handle = f"{file}{pointer.decode()}"
    if handle not in log.writers:
        log.writers[handle] = file + _writer(part, part.find(tail))
    return Call(operation.decode(), int(count), int(count), int(datatype), handle, int(ranks))


def _writer(text: bytes, place: int) -> str:
    """The process that wrote the line at ``place``: host and process id, or the prefix found there instead."""
    line = text[text.rfind(b"\n", 0, place) + 1 : place]
    writer = _WRITER.search(line)
    return (writer[1] if writer else line.partition(b"NCCL INFO")[0].strip()).decode(errors="replace")


def _chunks(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Complete lines with their offsets; a line longer than a chunk is split."""
    position, rest = 0, b""
    while text := stream.read(CHUNK_BYTES):
        text = rest + text
        end = text.rfind(b"\n") + 1 or len(text)
        yield position, text[:end]
        position += end
        rest = text[end:]
    if rest:
        yield position, rest


def _parts_noted(text: bytes, position: int, noted: Sequence[tuple[int, int]]) -> Iterator[tuple[bytes, int | None]]:
    """``text`` split where steps begin, each part with its step; None before the first."""
    offsets = [offset for offset, _ in noted]
    at = 0
    while at < len(text):
        after = bisect_right(offsets, position + at)
        end = min(len(text), offsets[after] - position) if after < len(offsets) else len(text)
        yield text[at:end], noted[after - 1][1] if after else None
        at = end


def _parts_ended(text: bytes) -> Iterator[tuple[bytes, int | None]]:
    """``text`` split at the lines that a run logs after each step, each part with that step; None after the last."""
    at = 0
    for match in _STEP.finditer(text) if STEP_LINE_HEAD in text else ():
        yield text[at : match.start()], int(match[1])
        at = match.end()
    yield text[at:], None


def _note_communicators(text: bytes, log: NcclLog, file: str) -> None:
    end = text.find(_INIT_END)
    while end >= 0:
        match = _INIT.search(text, text.rfind(b"\n", 0, end) + 1, end)
        if match:
            log.communicators[f"{file}{match[1].decode()}"] = match[2].decode()
        end = text.find(_INIT_END, end + 1)
