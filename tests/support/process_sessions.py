# SPDX-License-Identifier: Apache-2.0
"""The processes of a session, which a command and all that it starts are in."""

from pathlib import Path


def members(leader: int) -> list[Path]:
    """Files of Linux about the processes that live, by the id of the first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            found.append(entry)
    return found
