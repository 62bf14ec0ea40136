# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first, from a run's log. Pure, but for the one function that words a worker's own line."""

import re
import signal

LONGEST_MESSAGE = 300
# What ranks say whose peer went away: they are victims, not the cause.
VICTIM = re.compile(r"Connection (closed|reset) by|Broken pipe|Socket Timeout|remote process exited|NCCL.*abort", re.I)

_WORKER_LINE = re.compile(r"^llmb: rank (?P<rank>\d+) on (?P<host>\S+) failed: (?P<error>.*)$", re.MULTILINE)
# An entry of the report that torch.distributed.run ends a failed run with.
_ENTRY = re.compile(r"host\s*: (?P<host>\S+)\s+rank\s*: (?P<rank>\d+) .*\s+exitcode\s*: (?P<code>-?\d+) ")


def failure_line(rank: int, host: str, error: BaseException) -> str:
    """What a worker prints last when it fails."""
    message = " ".join(str(error).split())[:LONGEST_MESSAGE]
    return f"llmb: rank {rank} on {host} failed: {type(error).__name__}: {message}"


def first_failure(log: str) -> str | None:
    """The rank that most likely failed first, and how; null when the log names none.

    A rank killed from outside comes first, then one that failed by itself, then one that lost its connection: which of
    them the launcher saw first is a matter of chance.
    """
    killed = [entry for entry in _ENTRY.finditer(log) if int(entry["code"]) < 0]
    for entry in killed:
        number = -int(entry["code"])
        if number != signal.SIGTERM:  # which is how the launcher ends the others
            return f"rank {entry['rank']} on {entry['host']} was killed by signal {number} ({_signal_name(number)})"
    lines = sorted(_WORKER_LINE.finditer(log), key=lambda line: bool(VICTIM.search(line["error"])))
    if lines:
        return f"rank {lines[0]['rank']} on {lines[0]['host']} failed: {lines[0]['error']}"
    entries = list(_ENTRY.finditer(log))
    return (
        f"rank {entries[0]['rank']} on {entries[0]['host']} ended with exit code {entries[0]['code']}"
        if entries
        else None
    )


def _signal_name(number: int) -> str:
    known = {item.value: item.name for item in signal.Signals}
    return known.get(number, "unknown")
