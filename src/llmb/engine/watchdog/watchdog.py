# SPDX-License-Identifier: Apache-2.0
"""A thread in every rank that ends the run if it hangs, and the rank if the process that started it is gone."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from llmb.engine.parallel.store import store_host
from llmb.engine.watchdog.flight_recorder import Collectives, main_thread_location, pending_collectives
from llmb.engine.watchdog.heartbeat import LONGEST_TICK_S, Heartbeats, Position, Progress
from llmb.resources.host import host_name
from llmb.runs.failure import PHASE_LIMITS, STALL, Beat, Seen, find_stall, overdue, see, time_to_notice
from llmb.runs.folder import RunFolder
from llmb.runs.parent_death import has_ended
from llmb.runs.plan import EnginePlan

LAUNCHER_PID = "LLMB_LAUNCHER_PID"
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.25, 2.0
SHORTEST_PATIENCE_S = 2.0
MOST_STACKS = 8
"""Number of ranks that print their stacks; the ranks that block the run always do."""
MOST_FRAMES = 30
LONGEST_REPORT_S = 2.0
"""Time limit for printing: the disk of the log may be what hangs."""
STALLED = 1


def start_watchdog(plan: EnginePlan, folder: RunFolder, progress: Progress) -> None:
    """Starts the watchdog of this rank, which ends with the process."""
    launcher = int(os.environ.pop(LAUNCHER_PID, "0"))
    watchdog = Watchdog(plan, folder, progress, launcher)
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()


class Watchdog:
    """Watches the launcher and, if the plan has a limit, the progress of the run.

    While a run makes progress, a rank sends a few bytes to the store at intervals, and rank 0 reads them. Only without
    progress does a rank look at its collectives, and do ranks other than 0 read.
    """

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
            if self._is_orphan():
                _say(f"llmb: rank {self.rank} on {self.host} ends: the process that started it is gone")
                os._exit(STALLED)
            now = time.monotonic()
            if self.limit_s and now - before >= self.interval_s:
                self._look(min(now - before, LONGEST_TICK_S))
                before = now
            time.sleep(SHORTEST_INTERVAL_S)

    def _is_orphan(self) -> bool:
        """Whether its parent or, on a single machine, ``llmb run`` is gone, neither of which a rank must outlive."""
        return os.getppid() != self.parent or (self.launcher != 0 and has_ended(self.launcher))

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
        found, where, communicates = Collectives((), {}), None, False
        if self.idle_s > self.limit_s / 2:
            found = pending_collectives(saving=position.phase == "checkpoint")
            where, communicates = main_thread_location()
            # If nothing is recorded, such as with a disabled flight recorder, the rank may be waiting in anything.
            communicates = communicates or not found.begun
            if self.begun not in (None, found.begun):
                self.idle_s = 0.0  # A long step that still begins collectives makes progress.
            self.begun = found.begun
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
            waits=found.waits,
            begun=found.begun,
        )

    def _verdict(self, beat: Beat) -> str | None:
        """The cause of the hang. Rank 0 determines it; if it does not, the next ranks do, a few at a time."""
        over_s = beat.idle_s - self.limit_s * PHASE_LIMITS[beat.phase]
        # As long before its turn as it takes to tell who is silent.
        soon_s = over_s + self.patience_s + 2 * self.interval_s
        self.heartbeats.reading = has_turn(self.rank, soon_s, self.patience_s)
        if not has_turn(self.rank, over_s, self.patience_s):
            return None
        if overdue(beat, self.limit_s) and self.heartbeats.unanswered_s > self.patience_s:
            return self._without_store(beat)
        if beat.idle_s < self.limit_s:
            return None
        return find_stall(self._seen(), self.limit_s, self.patience_s)

    def _seen(self) -> list[Seen]:
        return see({rank: (heard.text, heard.silent_s) for rank, heard in self.heartbeats.heard.items()})

    def _without_store(self, beat: Beat) -> str:
        waits = f"in {beat.waits[0].text}" if beat.waits else f"at {beat.place}"
        return (
            f"{store_host()}, which hosts the run's store, stopped responding at step {beat.step}; "
            f"rank {beat.rank} on {beat.host} waits {waits}"
        )

    def _end(self, beat: Beat, verdict: str | None = None) -> None:
        """Logs the cause, on the rank that determined it, and this rank's stacks; then ends this rank."""
        lines = [STALL + verdict] if verdict else []
        if self.rank < MOST_STACKS or not beat.waiting:
            lines += [f"llmb: rank {self.rank} on {self.host} at step {beat.step}:", *stacks()]
        _say("\n".join(lines))
        time.sleep(self.interval_s + 0.5)  # The others have to read the verdict before this process ends.
        if verdict:
            _attempt(lambda: self.folder.stall.write_text(verdict + "\n"))
        os._exit(STALLED)


def has_turn(rank: int, over_s: float, patience_s: float) -> bool:
    """Whether a rank judges that made no progress for ``over_s`` beyond its limit: 0 always, then 1, 2 to 3, 4 to 7.

    A few at a time, because each reads the heartbeats of all ranks, from one store.
    """
    return rank == 0 or over_s >= patience_s * rank.bit_length()


def stacks() -> list[str]:
    """The stacks of this process's threads, except those of the watchdog."""
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
    """Runs an action that may hang, and returns in time in any case."""

    def attempt() -> None:
        try:
            action()
        except OSError:
            return  # a full or missing disk must not keep the run from ending

    thread = threading.Thread(target=attempt, name="watchdog-report", daemon=True)
    thread.start()
    thread.join(LONGEST_REPORT_S)
