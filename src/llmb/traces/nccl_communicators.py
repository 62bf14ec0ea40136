# SPDX-License-Identifier: Apache-2.0
"""Which communicator a pointer in NCCL's log stands for.

A pointer belongs to one process, and to one communicator from the line that initializes it to the one that destroys it;
then it may be reused. ``node7:4001:4123 [3] NCCL INFO ncclCommInitRank comm 0x55.. rank 3 nranks 8 cudaDev 3 nvmlDev 3
busId 1b000 commId 0x9a.. - Init START``. ``commId`` is the same for all ranks. Splits have none from 2.23 on, but
``parent 0x44.. color 1 key 3``, from 2.24 on also ``splitCount 2`` (later ``childCount``), their number among those
of the parent. Until 2.20, splits with equal parent and color have the same commId. Formats: NCCL from 2.19 on,
``src/init.cc``.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_PROCESS, _DEVICE = rb"([^\s:]{1,255}+:\d{1,10}+):\d{1,10}+ ", rb"\[(\d{1,5})\] NCCL INFO "
WRITER = rb"(?<![^\s:])(?:" + _PROCESS + rb")?+" + _DEVICE
"""The process, if the line names it, and the device."""
BARE_WRITER = rb"\n" + _PROCESS + _DEVICE
"""A writer at the beginning of a line, which is found faster."""
_END = re.compile(rb"- (?:Init START|(?:Destroy|Abort) COMPLETE)")
_LINE = re.compile(
    WRITER + rb"[^\r\n]{0,100}?\bcomm (\S{1,40}) rank (\d{1,9}) nranks (\d{1,9}) cudaDev (\d{1,5})([^\r\n]{0,400}?) ?\Z"
)
_LONGEST_LINE = 2000
_COMM_ID = re.compile(rb" commId (\S+)")
_REPEATED = re.compile(r" \(\d+\)\Z")
_SPLIT = re.compile(rb" parent (\S+)(?: (?:split|child)Count (\d{1,9}))? color (-?\d{1,12}) key")

Reason = Literal["no init line", "unknown parent", "equal splits"]


class Event(NamedTuple):
    """A line that begins or ends the life of a pointer."""

    process: str
    device: int
    pointer: str
    rank: int
    ranks: int
    begins: bool
    comm_id: str | None
    parent: str | None
    number: str | None
    """Number of the split among those of its parent."""
    color: str | None


def process_of(process: bytes, device: bytes) -> str:
    """The process that wrote a line: host and process id, or the device if the line does not name them."""
    return (process or b"[%s]" % device).decode(errors="replace")


def split_at_events(text: bytes) -> Iterator[tuple[bytes, Event | None]]:
    """``text`` in parts, each but the last with the event at its end."""
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
    """A pointer of one process during one life."""

    process: str
    device: int
    name: str | None = None
    """The communicator: the same for all of its ranks, and for no other communicator."""
    reason: Reason | None = "no init line"
    """Why ``name`` is None."""
    rank: int | None = None
    ranks: int | None = None
    ended: bool = False


@dataclass(slots=True)
class Communicators:
    """The pointers of one file."""

    handles: list[Handle] = field(default_factory=list)
    """By number."""
    current: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of the handle that each pointer of a process now is."""
    repeated: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """How often a process has initialized what its lines describe alike."""

    def handle(self, process: str, device: int, pointer: str) -> int:
        """The number of the handle that a call uses."""
        known = self.current.get((process, pointer))
        if known is None or self.handles[known].ended:
            known = self._add(Handle(process, device), pointer)
        return known

    def note(self, event: Event) -> None:
        if event.begins:
            name, reason = self._name(event)
            self._add(Handle(event.process, event.device, name, reason, event.rank, event.ranks), event.pointer)
        elif (known := self.current.get((event.process, event.pointer))) is not None:
            self.handles[known].ended = True

    def _add(self, handle: Handle, pointer: str) -> int:
        self.handles.append(handle)
        self.current[handle.process, pointer] = len(self.handles) - 1
        return len(self.handles) - 1

    def _name(self, event: Event) -> tuple[str | None, Reason | None]:
        alike = event.comm_id
        if alike is None and event.parent is not None:
            known = self.current.get((event.process, event.parent))
            parent = None if known is None else self.handles[known].name
            if parent is None:
                return None, "unknown parent"
            alike = f"{parent}/split{event.number or ''} color {event.color}"
        if alike is None:
            return None, "no init line"
        key = event.process, event.device, alike
        self.repeated[key] += 1
        return (alike if self.repeated[key] == 1 else f"{alike} ({self.repeated[key]})"), None


def unclear_names(handles: Iterable[Handle]) -> set[str]:
    """The names that stand for more than one communicator, or may do so.

    Ranks number what their lines describe alike in the order of their own log. That is the same communicator on all of
    them unless some were in only one of two splits with equal parent and color.
    """
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
    """Whether these can be the ranks of one communicator, and whether they are all of them."""
    fits = len({handle.ranks for handle in members}) == 1 and len({handle.rank for handle in members}) == len(members)
    return fits, fits and len(members) == members[0].ranks
