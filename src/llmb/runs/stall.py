# SPDX-License-Identifier: Apache-2.0
"""Which rank a run that stands still waits for. Pure: workers say where they are, this makes sense of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.options.ranges import numbers_of, parse_ranges

Phase = Literal["start", "step", "profile", "checkpoint", "end"]
PHASE_LIMITS: dict[Phase, int] = {"start": 4, "step": 1, "profile": 12, "checkpoint": 12, "end": 1}
"""How often the limit a phase may take: loading and compiling before the first step, and disks, are slow."""
STALL = "llmb: stall: "
"""What the line begins with that names the cause in a run's log."""
ENDING_S = 6.0
"""What it takes the ranks to agree on who is at fault, to say so, and to be ended."""
MOST_KINDS = 4
MOST_RANKS = 16


def time_to_notice(limit_s: float) -> float:
    """Seconds without progress after which ranks act, so that the run has ended when ``limit_s`` are over.

    A limit too short for that is cut in half: nobody should take a breath for a stall.
    """
    return max(limit_s / 2, limit_s - ENDING_S)


class Wait(Record):
    """A collective that a rank has begun and that is not done: which call of its group it is, and who takes part."""

    operation: str
    group: str
    label: str
    number: int
    ranks: str

    @property
    def text(self) -> str:
        return f"{self.operation} of group {self.label} (ranks {self.ranks})"


class Beat(Record):
    """What one rank says of itself. ``place`` is the line of code that its main thread is in.

    ``begun`` counts the collectives begun, by group; ``communicates`` is true where a rank may wait in something that
    is not recorded. Only a rank that has stood still for a while looks at its collectives and its place.
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
class Seen:
    """What is known of a rank: its last beat, if there was any, and for how long there was no other."""

    rank: int
    beat: Beat | None
    silent_s: float


def find_stall(ranks: Sequence[Seen], limit_s: float, patience_s: float) -> str | None:
    """Who holds the run up, for the log; null while it goes on, or may.

    A rank without news for ``patience_s`` does not answer. The run stands still when no rank that answers went on
    within its limit; or, with a rank that has not answered for the limit, when none went on for the limit at all.
    """
    silent = [seen for seen in ranks if seen.silent_s > patience_s and not _left(seen)]
    awake = [seen.beat for seen in ranks if seen.beat and seen.silent_s <= patience_s]
    lost = any(seen.silent_s > limit_s * (1 if seen.beat else PHASE_LIMITS["start"]) for seen in silent)
    if not awake or not all(overdue(beat, limit_s) or (lost and beat.idle_s > limit_s) for beat in awake):
        return None
    if silent:
        return _join(_silent_text(silent, awake), _waits_text(awake))
    culprits = held_up_by(awake)
    others = [beat for beat in awake if beat not in culprits]
    if not culprits:
        step, idle = min(beat.step for beat in awake), min(beat.idle_s for beat in awake)
        head = f"no rank has gone on for {idle:.0f} s at step {step}, and none is seen to hold up the others"
        return _join(head, _waits_text(others))
    return _join(_culprits_text(culprits), _waits_text(others))


def overdue(beat: Beat, limit_s: float) -> bool:
    return beat.idle_s > limit_s * PHASE_LIMITS[beat.phase]


def held_up_by(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks that are in no collective, or else those that others wait for while they wait for nobody."""
    outside = [beat for beat in beats if not beat.waiting]
    if outside:
        return outside
    waited_for = {beat.rank: _waits_for(beat, beats) for beat in beats}
    held = set().union(*waited_for.values())
    return [beat for beat in beats if beat.rank in held and not waited_for[beat.rank]]


def _waits_for(beat: Beat, beats: Sequence[Beat]) -> set[int]:
    """The ranks that have not begun a collective that ``beat`` is in."""
    missing = set()
    for wait in beat.waits:
        members = parse_ranks(wait.ranks)
        missing |= {other.rank for other in beats if other.rank in members and _begun(other, wait) < wait.number}
    return missing


def _begun(beat: Beat, wait: Wait) -> int:
    return beat.begun.get(wait.group, 0)


def _left(seen: Seen) -> bool:
    """Whether a rank ends, and thus need not answer any more."""
    return seen.beat is not None and seen.beat.phase == "end"


def _silent_text(silent: Sequence[Seen], awake: Sequence[Beat]) -> str:
    """The step is the one that the others wait in: the last beat of the silent ones is older."""
    known = [seen.beat for seen in silent if seen.beat]
    parts = []
    if known:
        parts.append(f"{_who(known)} stopped answering at step {min(beat.step for beat in awake or known)}")
    if len(known) < len(silent):
        parts.append(f"{_ranks(seen.rank for seen in silent if not seen.beat)} never answered")
    return " and ".join(parts)


def _culprits_text(culprits: Sequence[Beat]) -> str:
    place = _where(culprits[0])
    stands = "stands" if len(culprits) == 1 else "stand"
    idle = min(beat.idle_s for beat in culprits)
    return f"{_who(culprits)} {stands} still at step {culprits[0].step} for {idle:.0f} s, {place}"


def _where(beat: Beat) -> str:
    if beat.waits:
        return f"in {beat.waits[0].text}"
    place = f"at {beat.place}" if beat.place else "nobody knows where"
    return place if beat.communicates else f"in no collective, {place}"


def _waits_text(beats: Sequence[Beat]) -> str:
    """What ranks wait in, those that wait in the same together."""
    kinds: dict[str, list[int]] = {}
    for beat in beats:
        if beat.waiting or beat.place:
            kinds.setdefault(_wait_text(beat), []).append(beat.rank)
    parts = [f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {text}" for text, ranks in kinds.items()]
    more = [f"{len(parts) - MOST_KINDS} more kinds of waiting"] if len(parts) > MOST_KINDS else []
    return "; ".join(parts[:MOST_KINDS] + more)


def _wait_text(beat: Beat) -> str:
    return f"in {beat.waits[0].text}" if beat.waits else f"at {beat.place}"


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
    """``0, 1, 4-7``: three or more neighbours make a range. After ``most`` entries the rest is only counted."""
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
    """What ``ranks_text`` wrote, without a limit."""
    return set(numbers_of(parse_ranges(text.replace(", ", ",")))) if text else set()


def see(raw: Mapping[int, tuple[bytes | None, float]]) -> list[Seen]:
    """Ranks from their beats as they came over the wire, each with the seconds since it changed."""
    return [
        Seen(rank, Beat.model_validate_json(text) if text else None, silent_s)
        for rank, (text, silent_s) in sorted(raw.items())
    ]
