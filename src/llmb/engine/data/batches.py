# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: their content, their samples, their copy to the device, and the thread that prepares them ahead."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from llmb.catalogue.records import Layout
from llmb.engine.device import Moment, Span
from llmb.engine.model.attention import DocumentSegments, document_segments
from llmb.engine.model.loss import IGNORED
from llmb.engine.parallel.context_parallel import rank_ranges
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.plan import EnginePlan

Parts = TypeVar("Parts", bound=tuple[Any, ...])


class MicroBatch(NamedTuple):
    """Tokens, labels and starts of complete sequences, [MBS, seq] each."""

    tokens: Tensor
    labels: Tensor
    starts: Tensor | None
    """Index at which each token's document begins; None if each sequence is one document."""
    taken: tuple[int, ...] | None = None
    """Number of tokens before the padding of each sequence; None means no padding."""
    segments: DocumentSegments | None = None
    """Documents of this rank's part of the sequences, for variable-length attention only."""


class TrainingData(Protocol):
    """Samples by number, which do not depend on the ranks, so that every layout trains on the same data."""

    def longest_document(self) -> int:
        """Return the maximum number of tokens in a document or the padding of any sample."""

    def micro_batch(self, numbers: range) -> MicroBatch:
        """Return the samples with these numbers, on the host. No token's label is from the next document."""


def rank_samples(layout: Layout, first_sample: int, dp_rank: int) -> Iterator[range]:
    """Yield the numbers of the samples in each micro-batch of a rank; all ranks together have GBS consecutive
    numbers."""
    for index in range(layout.ga):
        first = first_sample + (index * layout.dp + dp_rank) * layout.mbs
        yield range(first, first + layout.mbs)


def on_device(batches: Iterable[MicroBatch], device: torch.device, copies: list[Span]) -> Iterator[MicroBatch]:
    """Yield micro-batches on ``device``, copied to a GPU in advance; add the waits for copies to ``copies``."""
    if device.type != "cuda":
        for batch in batches:
            began = Moment(device)
            copy = moved(batch, device)
            copies.append((began, Moment(device)))
            yield copy
        return
    stream = copy_stream(device)
    ahead = None
    for batch in batches:
        with torch.cuda.stream(stream):
            coming = moved(batch, device)
        if ahead is not None:
            yield _ready(ahead, stream, copies)
        ahead = coming
    if ahead is not None:
        yield _ready(ahead, stream, copies)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the run's only stream for copies: torch has 32, shared with other uses, and caches memory for each."""
    return torch.cuda.Stream(device)


def moved(parts: Parts, device: torch.device) -> Parts:
    """Copy all tensors of a tuple to ``device``, without waiting for a GPU."""

    def move(part: object) -> object:
        if not isinstance(part, Tensor):
            return part
        return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)

    copies: Parts = tree_map(move, parts)
    return copies


def _ready(batch: MicroBatch, stream: torch.cuda.Stream, copies: list[Span]) -> MicroBatch:
    """Make the current stream wait for the copy, and the allocator keep the memory while that stream uses it."""
    current = torch.cuda.current_stream()
    began = Moment(current.device)
    current.wait_stream(stream)
    copies.append((began, Moment(current.device)))
    for part in tree_leaves(batch):
        if isinstance(part, Tensor):
            part.record_stream(current)
    return batch


STEPS_AHEAD = 1
"""Number of complete steps to keep ready, while the thread prepares the next one."""


class Figures(NamedTuple):
    """Sums over a rank's samples of a step or micro-batch; sums of squares are 0 if sequences are not packed."""

    tokens: int
    """Tokens without padding."""
    counted_labels: int
    sum_of_squares: int
    """Sum of squared document lengths."""
    chunked_sum_of_squares: int
    """Sum of squared lengths of attention chunks."""


@dataclass(frozen=True, slots=True)
class StepData:
    """This rank's micro-batches of a step, on the host, and their ``Figures``."""

    figures: Figures
    batches: Sequence[MicroBatch]
    wait_s: float = 0.0
    """Seconds for which training waited for the micro-batches."""
    copies: list[Span] = field(default_factory=list)
    """The beginning and the end of the device's wait for each micro-batch so far."""


class StepSource(Protocol):
    """Provides the data of steps, which must be requested in order."""

    def step(self, number: int) -> StepData: ...


@dataclass(frozen=True, slots=True)
class RankData:
    """One rank's samples of ``data``. varlen: True if documents are segments for variable-length attention."""

    data: TrainingData
    plan: EnginePlan
    dp_rank: int
    cp_rank: int
    varlen: bool
    longest: int
    """Maximum number of tokens in a document or padding."""

    def step(self, number: int) -> StepData:
        layout = self.plan.recipe.layout
        samples = rank_samples(layout, self.plan.samples_before(number), self.dp_rank)
        began = time.perf_counter()
        batches = [self._with_segments(self.data.micro_batch(numbers)) for numbers in samples]
        chunked = self.plan.recipe.model.chunked_attention
        each = [figures(batch, chunked.chunk_size if chunked else None) for batch in batches]
        total = Figures(*(sum(values) for values in zip(*each, strict=True)))
        return StepData(total, batches, time.perf_counter() - began)

    def _with_segments(self, batch: MicroBatch) -> MicroBatch:
        if batch.starts is None or not self.varlen:
            return batch
        model, layout = self.plan.recipe.model, self.plan.recipe.layout
        ranges = rank_ranges(layout.seq_len, self.cp_rank, layout.cp)
        return batch._replace(segments=document_segments(model, batch.starts, ranges, self.longest))


def rank_data(data: TrainingData, plan: EnginePlan, ranks: Ranks, *, varlen: bool) -> RankData:
    return RankData(data, plan, ranks.dp_rank, ranks.cp_rank, varlen, data.longest_document())


def figures(batch: MicroBatch, chunk_size: int | None) -> Figures:
    counted = int((batch.labels != IGNORED).sum())
    if batch.starts is None:
        return Figures(batch.tokens.numel(), counted, 0, 0)
    filled = batch.taken or (batch.tokens.shape[1],) * len(batch.tokens)
    lengths = torch.cat([document_lengths(row[:end]) for row, end in zip(batch.starts, filled, strict=True)])
    size = chunk_size or batch.tokens.shape[1]
    squares = int(lengths.square().sum())
    chunked = int(((lengths // size) * size**2 + (lengths % size).square()).sum())
    return Figures(sum(filled), counted, squares, chunked)


def document_lengths(starts: Tensor) -> Tensor:
    """Return the lengths of a sequence's documents, [documents] int64. starts: its row of ``MicroBatch.starts``."""
    lengths: Tensor = torch.unique_consecutive(starts, return_counts=True)[1]
    return lengths


class Loader:
    """Prepares the data of steps ``first`` to ``last`` in a thread, which ends with the context."""

    def __init__(self, source: RankData, first: int, last: int) -> None:
        self.source = source
        self.ready: queue.Queue[StepData | Exception] = queue.Queue(STEPS_AHEAD)
        self.ended = threading.Event()
        self.next = first
        self.thread = threading.Thread(target=self._prepare, args=(first, last), name="data", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        while self.thread.is_alive():  # it may wait for a place in the queue, which may be full again
            with suppress(queue.Empty):
                self.ready.get(timeout=0.01)

    def step(self, number: int) -> StepData:
        """Return the data of the next step; raise the thread's error, or ValueError if ``number`` is another step."""
        if number != self.next:
            raise ValueError(f"the loader is at step {self.next}, not {number}")
        self.next += 1
        began = time.perf_counter()
        prepared = self.ready.get()
        if isinstance(prepared, Exception):
            raise prepared
        return replace(prepared, wait_s=time.perf_counter() - began)

    def _prepare(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            try:
                prepared: StepData | Exception = self.source.step(number)
            except Exception as error:  # noqa: BLE001 (raised again by the thread that trains)
                prepared = error
            self.ready.put(prepared)
            if self.ended.is_set() or isinstance(prepared, Exception):
                return
