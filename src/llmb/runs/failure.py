# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that failed first, from a run's log, and the rank that a hung run waits for."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from llmb.base.errors import LlmbError
from llmb.base.options import numbers_of, parse_ranges
from llmb.catalogue.records import Record

Phase = Literal["start", "step", "profile", "checkpoint", "end"]
PHASE_LIMITS: dict[Phase, int] = {"start": 4, "step": 1, "profile": 12, "checkpoint": 12, "end": 1}
"""Multiples of the stall limit by phase."""
STALL = "llmb: stall: "
"""Prefix of the log line that describes the ranks that block a hung run."""
ENDING_S = 6.0
"""Time for the ranks to agree on the cause, log it, and exit."""
MOST_KINDS = 4
MOST_RANKS = 16


def time_to_notice(limit_s: float) -> float:
    """Return the seconds without progress after which ranks end the run; at most ``limit_s``."""
    return max(limit_s / 2, limit_s - ENDING_S)


class Wait(Record):
    """An unfinished collective of a rank: its sequence number in its group, and the participating ranks."""

    operation: str
    group: str
    label: str
    number: int
    ranks: str

    @property
    def text(self) -> str:
        return f"{self.operation} of group {self.label} (ranks {self.ranks})"


class Beat(Record):
    """The state that a rank reports; ``begun`` counts collectives by group, ``place`` is its main thread's line of
    code.
    """

    number: int
    rank: int
    host: str
    phase: Phase
    step: int
    idle_s: float
    place: str | None = None
    communicates: bool = False
    waits: tuple[Wait, ...] = ()
    begun: dict[str, int] = Field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        return bool(self.waits) or self.communicates


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last heartbeat of a rank, if there was one, and the seconds since."""

    rank: int
    beat: Beat | None
    silent_s: float


def find_stall(ranks: Sequence[RankStatus], limit_s: float, patience_s: float) -> str | None:
    """Describe the ranks that block a hung run, for the log; None while it may make progress."""
    silent = [status for status in ranks if status.silent_s > patience_s and not _left(status)]
    awake = [status.beat for status in ranks if status.beat and status.silent_s <= patience_s]
    lost = any(status.silent_s > limit_s * (1 if status.beat else PHASE_LIMITS["start"]) for status in silent)
    if not awake or not all(overdue(beat, limit_s) or (lost and beat.idle_s > limit_s) for beat in awake):
        return None
    if silent:
        return _join(_silent_text(silent, awake), _waits_text(awake))
    culprits = culprits_of(awake)
    others = [beat for beat in awake if beat not in culprits]
    if not culprits:
        step, idle = min(beat.step for beat in awake), min(beat.idle_s for beat in awake)
        head = f"no rank has made progress for {idle:.0f} s at step {step}, and none was found to block the others"
        return _join(head, _waits_text(others))
    return _join(_culprits_text(culprits), _waits_text(others))


def overdue(beat: Beat, limit_s: float) -> bool:
    return beat.idle_s > limit_s * PHASE_LIMITS[beat.phase]


def culprits_of(beats: Sequence[Beat]) -> list[Beat]:
    """Return the beats of ranks not communicating, else of ranks that others wait for and that wait for none."""
    outside = [beat for beat in beats if not beat.waiting]
    if outside:
        return outside
    waited_for = {beat.rank: _waits_for(beat, beats) for beat in beats}
    blocking = set().union(*waited_for.values())
    return [beat for beat in beats if beat.rank in blocking and not waited_for[beat.rank]]


def _waits_for(beat: Beat, beats: Sequence[Beat]) -> set[int]:
    missing = set()
    for wait in beat.waits:
        members = parse_ranks(wait.ranks)
        missing |= {other.rank for other in beats if other.rank in members and _begun(other, wait) < wait.number}
    return missing


def _begun(beat: Beat, wait: Wait) -> int:
    return beat.begun.get(wait.group, 0)


def _left(status: RankStatus) -> bool:
    """Return whether a rank is exiting, and so need not respond."""
    return status.beat is not None and status.beat.phase == "end"


def _silent_text(silent: Sequence[RankStatus], awake: Sequence[Beat]) -> str:
    beats = [status.beat for status in silent if status.beat]
    parts = []
    if beats:
        parts.append(f"{_who(beats)} stopped responding at step {min(beat.step for beat in awake or beats)}")
    if len(beats) < len(silent):
        parts.append(f"{_ranks(status.rank for status in silent if not status.beat)} never responded")
    return " and ".join(parts)


def _culprits_text(culprits: Sequence[Beat]) -> str:
    place = _where(culprits[0])
    has = "has" if len(culprits) == 1 else "have"
    idle = min(beat.idle_s for beat in culprits)
    return f"{_who(culprits)} {has} hung for {idle:.0f} s at step {culprits[0].step}, {place}"


def _where(beat: Beat) -> str:
    if beat.waits:
        return f"in {beat.waits[0].text}"
    place = f"at {beat.place}" if beat.place else "at an unknown place"
    return place if beat.communicates else f"in no collective, {place}"


def _waits_text(beats: Sequence[Beat]) -> str:
    kinds: dict[str, list[int]] = {}
    for beat in beats:
        if beat.waiting or beat.place:
            kinds.setdefault(f"in {beat.waits[0].text}" if beat.waits else f"at {beat.place}", []).append(beat.rank)
    parts = [f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {text}" for text, ranks in kinds.items()]
    more = [f"{len(parts) - MOST_KINDS} more groups of ranks"] if len(parts) > MOST_KINDS else []
    return "; ".join(parts[:MOST_KINDS] + more)


def _who(beats: Sequence[Beat]) -> str:
    hosts = list(dict.fromkeys(beat.host for beat in beats))
    more = f" and {len(hosts) - MOST_KINDS} more hosts" if len(hosts) > MOST_KINDS else ""
    return f"{_ranks(beat.rank for beat in beats)} on {', '.join(hosts[:MOST_KINDS])}{more}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {ranks_text(numbers, MOST_RANKS)}"


def _join(head: str, tail: str) -> str:
    return f"{head}; {tail}" if tail else head


def ranks_text(ranks: Iterable[int], most: int | None = None) -> str:
    """Format ranks as ``0, 1, 4-7``, with ranges for three or more; list at most ``most`` parts, then the total."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
    if most is not None and len(parts) > most:
        return f"{', '.join(parts[:most])} and more ({sum(map(len, runs))} in all)"
    return ", ".join(parts)


def parse_ranks(text: str) -> set[int]:
    """Parse ranks as ``ranks_text`` formats them without ``most``."""
    return set(numbers_of(parse_ranges(text.replace(", ", ",")))) if text else set()


def parse_heartbeats(raw: Mapping[int, tuple[bytes | None, float]]) -> list[RankStatus]:
    """Parse the heartbeats of ranks, each with the seconds since it changed."""
    return [
        RankStatus(rank, Beat.model_validate_json(text) if text else None, silent_s)
        for rank, (text, silent_s) in sorted(raw.items())
    ]


LONGEST_MESSAGE = 300
# Messages of ranks whose peer is gone: they are victims, not the cause.
VICTIM = re.compile(r"Connection (closed|reset) by|Broken pipe|Socket Timeout|remote process exited|NCCL.*abort", re.I)
_STALL_LINE = re.compile(rf"^{STALL}(?:(?P<who>ranks? [\d, -]+) on (?P<host>[\w.-]+) )?(?P<how>.*)$", re.MULTILINE)
_WORKER_LINE = re.compile(r"^llmb: rank (?P<rank>\d+) on (?P<host>\S+) failed: (?P<error>.*)$", re.MULTILINE)
# For a node that could not be made ready for its workers. The scheduler's own output may begin the line.
_NODE_LINE = re.compile(r"llmb: node (?P<host>\S+) failed: (?P<error>.*)$", re.MULTILINE)
# Lines of llmb.launch.ranks about ranks, in the order in which they ended.
_ENDED_LINE = re.compile(
    r"^llmb: rank (?P<rank>\d+) on (?P<host>\S+) "
    r"(?P<how>ended with exit code \d+|was killed by signal (?P<signal>\d+) \(\w+\))$",
    re.MULTILINE,
)
# Lines of srun about a failed task: a rank, or the launcher of a node's ranks.
_TASK = re.compile(r"^srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
_EXPECTED = ("Exited", "Terminated")
"""Ends of tasks that the log describes better elsewhere, or that srun caused itself."""
# After a rank that ended with no output, there are tracebacks of the others.
_TRACEBACK = re.compile(r"^Traceback \(most recent", re.MULTILINE)


def failure_line(rank: int, host: str, error: BaseException) -> str:
    """Return the last line that a worker prints when it fails."""
    text = error.what if isinstance(error, LlmbError) else f"{type(error).__name__}: {error}"
    message = " ".join(text.split())[:LONGEST_MESSAGE]
    return f"llmb: rank {rank} on {host} failed: {message}"


def first_failure(log: str) -> str | None:
    """Describe the rank, task or node that most likely failed first, and how; return None if the log names none."""
    failure = _find(log)
    return failure.sentence if failure else None


def failed_host(log: str) -> str | None:
    """Return the node of the first failure; None if it is unknown, or if a rank only lost a connection."""
    failure = _find(log)
    return failure.host if failure and not VICTIM.search(failure.how) else None


def last_lines(log: str, most: int) -> list[str]:
    """Return the last ``most`` lines up to the first failure, without later output of other ranks and the launcher."""
    failure = _find(log)
    end = failure.end if failure else None
    if end is None:
        after = [match.start() for pattern in (_TRACEBACK, _ENDED_LINE) if (match := pattern.search(log))]
        end = min(after, default=len(log))
        end = end if log[:end].strip() else len(log)
    return log[:end].splitlines()[-most:]


class _Failure(NamedTuple):
    how: str
    who: str | None = None
    """For example 'rank 3'; None if ``how`` is the full message."""
    host: str | None = None
    end: int | None = None

    @property
    def sentence(self) -> str:
        return self.how if self.who is None else f"{self.who} on {self.host} {self.how}"


def _find(log: str) -> _Failure | None:
    """Find the failure that caused the others. Which of them the launcher reports first is chance."""
    stalled = _STALL_LINE.search(log)
    if stalled:
        return _Failure(stalled["how"], stalled["who"], stalled["host"], stalled.end())
    unready = _NODE_LINE.search(log)
    if unready:
        return _Failure(f"failed: {unready['error']}", "setup", unready["host"], unready.end())
    ended = list(_ENDED_LINE.finditer(log))
    killed_rank = next((line for line in ended if line["signal"] not in (None, str(int(signal.SIGTERM)))), None)
    if killed_rank:  # SIGTERM is how the others are ended
        return _ended(killed_rank)
    lines = sorted(_WORKER_LINE.finditer(log), key=lambda line: bool(VICTIM.search(line["error"])))
    causes = [line for line in lines if not VICTIM.search(line["error"])]
    killed = next((task for task in _TASK.finditer(log) if not task["how"].startswith(_EXPECTED)), None)
    if killed and not causes:
        return _Failure(f"ended: {killed['how'].strip()}", f"task {killed['tasks']}", killed["host"])
    spoke = {line["rank"] for line in lines}
    silent = [line for line in ended if line["signal"] is None and line["rank"] not in spoke]
    if silent and not causes:
        return _ended(silent[0])
    if lines:
        line = lines[0]
        return _Failure(f"failed: {line['error']}", f"rank {line['rank']}", line["host"], line.end())
    return _ended(ended[0]) if ended else None


def _ended(line: re.Match[str]) -> _Failure:
    return _Failure(line["how"], f"rank {line['rank']}", line["host"])
