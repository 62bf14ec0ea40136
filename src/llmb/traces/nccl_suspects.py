# SPDX-License-Identifier: Apache-2.0
"""Ranks that are unlike the others of their communicator, by what NCCL says of a job, and in words. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from llmb.catalogue.record import Record

MOST_NAMED = 4

Kind = Literal["dead", "silent", "error", "absent", "state", "behind", "unfinished"]
ORDER: tuple[Kind, ...] = get_args(Kind)
"""The first ones have the others as consequences."""


class Suspect(Record):
    """A rank, a process, or several ranks that NCCL does not name."""

    kind: Kind
    rank: int | None = None
    """In the communicator; None if no single rank is named."""
    program_rank: int | None = None
    """Its number in the communicator of all GPUs of the job, which is the program's; None if that is not known."""
    ranks: int | None = None
    """Size of the communicator."""
    communicator: str | None = None
    node: str | None = None
    """For RAS its address."""
    pid: int | None = None
    gpu: int | None = None
    operation: str | None = None
    """The collective; None also where NCCL counts all of them together."""
    operations: int | None = None
    """How many it has launched, or completed."""
    behind: int | None = None
    """By how many fewer these are than those of others."""
    detail: str | None = None


class Given(BaseModel):
    """Part of a JSON document of NCCL. What is not needed is not looked at."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, defer_build=True)


Name = Annotated[str, Field(max_length=256)]
Whole = Annotated[int, Field(ge=0, lt=1 << 64)]


@dataclass(frozen=True, slots=True)
class Count:
    """How many operations a rank, or several that are not named, have launched or completed."""

    of: Suspect
    number: int
    operation: str | None


def in_order(suspects: Iterable[Suspect], counts: Sequence[Sequence[Count]]) -> tuple[Suspect, ...]:
    """The most likely cause first. ``counts`` are of one operation in one communicator each.

    Whoever is behind in one communicator, but waits in another one for those behind there, is left out.
    """
    waiting = {_gpu(count.of) for group in counts for count in _ahead(group)}
    behind = sorted((item for group in counts for item in _behind(group)), key=lambda item: -(item.behind or 0))
    causes = [item for item in behind if _gpu(item) not in waiting] or behind
    return (*sorted(suspects, key=lambda item: ORDER.index(item.kind)), *causes)


def _ahead(counts: Sequence[Count]) -> Iterator[Count]:
    """Whoever waits for others."""
    least, most = min(count.number for count in counts), max(count.number for count in counts)
    return (count for count in counts if least < most == count.number and count.of.rank is not None)


def _behind(counts: Sequence[Count]) -> Iterator[Suspect]:
    most = max(count.number for count in counts)
    for count in counts:
        if count.number < most:
            own = {"operation": count.operation, "operations": count.number, "behind": most - count.number}
            yield count.of.model_copy(update=own)


def _gpu(item: Suspect) -> tuple[object, ...]:
    """A GPU in a process, which is one rank in each of its communicators."""
    return (item.node, item.pid, item.gpu) if item.pid is not None else (item.communicator, item.rank)


def suspects_text(suspects: Sequence[Suspect], host_of: Mapping[int, str] | None = None) -> str:
    """All of the first kind, each once, in one line; ``host_of`` has the names of nodes by the program's ranks."""
    each: dict[tuple[object, ...], Suspect] = {}
    for item in suspects:
        if item.kind == suspects[0].kind:
            each.setdefault(_gpu(item), item)
    found = list(each.values())
    named = "; ".join(_text(item, host_of or {}) for item in found[:MOST_NAMED])
    return named + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")


def _text(item: Suspect, host_of: Mapping[int, str]) -> str:
    own = item.program_rank
    number = item.rank if own is None else own
    who = f"rank {number}" if number is not None else item.detail if item.operations is not None else "a process"
    node = item.node if own is None else host_of.get(own, item.node)
    parts = [f"{name} {value}" for name, value in (("process", item.pid), ("GPU", item.gpu)) if value is not None]
    where = (f" on {node}" if node else "") + (f" ({', '.join(parts)})" if parts else "")
    return f"{who}{where} {said_of(item)}"


def said_of(item: Suspect) -> str:
    within = f"a communicator of {item.ranks} ranks" if item.ranks else "a communicator"
    match item.kind:
        case "dead":
            return "does not answer and is considered dead"
        case "silent":
            return "does not answer"
        case "error":
            return f"reports an error in {within}: {item.detail}"
        case "absent":
            return f"has left {within}"
        case "state":
            return f"is in state {item.detail} in {within}, unlike the others"
    verb = ("has " if item.rank is not None else "have ") + ("launched" if item.kind == "behind" else "completed")
    operations = f"{item.operation} operations" if item.operation else "operations"
    return f"{verb} {item.operations} {operations}, {item.behind} fewer than others of {within}"
