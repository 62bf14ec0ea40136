# SPDX-License-Identifier: Apache-2.0
"""Reads what NCCL's RAS answers, as text (NCCL from 2.24, RCCL from 2.28) or JSON (from 2.28.7).

RAS counts collectives that were launched, not completed; no sends and receives, and none of CUDA graphs. Formats:
``src/ras/client_support.cc`` of NCCL 2.24 to 2.30.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from llmb.catalogue.record import Record, first_problem
from llmb.missing import Missing
from llmb.shown_text import counted
from llmb.traces.nccl_suspects import Count, Given, Kind, Name, Suspect, Whole, in_order, suspects_text

MOST_BYTES = 1 << 26
"""That of 10,000 GPUs in 6 communicators each, as JSON."""
HEAD_BYTES = 4096
"""The beginning of a file, by which its form is known."""
CUT = "the answer of RAS is truncated"


class RasStatus(Record):
    """The state of a job, as one of its processes has learned it from the others."""

    nccl_version: str
    gpus: int | None
    """All of the job, as far as NCCL knows them."""
    communicators: int
    suspects: tuple[Suspect, ...]
    """The first ones are most likely the cause."""
    notes: tuple[str, ...]


_VERSION = re.compile(r"^(?:NCCL|RCCL) version (\S{1,60}) compiled with ", re.MULTILINE)


def is_ras(head: str) -> bool:
    """By the beginning of a file."""
    return _is_json(head) or bool(_VERSION.search(head) and "\nJob summary\n" in head.replace("\r", ""))


def _is_json(text: str) -> bool:
    return text[:HEAD_BYTES].lstrip().startswith("{") and '"communicators"' in text[:HEAD_BYTES]


def read_ras(answer: bytes) -> RasStatus | Missing:
    text = answer.decode(errors="replace")
    if _is_json(text):
        return _read_json(text)
    found = _VERSION.search(text)
    return _read_text(text.replace("\r", ""), found[1]) if found else Missing("it is not an answer of NCCL's RAS")


def ras_text(status: RasStatus, host_of: Mapping[int, str] | None = None) -> str:
    """In one line; ``host_of`` has the names of nodes by the program's ranks."""
    if status.suspects:
        return suspects_text(status.suspects, host_of)
    count = counted(status.communicators, "communicator")
    same = f"all ranks of {count} answer and have launched the same operations"
    return "; ".join((same if status.communicators else "no communicator is known", *status.notes))


class _State(Given):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(Given):
    rank: Whole
    host: Name = "unknown"
    pid: int = -1
    cuda_dev: int = -1
    status: _State = _State()
    collective_counts: dict[Name, Whole] = Field(default_factory=dict)

    @property
    def gpu(self) -> tuple[str, int, int]:
        return self.host, self.pid, self.cuda_dev


class _Communicator(Given):
    hash: Name = ""
    size: Whole
    ranks: tuple[_Rank, ...]
    missing_ranks: tuple[_Rank, ...] = ()

    @property
    def members(self) -> tuple[_Rank, ...]:
        return (*self.ranks, *self.missing_ranks)


class _Collection(Given):
    timeouts_count: int = 0


class _Answer(Given):
    nccl_version: Name
    communicators: tuple[_Communicator, ...]
    ras: _Collection = _Collection()


_NO_COMMA = re.compile(r'("nvml_dev": -?\d{1,9})(\s{1,40}"status")')
"""NCCL 2.28.7 and 2.28.9 write this of a missing rank."""
_FINE = (0, 7)
"""ncclSuccess, ncclInProgress."""
_ERRORS = ("", "CUDA", "system", "internal", "invalid argument", "invalid usage", "remote process")


def _read_json(text: str) -> RasStatus | Missing:
    try:
        answer = _Answer.model_validate_json(_NO_COMMA.sub(r"\1,\2", text))
    except ValidationError as error:
        return Missing(f"the JSON of NCCL's RAS cannot be read: {first_problem(error)[1]}")
    gpus = {rank.gpu for one in answer.communicators for rank in one.members}
    whole = next((one for one in answer.communicators if one.size == len(gpus) == len(one.members)), None)
    programs = {rank.gpu: rank.rank for rank in whole.members} if whole else {}
    found = [item for one in answer.communicators for item in _unlike(one, programs)]
    counts = [group for one in answer.communicators for group in _counted(one, programs)]
    return RasStatus(
        nccl_version=answer.nccl_version,
        gpus=len(gpus),
        communicators=len(answer.communicators),
        suspects=in_order(found, counts),
        notes=_notes(answer.ras.timeouts_count),
    )


def _suspect(one: _Communicator, rank: _Rank, programs: Mapping[tuple[str, int, int], int]) -> Suspect:
    return Suspect(
        kind="behind",
        rank=rank.rank,
        program_rank=programs.get(rank.gpu),
        ranks=one.size,
        communicator=one.hash.removeprefix("0x"),
        node=rank.host if rank.host != "unknown" else None,
        pid=rank.pid if rank.pid >= 0 else None,
        gpu=rank.cuda_dev if rank.cuda_dev >= 0 else None,
    )


def _unlike(one: _Communicator, programs: Mapping[tuple[str, int, int], int]) -> Iterator[Suspect]:
    usual = next(iter(Counter(_state(rank.status) for rank in one.ranks).most_common(1)), ("", 0))[0]
    for rank in one.missing_ranks:
        kind: Kind = "dead" if rank.status.considered_dead else "silent" if rank.status.unresponsive else "absent"
        yield _suspect(one, rank, programs).model_copy(update={"kind": kind})
    for rank in one.ranks:
        if found := _trouble(rank.status, usual):
            yield _suspect(one, rank, programs).model_copy(update={"kind": found[0], "detail": found[1]})


def _trouble(status: _State, usual: str) -> tuple[Kind, str] | None:
    code = next((code for code in (status.async_error, status.init_state) if code not in _FINE), None)
    if code is not None:
        return "error", _ERRORS[code] if 0 < code < len(_ERRORS) else f"number {code}"
    state = _state(status)
    return ("state", state) if state != usual else None


def _state(status: _State) -> str:
    """Named as in the text."""
    if status.abort_flag:
        return "ABORT"
    if status.finalize_called or status.destroy_flag:
        return "FINALIZE"
    return "INIT" if status.init_state else "RUNNING"


def _counted(one: _Communicator, programs: Mapping[tuple[str, int, int], int]) -> Iterator[list[Count]]:
    named: list[Suspect] = []
    for operation in dict.fromkeys(name for rank in one.ranks for name in rank.collective_counts):
        numbers = [rank.collective_counts.get(operation, 0) for rank in one.ranks]
        if len(set(numbers)) > 1:
            named = named or [_suspect(one, rank, programs) for rank in one.ranks]
            yield [Count(item, number, operation) for item, number in zip(named, numbers, strict=True)]


def _notes(timeouts: int, *more: str) -> tuple[str, ...]:
    late = f"NCCL waited in vain for {counted(timeouts, 'answer')} of other processes"
    return (*([late] if timeouts else []), *more)


_SUMMARY = re.compile(r"^ *\d+(?: +\d+){1,3} +(\d{1,9})$", re.MULTILINE)
_GROUP = re.compile(r"^ *(\d{1,9}) +(\d{1,9}) +\d+ +[\d-]+ +(\d{1,9}) +\d+ +[A-Z]+ +[A-Z,]+$", re.MULTILINE)
_PLACE = (
    r" -- (?:GPU (?P<gpu>\d{1,4})(?: \(NVML \d+\))? managed by process (?P<pid>\d{1,9}) on node (?P<node>\S{1,100})"
    r"|\[process information not found\])"
)
_LAUNCHED = r"launched (?:up to operation (?P<launched>\d{1,19})|any operations)"
_REPORTED = r"reported (?P<error>.{1,60}?)"
_SAID = rf"(?:has|have)(?: not)? {_LAUNCHED}|(?:has|have) status (?P<state>[A-Z]{{1,20}})|{_REPORTED}"
_RANK = re.compile(rf"  Rank (?P<rank>\d{{1,9}})(?: (?P<said>{_SAID}))?(?:{_PLACE})?")
_MANY = re.compile(rf"  (?P<count>\d{{1,9}}) ranks (?:{_SAID})")
_LISTED = re.compile(r"  The (?:missing|unknown) ranks?: (\d{1,9}(?:,\d{1,9}){0,2000})")
_PROCESS = re.compile(r"  Process (?P<pid>\d{1,9}) on node (?P<node>\S{1,100}) managing GPUs? (?P<gpu>\d{1,4})?.*")
_HEADING = re.compile(r"#(\d{1,9})-\d+ \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_COUNTING = re.compile(r"  Communicator ranks have different (\S{1,40}) operation counts")
_TIMEOUTS = re.compile(r"^  Encountered (\d{1,9}) communication timeouts? ", re.MULTILINE)
_KIND_OF: Mapping[str, Kind] = {"INCOMPLETE": "silent", "DEAD": "dead", "ERROR": "error", "MISMATCH": "state"}
_ABSENT = ("NOCOMM", "UNKNOWN")
_Found = Mapping[str, str | None]


@dataclass(slots=True)
class _TextReader:
    """Line by line: what a line says of a rank depends on the lines above it."""

    sizes: Mapping[str, int]
    gpus: int | None
    about: Suspect = field(default_factory=lambda: Suspect(kind="silent"))
    """What the next lines are about: the communicator, the kind, the operation."""
    group: _Found | None = None
    """What was said of several ranks, some of which may follow by name."""
    rest: int = 0
    suspects: list[Suspect] = field(default_factory=list)
    counts: list[list[Count]] = field(default_factory=list)

    def read(self, line: str) -> None:
        if found := _HEADING.fullmatch(line):
            size = self.sizes.get(found[1])
            self._begin(Suspect(kind=_KIND_OF[found[3]], communicator=found[2], ranks=size))
        elif line in ("DEAD", "INCOMPLETE", "Warnings"):
            self._begin(Suspect(kind=_KIND_OF.get(line, "silent")))
        elif found := _COUNTING.fullmatch(line):
            operation = None if found[1] == "collective" else found[1]
            self._begin(self.about.model_copy(update={"kind": "behind", "operation": operation}))
            self.counts.append([])
        elif found := _MANY.fullmatch(line):
            self._begin(self.about)
            self.group, self.rest = found.groupdict(), int(found["count"])
        elif found := _RANK.fullmatch(line):
            self._rank(int(found["rank"]), found.groupdict())
        elif found := _LISTED.fullmatch(line):
            for number in found[1].split(","):
                self._rank(int(number), {})
        elif found := _PROCESS.fullmatch(line):
            self.suspects.append(self.about.model_copy(update=_place(found.groupdict())))

    def _begin(self, about: Suspect) -> None:
        """Ends what was said of several ranks, with those that no line has named."""
        if self.group and self.about.kind == "behind" and self.rest > 0:
            others = self.about.model_copy(update={"detail": f"{self.rest} ranks"})
            self.counts[-1].append(Count(others, int(self.group["launched"] or 0), others.operation))
        self.about, self.group, self.rest = about, None, 0

    def _rank(self, rank: int, found: _Found) -> None:
        said = found
        if self.group and not found.get("said"):
            said, self.rest = self.group, self.rest - 1
        whole = self.gpus is not None and self.about.ranks == self.gpus
        named = {"rank": rank, "program_rank": rank if whole else None, **_place(found)}
        item = self.about.model_copy(update=named)
        if item.kind == "behind":
            self.counts[-1].append(Count(item, int(said.get("launched") or 0), item.operation))
        elif item.kind == "state" and said.get("state") in (None, *_ABSENT):
            self.suspects.append(item.model_copy(update={"kind": "absent"}))
        else:
            self.suspects.append(item.model_copy(update={"detail": said.get("state") or said.get("error")}))


def _place(found: _Found) -> dict[str, str | int | None]:
    numbers = {key: int(text) if (text := found.get(key)) else None for key in ("pid", "gpu")}
    return {"node": found.get("node"), **numbers}


def _read_text(text: str, version: str) -> RasStatus:
    summary, _, rest = text.partition("\nCommunicators...")
    groups = _GROUP.findall(rest.partition("\nErrors\n")[0])
    totals = _SUMMARY.findall(summary)
    gpus = int(totals[-1]) if totals and rest else None
    reader = _TextReader({number: int(size) for number, _, size in groups}, gpus)
    for line in (*rest.split("\n"), "Warnings"):
        reader.read(line)
    timeouts = _TIMEOUTS.search(rest)
    return RasStatus(
        nccl_version=version,
        gpus=gpus,
        communicators=sum(int(count) for _, count, _ in groups),
        suspects=in_order(_joined(reader.suspects), [group for group in reader.counts if group]),
        notes=_notes(int(timeouts[1]) if timeouts else 0, *([] if "\nWarnings\n========\n" in rest else [CUT])),
    )


def _joined(suspects: Sequence[Suspect]) -> Iterator[Suspect]:
    """A process has lines of its own and with its ranks; that it is considered dead, only the former say."""
    dead = {(item.node, item.pid) for item in suspects if item.kind == "dead"}
    ranks = {(item.node, item.pid) for item in suspects if item.rank is not None}
    for item in suspects:
        process = item.node, item.pid
        if item.rank is not None or process not in ranks:
            yield item.model_copy(update={"kind": "dead"}) if item.node and process in dead else item
