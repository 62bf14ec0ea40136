# SPDX-License-Identifier: Apache-2.0
"""Reads logs of NCCL 2.19 or newer with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL.

Formats: NCCL's ``src/init.cc``.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol

from llmb.base.errors import UsageError
from llmb.base.input_files import list_folder, open_file, read_text_file
from llmb.base.shown_text import counted, printable
from llmb.readers.logs.step_line import STEP_LINE_HEAD
from llmb.readers.profiles import NCCL_FOLDER, NCCL_LOG_END, NCCL_STEPS_END, NETWORK_FOLDER

_PROCESS, _DEVICE = rb"([^\s:]{1,255}+:\d{1,10}+):\d{1,10}+ ", rb"\[(\d{1,5})\] NCCL INFO "
WRITER = rb"(?<![^\s:])(?:" + _PROCESS + rb")?+" + _DEVICE
"""The process, if the line contains it, and the device."""
BARE_WRITER = rb"\n" + _PROCESS + _DEVICE
"""Matches the writer at the beginning of a line, which is faster to find."""
_END = re.compile(rb"- (?:Init START|(?:Destroy|Abort) COMPLETE)")
_LINE = re.compile(
    WRITER + rb"[^\r\n]{0,100}?\bcomm (\S{1,40}) rank (\d{1,9}) nranks (\d{1,9}) cudaDev (\d{1,5})([^\r\n]{0,400}?) ?\Z"
)
_LONGEST_LINE = 2000
_COMM_ID = re.compile(rb" commId (\S+)")
_REPEATED = re.compile(r" \(\d+\)\Z")
_SPLIT = re.compile(rb" parent (\S+)(?: (?:split|child)Count (\d{1,9}))? color (-?\d{1,12}) key")

Reason = Literal["no init line", "unknown parent", "equal splits"]
EXPECTED = (
    "lines 'NCCL INFO AllReduce: opCount ...'",
    "lines 'NCCL INFO Using network ...'",
    "tables of nccl-tests, '# size count type redop root time algbw busbw #wrong', or their JSON",
)
_NCCL_LINE = re.compile(rb"NCCL (?:INFO|WARN|TRACE|ERROR) [^\r\n]{0,200}")
_TABLE_HEADER = re.compile(rb"#[ \t]{0,100}size [^\r\n]{0,300}\bbusbw\b[^\r\n]{0,300}")
_MOST_QUOTED = 120
CHUNK_BYTES = 1 << 22
MOST_KEYS = 100_000
"""Number of different calls, beyond one per handle, above which sizes are grouped by powers of two."""
MOST_HANDLES = 500_000
"""Maximum number of handles (pointers to communicators) in all files."""
# The text that distinguishes calls is matched as one string and parsed once per call: most of the time is spent here.
# Every repetition is bounded or possessive, so that no text takes quadratic time.
_COUNTED = rb": opCount "
_TEXT = (
    rb"([A-Za-z]{1,40}+)"
    + _COUNTED
    + rb"[^ ]{1,40}+ sendbuff [^ ]{1,40}+ recvbuff [^ ]{1,40}+ (count [^\]\r\n]{1,200}+\])"
)
_CALL, _BARE_CALL = re.compile(WRITER + _TEXT), re.compile(BARE_WRITER + _TEXT)
_FIELDS = re.compile(
    rb"count (\d{1,19}) datatype (\d{1,9}) op \d+ root -?\d+ comm (\S{1,40}) \[nranks=([1-9]\d{0,8})\]"
)
_NOTE = re.compile(rb"(\d{1,9}|end) (\d{1,18})")
_STEP = re.compile(rb"%s\d{1,9}, iteration (\d{1,9})/" % STEP_LINE_HEAD)
Kind = tuple[str, int, int]
"""Operation, code of the datatype, and number of ranks in the communicator."""


class Event(NamedTuple):
    """A log line about the creation or the end of a communicator."""

    process: str
    device: int
    pointer: str
    rank: int
    ranks: int
    begins: bool
    comm_id: str | None
    parent: str | None
    number: str | None
    """Number of the split among its parent's splits."""
    color: str | None


def process_of(process: bytes, device: bytes) -> str:
    """Return the process that wrote a line: host and process id, or the device if the line contains neither."""
    return (process or b"[%s]" % device).decode(errors="replace")


def split_at_events(text: bytes) -> Iterator[tuple[bytes, Event | None]]:
    """Yield ``text`` in parts, each with the event at its end; the last part has None."""
    at = searched = 0
    for end in _END.finditer(text):
        least = max(searched, end.start() - _LONGEST_LINE)
        match = _LINE.search(text, max(least, text.rfind(b"\n", least, end.start()) + 1), end.start())
        searched = end.end()
        if match:
            yield text[at:searched], _event(match, end[0])
            at = searched
    yield text[at:] if at else text, None


def _event(match: "re.Match[bytes]", end: bytes) -> Event:
    process, device, pointer, rank, ranks, cuda_device, rest = match.groups()
    comm_id, split = _COMM_ID.search(rest), _SPLIT.search(rest)
    parent, number, color = (
        None if text is None else text.decode(errors="replace") for text in (split.groups() if split else (None,) * 3)
    )
    return Event(
        process=process_of(process, device),
        device=int(cuda_device),
        pointer=pointer.decode(errors="replace"),
        rank=int(rank),
        ranks=int(ranks),
        begins=end.endswith(b"START"),
        comm_id=comm_id[1].decode(errors="replace") if comm_id else None,
        parent=parent,
        number=number,
        color=color,
    )


@dataclass(slots=True)
class Handle:
    """A pointer to a communicator in one process, from the communicator's creation to its destruction."""

    process: str
    device: int
    name: str | None = None
    """The communicator's name, equal on all its ranks. Several communicators may share one of ``unclear_names``."""
    reason: Reason | None = "no init line"
    """The reason why ``name`` is None."""
    rank: int | None = None
    ranks: int | None = None
    ended: bool = False


@dataclass(slots=True)
class Communicators:
    handles: list[Handle] = field(default_factory=list)
    """The handles by number."""
    current: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of the current handle, by process and pointer."""
    repeated: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """The number of communicators of a process and device that the log describes identically."""

    def handle(self, process: str, device: int, pointer: str) -> int:
        """Return the number of the current handle for a call's pointer; add a handle if there is none."""
        handle = self.current.get((process, pointer))
        if handle is None or self.handles[handle].ended:
            handle = self._add(Handle(process, device), pointer)
        return handle

    def note(self, event: Event) -> None:
        if event.begins:
            name, reason = self._name(event)
            self._add(Handle(event.process, event.device, name, reason, event.rank, event.ranks), event.pointer)
        elif (handle := self.current.get((event.process, event.pointer))) is not None:
            self.handles[handle].ended = True

    def _add(self, handle: Handle, pointer: str) -> int:
        self.handles.append(handle)
        self.current[handle.process, pointer] = len(self.handles) - 1
        return len(self.handles) - 1

    def _name(self, event: Event) -> tuple[str | None, Reason | None]:
        alike = event.comm_id
        if alike is None and event.parent is not None:
            communicator = self.current.get((event.process, event.parent))
            parent = None if communicator is None else self.handles[communicator].name
            if parent is None:
                return None, "unknown parent"
            alike = f"{parent}/split{event.number or ''} color {event.color}"
        if alike is None:
            return None, "no init line"
        key = event.process, event.device, alike
        self.repeated[key] += 1
        return (alike if self.repeated[key] == 1 else f"{alike} ({self.repeated[key]})"), None


def unclear_names(handles: Iterable[Handle]) -> set[str]:
    """Return the names that may refer to more than one communicator."""
    members: dict[str, list[Handle]] = defaultdict(list)
    for handle in handles:
        if handle.name is not None:
            members[handle.name].append(handle)
    families: dict[str, list[str]] = defaultdict(list)
    for name in members:
        families[_REPEATED.sub("", name)].append(name)
    unclear: set[str] = set()
    for names in families.values():
        whole = [_is_whole(members[name]) for name in names]
        if not all(fits for fits, _ in whole) or (len(names) > 1 and not all(complete for _, complete in whole)):
            unclear.update(names)
    return unclear


def _is_whole(members: list[Handle]) -> tuple[bool, bool]:
    fits = len({handle.ranks for handle in members}) == 1 and len({handle.rank for handle in members}) == len(members)
    return fits, fits and len(members) == members[0].ranks


def find_nccl_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files and, of folders, the logs below. Raise UsageError if a folder has none or is unreadable."""
    files: list[Path] = []
    for path in paths:
        files += _in_folder(path) if path.is_dir() else [path]
    return files


def _in_folder(folder: Path) -> list[Path]:
    logs = _logs_below(folder, NCCL_FOLDER) or _logs_below(folder, NETWORK_FOLDER)
    if not logs:
        advice = (
            f"pass a log file, or the folder of a run with --nccl-trace ({NCCL_FOLDER}/*{NCCL_LOG_END}) or on several "
            f"nodes ({NETWORK_FOLDER}/*{NCCL_LOG_END})"
        )
        raise UsageError("no NCCL log in this folder", where=str(folder), choices=EXPECTED, do=advice)
    return sorted(logs, key=lambda path: (len(path.name), path.name))


def _logs_below(folder: Path, name: str) -> list[Path]:
    homes = [folder] if folder.name == name else sorted(folder.rglob(name))
    return [path for home in homes if home.is_dir() for path in list_folder(home) if path.name.endswith(NCCL_LOG_END)]


@dataclass(frozen=True, slots=True)
class Call:
    """A call by one rank on ``least`` to ``most`` elements, which differ if sizes are grouped by powers of two."""

    operation: str
    least: int
    most: int
    datatype: int
    handle: int
    """Number of the communicator's handle in ``NcclLog.handles``."""
    ranks: int


@dataclass(slots=True)
class Calls:
    """The number of calls, and their total number of elements."""

    number: int = 0
    elements: int = 0


@dataclass(slots=True)
class NcclLog:
    """The content of the logs of one run, all read together."""

    calls: dict[Call, Calls] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    """Handles in all files; their ``process`` begins with the file's position in the arguments, from 0."""
    steps: dict[int, dict[Kind, Calls]] = field(default_factory=dict)
    """The calls of each step, if steps are known."""
    coarse: bool = False
    """True if sizes are grouped by powers of two."""

    def add(self, call: Call, number: int) -> None:
        self._add(call, number, number * call.least)
        if len(self.calls) > MOST_KEYS + len(self.handles) and not self.coarse:
            self.coarse = True
            exact, self.calls = self.calls, {}
            for one, calls in exact.items():
                self._add(one, calls.number, calls.elements)

    def add_to_step(self, step: int, kinds: dict[Kind, Calls]) -> None:
        ranks = self.steps.setdefault(step, {})
        for kind, calls in kinds.items():
            sums = ranks.setdefault(kind, Calls())
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
    """Read the logs of ranks into one NcclLog.

    Raise UsageError for unreadable files, damaged step files or too many communicators.
    """
    log = NcclLog()
    for number, path in enumerate(paths):
        reader = _Reader(log, number)
        with open_file(path) as stream:
            try:
                reader.read(stream, _noted_steps(path))
            except OSError as error:
                raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
            except _TooMany as error:
                what, do = f"the logs have more than {MOST_HANDLES:,} communicators", "pass the logs of fewer ranks"
                raise UsageError(what, where=str(path), do=do) from error
    return log


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield a file in chunks of complete lines. Raise UsageError if it cannot be read."""
    with open_file(path) as stream:
        try:
            yield from (text for _, text in whole_lines(stream))
        except OSError as error:
            raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def describe_unread(paths: Iterable[Path]) -> str | None:
    """Describe the lines of NCCL or nccl-tests in files without usable content; None if there are no such lines."""
    lines, example, header = 0, b"", b""
    for text in (text for path in paths for text in read_lines(path)):
        matches = _NCCL_LINE.findall(text)
        lines += len(matches)
        example = example or (matches[0] if matches else b"")
        header = header or next(iter(_TABLE_HEADER.findall(text)), b"")
    if header:
        return f"a table without a row that fits its header: '{_quoted(header)}'"
    if lines:
        return f"{counted(lines, 'NCCL line')} without a network or a collective, such as '{_quoted(example)}'"
    return None


def _quoted(line: bytes) -> str:
    return printable(" ".join(line[:_MOST_QUOTED].decode("utf-8", "replace").split()))


def _noted_steps(path: Path) -> list[tuple[int, int | None]]:
    notes = path.with_suffix(NCCL_STEPS_END)
    if notes == path or not notes.exists():
        return []
    calls = []
    for number, line in enumerate(read_text_file(notes).splitlines(), start=1):
        if not (pair := _NOTE.fullmatch(line)):
            do = "remove this file, to read the log without numbers of steps"
            raise UsageError("this line is neither 'STEP OFFSET' nor 'end OFFSET'", where=f"{notes}:{number}", do=do)
        calls.append((int(pair[2]), None if pair[1] == b"end" else int(pair[1])))
    return sorted(calls, key=itemgetter(0))


def _calls(text: bytes) -> list[tuple[bytes, ...]]:
    """Return the process, device, operation and distinguishing text of each call."""
    bare: list[tuple[bytes, ...]] = _BARE_CALL.findall(b"\n" + text)
    return bare if len(bare) == text.count(_COUNTED) else _CALL.findall(text)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _TooMany(Exception):
    """The logs have more than ``MOST_HANDLES`` handles."""


class _Reader:
    def __init__(self, log: NcclLog, file: int) -> None:
        self.log = log
        self.file = file
        self.communicators = Communicators(log.handles)
        self.calls: dict[tuple[bytes, ...], Call | None] = {}
        """Cache of parsed calls, valid while their pointers refer to the same communicators."""
        self.waiting: dict[Kind, Calls] = {}
        """The calls of the current step."""

    def read(self, stream: BinaryIO, noted: Sequence[tuple[int, int | None]]) -> None:
        for position, text in whole_lines(stream):
            for part, step in _parts_noted(text, position, noted) if noted else _parts_ended(text):
                self._read_part(part)
                if step is not None:
                    self.log.add_to_step(step, self.waiting)
                if noted or step is not None:
                    self.waiting = {}

    def _read_part(self, part: bytes) -> None:
        for piece, event in split_at_events(part):
            for key, number in Counter(_calls(piece)).items():
                if key not in self.calls:
                    self.calls[key] = self._call(key)
                if call := self.calls[key]:
                    self.log.add(call, number)
                    sums = self.waiting.setdefault((call.operation, call.datatype, call.ranks), Calls())
                    sums.number += number
                    sums.elements += number * call.least
            if event:
                self.communicators.note(event._replace(process=f"{self.file}:{event.process}"))
            if event or len(self.calls) > MOST_KEYS:
                self.calls.clear()
            if len(self.log.handles) > MOST_HANDLES:
                raise _TooMany

    def _call(self, key: tuple[bytes, ...]) -> Call | None:
        process, device, operation, tail = key
        fields = _FIELDS.fullmatch(tail)
        if not fields:
            return None
        count, datatype, pointer, ranks = fields.groups()
        writer = f"{self.file}:{process_of(process, device)}"
        handle = self.communicators.handle(writer, int(device), pointer.decode(errors="replace"))
        return Call(operation.decode(), int(count), int(count), int(datatype), handle, int(ranks))


def whole_lines(stream: Readable) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of complete lines with their offsets; lines longer than a chunk are split."""
    position, rest = 0, b""
    while text := stream.read(CHUNK_BYTES):
        text = rest + text
        end = text.rfind(b"\n") + 1 or len(text)
        yield position, text[:end]
        position += end
        rest = text[end:]
    if rest:
        yield position, rest


def _parts_noted(
    text: bytes, position: int, noted: Sequence[tuple[int, int | None]]
) -> Iterator[tuple[bytes, int | None]]:
    offsets = [offset for offset, _ in noted]
    at = 0
    while at < len(text):
        after = bisect_right(offsets, position + at)
        end = min(len(text), offsets[after] - position) if after < len(offsets) else len(text)
        yield text[at:end], noted[after - 1][1] if after else None
        at = end


def _parts_ended(text: bytes) -> Iterator[tuple[bytes, int | None]]:
    at = 0
    for match in _STEP.finditer(text) if STEP_LINE_HEAD in text else ():
        yield text[at : match.start()], int(match[1])
        at = match.end()
    yield text[at:], None
