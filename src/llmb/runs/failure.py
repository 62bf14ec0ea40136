# SPDX-License-Identifier: Apache-2.0
"""The end of a run's log, and which rank failed first by it."""

import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from llmb.errors import LlmbError
from llmb.input_files import open_regular
from llmb.runs.stall import STALL

TAIL_BYTES = 64 * 1024


def tail(path: Path) -> str:
    """The last ``TAIL_BYTES`` of a log, of the latest attempt alone; empty when there is none."""
    if not path.exists():
        return ""
    with open_regular(path) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
        return latest_attempt(stream.read().decode(errors="replace"))


ATTEMPT = "llmb: attempt "
"""What the line begins with that separates a run's attempts in its log."""
LONGEST_MESSAGE = 300
# Messages of ranks whose peer is gone: they are victims, not the cause.
VICTIM = re.compile(r"Connection (closed|reset) by|Broken pipe|Socket Timeout|remote process exited|NCCL.*abort", re.I)

_STALL_LINE = re.compile(rf"^{STALL}(?:(?P<who>ranks? [\d, -]+) on (?P<host>[\w.-]+) )?(?P<how>.*)$", re.MULTILINE)
_WORKER_LINE = re.compile(r"^llmb: rank (?P<rank>\d+) on (?P<host>\S+) failed: (?P<error>.*)$", re.MULTILINE)
# Of a node that could not be made ready for its workers. The scheduler's own output may begin its line.
_NODE_LINE = re.compile(r"llmb: node (?P<host>\S+) failed: (?P<error>.*)$", re.MULTILINE)
# What llmb.processes.ranks reports of a rank, in the order in which they ended.
_ENDED_LINE = re.compile(
    r"^llmb: rank (?P<rank>\d+) on (?P<host>\S+) "
    r"(?P<how>ended with exit code \d+|was killed by signal (?P<signal>\d+) \(\w+\))$",
    re.MULTILINE,
)

# What srun reports of a failed task: a rank, or the launcher of a node's ranks.
_TASK = re.compile(r"^srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
_EXPECTED = ("Exited", "Terminated")
"""Ends that the log describes better elsewhere, or that srun caused itself."""

# What follows a rank that ended with no output: traces of the others.
_TRACEBACK = re.compile(r"^Traceback \(most recent", re.MULTILINE)


def failure_line(rank: int, host: str, error: BaseException) -> str:
    """What a worker prints last when it fails."""
    text = error.what if isinstance(error, LlmbError) else f"{type(error).__name__}: {error}"
    message = " ".join(text.split())[:LONGEST_MESSAGE]
    return f"llmb: rank {rank} on {host} failed: {message}"


def first_failure(log: str) -> str | None:
    """The rank that most likely failed first, and how; None if the log names none."""
    found = _find(log)
    return found.sentence if found else None


def failed_host(log: str) -> str | None:
    """The node of the rank that failed first; None if only its victims are known."""
    found = _find(log)
    return found.host if found and not VICTIM.search(found.how) else None


def latest_attempt(log: str) -> str:
    """The part of a log that the run's latest attempt wrote."""
    began = log.rfind(f"\n{ATTEMPT}")
    return log if began < 0 else log[began + 1 :]


def last_lines(log: str, most: int) -> list[str]:
    """The lines that lead to the first failure, without the output of its victims and the launcher after it."""
    found = _find(log)
    end = found.end if found else None
    if end is None:
        after = [match.start() for pattern in (_TRACEBACK, _ENDED_LINE) if (match := pattern.search(log))]
        end = min(after, default=len(log))
        end = end if log[:end].strip() else len(log)
    return log[:end].splitlines()[-most:]


class _Failure(NamedTuple):
    """Who failed and how, and where the log's line about it ends, if the rank itself or another one wrote one."""

    how: str
    who: str | None = None
    """Such as 'rank 3'; None if ``how`` is the full message."""
    host: str | None = None
    end: int | None = None

    @property
    def sentence(self) -> str:
        return self.how if self.who is None else f"{self.who} on {self.host} {self.how}"


def _find(log: str) -> _Failure | None:
    """A hung run was ended by the watchdog: what follows in the log comes from that. A node that was not ready ended
    the run before any worker could fail.

    Else a rank killed from outside comes first, then one that failed by itself, then a task that srun saw killed, then
    a rank that ended silently, then one that lost its connection: which of them the launcher saw first is a matter of
    chance.
    """
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
    own = [line for line in lines if not VICTIM.search(line["error"])]
    killed = next((task for task in _TASK.finditer(log) if not task["how"].startswith(_EXPECTED)), None)
    if killed and not own:
        return _Failure(f"ended: {killed['how'].strip()}", f"task {killed['tasks']}", killed["host"])
    spoke = {line["rank"] for line in lines}
    silent = [line for line in ended if line["signal"] is None and line["rank"] not in spoke]
    if silent and not own:
        return _ended(silent[0])
    if lines:
        line = lines[0]
        return _Failure(f"failed: {line['error']}", f"rank {line['rank']}", line["host"], line.end())
    return _ended(ended[0]) if ended else None


def _ended(line: re.Match[str]) -> _Failure:
    return _Failure(line["how"], f"rank {line['rank']}", line["host"])
