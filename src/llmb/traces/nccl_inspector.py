# SPDX-License-Identifier: Apache-2.0
"""Reads what NCCL's Inspector writes, a line of JSON for each collective that a process has completed.

The collectives of a communicator are numbered by kind, so that ranks can be compared: whoever has completed the fewest
holds up the others. A collective ends on all ranks together; the rank on which it takes the least time was the last to
begin, and the others waited for it. Formats 4.0 and 5.0: ``inspector.cc`` and ``inspector_json.cc`` of NCCL.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from llmb.catalogue.record import Record
from llmb.input_files import open_regular
from llmb.traces.nccl_suspects import Count, Given, Name, Suspect, Whole, in_order

INSPECTOR_END = ".log"
TAIL_BYTES = 1 << 18
"""Read of each file: some 600 collectives."""
MOST_FILES = 4096
FEWEST, LEAST_SHARE = 20, 0.5
"""Collectives to compare, and the share of them in which the same process has to be the last to begin."""
LEAST_WAIT = 0.2
"""Share of a collective's time that ranks have to wait for its last one, to tell that from chance."""
MS = 1000


class Late(Record):
    """The process that was the last to begin most collectives."""

    node: str
    pid: int
    rank: int
    """In the last communicator of which it was."""
    ranks: int
    times: int
    collectives: int
    waited_s: float
    """By the others in each of ``times``; the median."""


class Inspected(Record):
    """The last collectives of a job."""

    processes: int
    collectives: int
    """The records that were read, one of each rank for a collective."""
    suspects: tuple[Suspect, ...]
    """Ranks that have completed fewer than others."""
    late: Late | None


class _Header(Given):
    id: Name
    rank: Whole
    n_ranks: Whole


class _Metadata(Given):
    hostname: Name
    pid: Whole


class _Performance(Given):
    coll: Name
    coll_sn: Whole
    coll_exec_time_us: Whole


class _Line(Given):
    header: _Header
    metadata: _Metadata
    coll_perf: _Performance

    @property
    def process(self) -> tuple[str, int]:
        return self.metadata.hostname, self.metadata.pid


_HEAD = re.compile(r'\s*\{\s*"header"\s*:\s*\{[^\n]*"metadata"')


def is_inspector(head: str) -> bool:
    """By the beginning of a file."""
    return _HEAD.match(head) is not None


def read_inspector(tails: Iterable[bytes]) -> Inspected | None:
    """``tails`` are the ends of files; a line that is cut is left out. None if none is of a collective."""
    lines = [line for tail in tails for line in _lines(tail)]
    if not lines:
        return None
    return Inspected(
        processes=len({line.process for line in lines}),
        collectives=len(lines),
        suspects=in_order((), _completed(lines)),
        late=_late(_last_to_begin(lines)),
    )


def inspect_folder(folder: Path) -> Inspected | None:
    """None if there is no such folder, or no file in it has a collective."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(INSPECTOR_END))
    except OSError:
        return None
    return read_inspector(inspector_tails(paths[:MOST_FILES]))


def inspector_tails(paths: Iterable[Path]) -> Iterator[bytes]:
    """The ends of files, without those that cannot be read."""
    for path in paths:
        try:
            with open_regular(path) as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
                yield stream.read(TAIL_BYTES)
        except OSError:
            continue


def late_text(item: Late) -> str:
    return (
        f"rank {item.rank} of a communicator of {item.ranks} ranks on {item.node} (process {item.pid}) was the last to "
        f"begin {item.times} of {item.collectives} collectives, for {MS * item.waited_s:.3g} ms each"
    )


def _lines(tail: bytes) -> Iterator[_Line]:
    for text in tail.splitlines():
        try:
            yield _Line.model_validate_json(text)
        except ValidationError:  # cut, or not of a collective
            continue


def _completed(lines: Iterable[_Line]) -> list[list[Count]]:
    last: dict[tuple[str, str], dict[int, _Line]] = {}
    for line in lines:
        of_rank = last.setdefault((line.header.id, line.coll_perf.coll), {})
        before = of_rank.get(line.header.rank)
        if before is None or line.coll_perf.coll_sn > before.coll_perf.coll_sn:
            of_rank[line.header.rank] = line
    return [
        [Count(_suspect(line), line.coll_perf.coll_sn, operation) for line in of_rank.values()]
        for (_, operation), of_rank in last.items()
    ]


def _suspect(line: _Line) -> Suspect:
    return Suspect(
        kind="unfinished",
        rank=line.header.rank,
        ranks=line.header.n_ranks,
        communicator=line.header.id.removeprefix("0x"),
        node=line.metadata.hostname,
        pid=line.metadata.pid,
    )


def _last_to_begin(lines: Iterable[_Line]) -> Iterator[tuple[_Line, float | None]]:
    """The last rank of each collective that all its ranks have written, and how long others waited, in microseconds;
    None if they hardly did.
    """
    each: dict[tuple[str, str, int], dict[int, _Line]] = {}
    for line in lines:
        of_rank = each.setdefault((line.header.id, line.coll_perf.coll, line.coll_perf.coll_sn), {})
        of_rank[line.header.rank] = line
    for of_rank in each.values():
        last, *others = sorted(of_rank.values(), key=lambda line: line.coll_perf.coll_exec_time_us)
        if others and len(of_rank) >= last.header.n_ranks:
            usual_us = median(line.coll_perf.coll_exec_time_us for line in others)
            wait_us = usual_us - last.coll_perf.coll_exec_time_us
            yield last, wait_us if wait_us > LEAST_WAIT * usual_us else None


def _late(found: Iterable[tuple[_Line, float | None]]) -> Late | None:
    each = list(found)
    waited = [(line, wait_us) for line, wait_us in each if wait_us is not None]
    process, times = next(iter(Counter(line.process for line, _ in waited).most_common(1)), (None, 0))
    if process is None or len(each) < FEWEST or times < LEAST_SHARE * len(each):
        return None
    own: Sequence[tuple[_Line, float]] = [(line, wait_us) for line, wait_us in waited if line.process == process]
    header = own[-1][0].header
    return Late(
        node=process[0],
        pid=process[1],
        rank=header.rank,
        ranks=header.n_ranks,
        times=times,
        collectives=len(each),
        waited_s=median(wait_us for _, wait_us in own) / 1e6,
    )
