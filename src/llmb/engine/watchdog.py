# SPDX-License-Identifier: Apache-2.0
"""A thread in each rank that ends the process if the run hangs or its launcher has ended."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, takewhile
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from llmb.base.parent_death import has_ended
from llmb.engine.parallel.rendezvous import connect, store_host
from llmb.readers.samples.host import host_name
from llmb.runs.failure import (
    PHASE_LIMITS,
    STALL,
    Beat,
    Phase,
    Wait,
    find_stall,
    overdue,
    parse_heartbeats,
    ranks_text,
    time_to_notice,
)
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that dump the flight recorders of gloo and, if torch is built with it, of NCCL."""
DISTRIBUTED = str(Path(dist.__file__).parent)
PROJECT = str(Path(__file__).parents[1])
CHECKPOINT_GROUP = "checkpoint"
"""Description of the process groups that save checkpoints in parallel with training; see ``Saver``."""


class Collectives(NamedTuple):
    """A rank's oldest unfinished collective of gloo, or else of NCCL, and the number begun in each group."""

    waits: tuple[Wait, ...]
    begun: dict[str, int]


def pending_collectives(*, saving: bool) -> Collectives:
    """Return this rank's collectives, with checkpoint collectives only if training waits for the save (``saving``)."""
    waits: list[Wait] = []
    begun: dict[str, int] = {}
    dumps: list[Callable[[bool, bool], bytes]] = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]
    for entry in chain.from_iterable(json.loads(dump(True, False)).get("entries", ()) for dump in dumps):
        group, label = entry["process_group"]
        if entry["is_p2p"] or (label == CHECKPOINT_GROUP and not saving):
            continue
        begun[group] = max(begun.get(group, 0), entry["collective_seq_id"])
        if not entry["retired"] and entry["state"] != "completed":
            operation = entry["profiling_name"].partition(":")[2]
            shown, number = label if label != "undefined" else group, entry["collective_seq_id"]
            members = ranks_text(_members(group))
            waits.append(Wait(operation=operation, group=group, label=shown, number=number, ranks=members))
    return Collectives(tuple(waits[:1]), begun)


def _members(group: str) -> list[int]:
    try:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))  # type: ignore[arg-type]
    except RuntimeError:  # the group is destroyed, or not yet registered
        return []


def main_thread_location() -> tuple[str | None, bool]:
    """Return the line of llmb at which the main thread is, if known, and True if it is in torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None, False
    frames = [outer for outer, _ in traceback.walk_stack(frame)]
    inside = list(takewhile(lambda outer: not _is_in(PROJECT, outer), frames))
    communicates = any(_is_in(DISTRIBUTED, outer) for outer in inside)
    own = frames[min(len(inside), len(frames) - 1)]
    inner = frames[0]
    text = _line(own) if own is inner else f"{_line(own)}, in {_line(inner)}"
    return text, communicates


def _is_in(folder: str, frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


@dataclass(frozen=True, slots=True)
class Position:
    """The phase and the step of a rank."""

    phase: Phase
    step: int


class Progress:
    """This rank's position, set by the training thread with a single assignment and read by the watchdog."""

    def __init__(self, step: int) -> None:
        self.enter("start", step)

    def enter(self, phase: Phase, step: int) -> None:
        self.position = Position(phase, step)


LONGEST_TICK_S = 5.0
"""Maximum seconds counted per tick: a thread that slept longer was itself stopped, and must not blame other ranks."""
VERDICT = "llmb/verdict"


@dataclass(slots=True)
class LastHeartbeat:
    """A rank's last heartbeat as received, and the seconds for which it has not changed."""

    text: bytes | None = None
    silent_s: float = 0.0


class Heartbeats:
    """Exchanges heartbeats in a thread with its own connection, because requests block if the store does not
    respond."""

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
                # The connection is lost, or the run is ending and the store has already closed.
                time.sleep(self.interval_s)

    def _serve(self, store: Store) -> None:
        # Shorter than any patience, so that no single pause of this thread is taken for silence of other ranks.
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
        # Reading a key that does not exist would block until it does.
        ranks = [rank for rank, heard in self.heard.items() if heard.text or store.check([_key(rank)])]
        texts = dict(zip(ranks, store.multi_get([_key(rank) for rank in ranks]), strict=True)) if ranks else {}
        for rank, heard in self.heard.items():
            text = texts.get(rank)
            heard.silent_s = heard.silent_s + elapsed_s if text == heard.text else 0.0
            heard.text = text


def _key(rank: int) -> str:
    return f"llmb/beat/{rank}"


LAUNCHER_PID = "LLMB_LAUNCHER_PID"
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.25, 2.0
SHORTEST_PATIENCE_S = 2.0
MOST_STACKS = 8
"""Ranks below this number print their stacks, as do all ranks that block the run."""
MOST_FRAMES = 30
LONGEST_REPORT_S = 2.0
"""Time limit in seconds for writing to the log or the run folder, whose disk may hang."""
STALLED = 1


def start_watchdog(plan: EnginePlan, folder: RunFolder, progress: Progress) -> None:
    """Start this rank's watchdog as a daemon thread."""
    launcher = int(os.environ.pop(LAUNCHER_PID, "0"))
    watchdog = Watchdog(plan, folder, progress, launcher)
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()


class Watchdog:
    """Ends this rank if its launcher has ended or, if the plan has a limit, if the run hangs."""

    def __init__(self, plan: EnginePlan, folder: RunFolder, progress: Progress, launcher: int) -> None:
        self.rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = host_name()
        self.limit_s = time_to_notice(plan.stall_limit_s)
        self.interval_s = min(max(self.limit_s / 20, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)
        self.patience_s = max(4 * self.interval_s, SHORTEST_PATIENCE_S)
        self.folder = folder
        self.progress = progress
        self.heartbeats = Heartbeats(self.rank, world_size, self.interval_s)
        self.parent, self.launcher = os.getppid(), launcher
        self.beats = 0
        self.idle_s = 0.0
        self.position: Position | None = None
        self.begun: dict[str, int] | None = None

    def run(self) -> None:
        if self.limit_s:
            self.heartbeats.start(self.limit_s * PHASE_LIMITS["start"])
        before = time.monotonic()
        while True:
            # A rank must outlive neither its parent nor, on a single machine, ``llmb run``.
            if os.getppid() != self.parent or (self.launcher != 0 and has_ended(self.launcher)):
                _say(f"llmb: rank {self.rank} on {self.host} exits: the process that started it has ended")
                os._exit(STALLED)
            now = time.monotonic()
            if self.limit_s and now - before >= self.interval_s:
                self._look(min(now - before, LONGEST_TICK_S))
                before = now
            time.sleep(SHORTEST_INTERVAL_S)

    def _look(self, elapsed_s: float) -> None:
        beat = self._beat(elapsed_s)
        self.heartbeats.beat = beat.model_dump_json()
        if self.heartbeats.verdict:
            self._end(beat)
        text = self._verdict(beat)
        if text:
            self.heartbeats.to_publish = text
            self._end(beat, text)

    def _beat(self, elapsed_s: float) -> Beat:
        position = self.progress.position
        self.idle_s = self.idle_s + elapsed_s if position is self.position else 0.0
        self.position = position
        self.beats += 1
        collectives, where, communicates = Collectives((), {}), None, False
        if self.idle_s > self.limit_s / 2:
            collectives = pending_collectives(saving=position.phase == "checkpoint")
            where, communicates = main_thread_location()
            # Without records, for example if the flight recorder is disabled, the rank may be waiting for others.
            communicates = communicates or not collectives.begun
            if self.begun not in (None, collectives.begun):
                self.idle_s = 0.0  # A long step that still begins collectives makes progress.
            self.begun = collectives.begun
        else:
            self.begun = None
        return Beat(
            number=self.beats,
            rank=self.rank,
            host=self.host,
            phase=position.phase,
            step=position.step,
            idle_s=self.idle_s,
            place=where,
            communicates=communicates,
            waits=collectives.waits,
            begun=collectives.begun,
        )

    def _verdict(self, beat: Beat) -> str | None:
        over_s = beat.idle_s - self.limit_s * PHASE_LIMITS[beat.phase]
        # Begin to read early enough to have detected silent ranks by this rank's turn.
        soon_s = over_s + self.patience_s + 2 * self.interval_s
        self.heartbeats.reading = has_turn(self.rank, soon_s, self.patience_s)
        if not has_turn(self.rank, over_s, self.patience_s):
            return None
        if overdue(beat, self.limit_s) and self.heartbeats.unanswered_s > self.patience_s:
            waits = f"in {beat.waits[0].text}" if beat.waits else f"at {beat.place}"
            return (
                f"{store_host()}, which hosts the run's store, stopped responding at step {beat.step}; "
                f"rank {beat.rank} on {beat.host} waits {waits}"
            )
        if beat.idle_s < self.limit_s:
            return None
        seen = parse_heartbeats({rank: (heard.text, heard.silent_s) for rank, heard in self.heartbeats.heard.items()})
        return find_stall(seen, self.limit_s, self.patience_s)

    def _end(self, beat: Beat, verdict: str | None = None) -> None:
        lines = [STALL + verdict] if verdict else []
        if self.rank < MOST_STACKS or not beat.waiting:
            lines += [f"llmb: rank {self.rank} on {self.host} at step {beat.step}:", *stacks()]
        _say("\n".join(lines))
        time.sleep(self.interval_s + 0.5)  # The others have to read the verdict before this process ends.
        if verdict:
            _attempt(lambda: self.folder.stall.write_text(verdict + "\n"))
        os._exit(STALLED)


def has_turn(rank: int, over_s: float, patience_s: float) -> bool:
    """Return True if ``rank`` may look for a hang's cause, ``over_s`` seconds after the limit; rank 0 always may."""
    return rank == 0 or over_s >= patience_s * rank.bit_length()


def stacks() -> list[str]:
    """Return the innermost frames of all threads of this process, except the watchdog's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("watchdog"):
            lines.append(f"thread {name}, most recent call last:")
            lines += "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).splitlines()
    return lines


def _say(text: str) -> None:
    _attempt(lambda: sys.stderr.write(text + "\n" if text else ""))


def _attempt(action: Callable[[], object]) -> None:
    def attempt() -> None:
        try:
            action()
        except OSError:
            return  # a full or missing disk must not keep the run from ending

    thread = threading.Thread(target=attempt, name="watchdog-report", daemon=True)
    thread.start()
    thread.join(LONGEST_REPORT_S)
