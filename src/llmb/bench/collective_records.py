# SPDX-License-Identifier: Apache-2.0
"""The protocol of the program that measures collectives: one job for all ranks in, one result of all ranks out."""

from typing import Literal

from llmb.bench.collectives import Collective
from llmb.bench.jobs import DeviceReport
from llmb.catalogue.records import Record

PROGRAM = "llmb.bench.worker.collectives"
JOB, RESULT = "collectives_job.json", "collectives_result.json"
"""Files in the folder that the program is called with."""


class CollectiveJob(Record):
    """What every rank measures, in this order. ``sizes`` in bytes."""

    device: Literal["cpu", "cuda"]
    collectives: tuple[Collective, ...]
    sizes: tuple[int, ...]
    limited_by_memory: bool = False
    """Sizes that do not fit are left out; else they are an error."""
    warm_ups: int
    iterations: int


class Way(Record):
    """Calls out of place, or in place."""

    time_s: float
    """Of one call: the mean of all iterations and ranks, as in nccl-tests."""
    wrong: int | None
    """Elements of all ranks that differ from the expected result; None where there is no expected result."""


class CollectiveRow(Record):
    """One collective at one size. A way is None if the library has no such call."""

    collective: Collective
    size_bytes: int
    count: int
    out_of_place: Way | None
    in_place: Way | None


class NotTimed(Record):
    """A size and all larger ones, or without a size a whole collective, that could not be measured."""

    collective: Collective
    size_bytes: int | None
    reason: str
    out_of_memory: bool = False


class RankReport(Record):
    """One rank, and where it ran."""

    rank: int
    node: str
    local_rank: int
    pid: int
    device: str
    bus_id: str | None
    """Of the GPU, as in ``0000:04:00``."""


class CollectiveResult(Record):
    """What rank 0 writes."""

    backend: str
    device: DeviceReport
    """Of rank 0."""
    ranks: tuple[RankReport, ...]
    rows: tuple[CollectiveRow, ...]
    not_timed: tuple[NotTimed, ...]

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(rank.node for rank in self.ranks))
