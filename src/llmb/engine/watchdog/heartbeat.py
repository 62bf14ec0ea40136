# SPDX-License-Identifier: Apache-2.0
"""Sends this rank's heartbeat to the other ranks through the run's store, and reads theirs."""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store

from llmb.engine.parallel.store import connect
from llmb.runs.failure import Phase


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is in its training."""

    phase: Phase
    step: int


class Progress:
    """Set by the training thread, at the cost of an assignment, and read by the watchdog."""

    def __init__(self, step: int) -> None:
        self.enter("start", step)

    def enter(self, phase: Phase, step: int) -> None:
        self.position = Position(phase, step)


LONGEST_TICK_S = 5.0
"""A thread that slept much longer than intended was itself stopped or starved, and must not blame others for it."""
VERDICT = "llmb/verdict"


@dataclass(slots=True)
class LastHeartbeat:
    """A rank's last heartbeat as received, and the time for which it has not changed."""

    text: bytes | None = None
    silent_s: float = 0.0


class Heartbeats:
    """A thread with its own connection, because a store in a stopped process never responds to a request.

    The watchdog reads and sets the attributes; ``unanswered_s`` grows while the store does not respond.
    """

    def __init__(self, rank: int, world_size: int, interval_s: float) -> None:
        self.rank = rank
        self.interval_s = interval_s
        self.beat = ""
        self.reading = False
        self.heard = {other: LastHeartbeat() for other in range(world_size)}
        self.verdict: str | None = None
        self.to_publish: str | None = None
        self.answered = time.monotonic()

    def start(self, connect_within_s: float) -> None:
        thread = threading.Thread(target=self._run, args=(connect_within_s,), name="watchdog-heartbeat", daemon=True)
        thread.start()

    @property
    def unanswered_s(self) -> float:
        return time.monotonic() - self.answered

    def _run(self, connect_within_s: float) -> None:
        patience = timedelta(seconds=connect_within_s)
        while True:
            try:
                self._serve(connect(patience))
            except RuntimeError:
                # A lost connection; or the run ends and the store has gone before this process.
                time.sleep(self.interval_s)

    def _serve(self, store: Store) -> None:
        # Below the patience of every limit, so that no single pause of this thread is taken for silence of the others.
        longest_s = min(2 * self.interval_s, LONGEST_TICK_S)
        before = time.monotonic()
        while True:
            now = time.monotonic()
            self._exchange(store, min(now - before, longest_s))
            before, self.answered = now, time.monotonic()
            time.sleep(self.interval_s)

    def _exchange(self, store: Store, elapsed_s: float) -> None:
        if self.to_publish:
            store.set(VERDICT, self.to_publish)
        if self.beat:
            store.set(_key(self.rank), self.beat)
        if self.reading:
            self._read(store, elapsed_s)
        if store.check([VERDICT]):
            self.verdict = store.get(VERDICT).decode()

    def _read(self, store: Store, elapsed_s: float) -> None:
        # Asking for a key that is not there would wait for it.
        known = [rank for rank, heard in self.heard.items() if heard.text or store.check([_key(rank)])]
        texts = dict(zip(known, store.multi_get([_key(rank) for rank in known]), strict=True)) if known else {}
        for rank, heard in self.heard.items():
            text = texts.get(rank)
            heard.silent_s = heard.silent_s + elapsed_s if text == heard.text else 0.0
            heard.text = text


def _key(rank: int) -> str:
    return f"llmb/beat/{rank}"
