# SPDX-License-Identifier: Apache-2.0
"""Asks NCCL for the state of a run that makes no progress, through the RAS port that its processes open on their node.

The port is asked by a process of the run alone, on an address of the machine itself, and an answer is used only if the
connection is to a process of the same run: others may listen there as well.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

import ipaddress
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.engine.nccl_request import nccl_setting
from llmb.missing import Missing
from llmb.runs.folder import RunFolder
from llmb.shown_text import printable
from llmb.traces.nccl_inspector import inspect_folder
from llmb.traces.nccl_ras import MOST_BYTES, ras_text, read_ras
from llmb.traces.nccl_suspects import suspects_text

ADDRESS, ENABLED = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
DEFAULT_ADDRESS = "localhost:28028"
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]+)):(\d{1,5})")
PATIENCE_S = 10.0
"""For all of the answer. NCCL waits up to 5 s longer for processes that do not answer than it is asked to."""
NCCL_WAITS_S = 3
GREETING_S = 1.0
"""A process that is stopped takes connections, but never answers."""
MOST_TRIES = 16
"""All processes of a user that listen on the same port take turns, whichever job they are of."""
CHUNK_BYTES = 1 << 16
LONGEST_LINE = 200
LATE = "it has not answered in time"
OTHER_PROGRAM = "what answers is another program"


class Refused(Exception):
    """Why there is no answer."""


@dataclass(frozen=True, slots=True)
class NcclAnswer:
    """What NCCL says of a run that makes no progress."""

    text: str = ""
    """In one line; empty if it says nothing."""
    answer: bytes | None = None
    """The whole answer of RAS."""
    reason: str | None = None
    """Why RAS has not answered."""


class NcclQuestion:
    """Asked in a thread, as the answer may take a while: RAS waits for processes that do not answer."""

    def __init__(self, folder: RunFolder, host_of: Mapping[int, str]) -> None:
        self._said = NcclAnswer(reason=LATE)
        self._thread = threading.Thread(target=self._ask, args=(folder, host_of), name="nccl-question", daemon=True)
        self._thread.start()

    def said(self, within_s: float) -> NcclAnswer:
        self._thread.join(within_s)
        return self._said

    def _ask(self, folder: RunFolder, host_of: Mapping[int, str]) -> None:
        found = _said_by_ras(folder, host_of)
        inspected = inspect_folder(folder.nccl_inspector)
        if inspected and inspected.suspects:
            text = f"NCCL's Inspector: {suspects_text(inspected.suspects)}"
            found = replace(found, text="; ".join(filter(None, (found.text, text))))
        self._said = replace(found, text=printable(found.text))


def _said_by_ras(folder: RunFolder, host_of: Mapping[int, str]) -> NcclAnswer:
    try:
        if nccl_setting(ENABLED, "1") == "0":
            return NcclAnswer(reason=f"{ENABLED}=0")
        answer = ask_ras(folder.path, nccl_setting(ADDRESS) or DEFAULT_ADDRESS)
    except Refused as why:
        return NcclAnswer(reason=str(why))
    except OSError as error:
        return NcclAnswer(reason=f"{error.strerror or error}")
    status = read_ras(answer)
    if isinstance(status, Missing):
        return NcclAnswer(reason=status.reason)
    return NcclAnswer(f"NCCL: {ras_text(status, host_of)}", answer)


def ask_ras(run: Path, address: str, patience_s: float = PATIENCE_S) -> bytes:
    """The answer of a process of the run with the folder ``run``. Raises Refused, or OSError if there is none."""
    end = time.monotonic() + patience_s
    here = _own_address(address)
    for _ in range(MOST_TRIES):
        with socket.create_connection(here, timeout=_left(end)) as connection:
            lines = _Lines(connection, min(end, time.monotonic() + GREETING_S))
            try:
                greeting = lines.ask("CLIENT PROTOCOL 2")
            except TimeoutError:
                continue
            if not greeting.startswith("SERVER PROTOCOL "):
                raise Refused(OTHER_PROGRAM)
            if _is_of_run(connection, run):
                lines.end = end
                lines.ask(f"TIMEOUT {NCCL_WAITS_S}")
                lines.ask("SET FORMAT json")  # NCCL before 2.28.7 answers with an error, and then with text
                return lines.last("VERBOSE STATUS")
    raise Refused(f"the process that answers on {address} is not of this run")


def _own_address(text: str) -> tuple[str, int]:
    """Raises Refused for one that others than this machine may answer, or that is none."""
    found = _ADDRESS.fullmatch(text)
    host, port = (found[1] or found[2], int(found[3])) if found else ("", 0)
    if host == "localhost":
        return host, port
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return ("::1" if address.version == 6 else "127.0.0.1"), port
        if address.is_loopback:
            return str(address), port
    raise Refused(f"{ADDRESS} is '{text}', no loopback address")


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError(LATE)
    return left


class _Lines:
    """Commands, each answered with a line, but for the last one."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self.connection = connection
        self.end = end
        self.rest = b""

    def ask(self, command: str) -> str:
        self._send(command)
        while b"\n" not in self.rest:
            if len(self.rest) > LONGEST_LINE or not (part := self._receive()):
                raise Refused(OTHER_PROGRAM)
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode(errors="replace")

    def last(self, command: str) -> bytes:
        self._send(command)
        parts, size = [self.rest], len(self.rest)
        while part := self._receive():
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise Refused(f"its answer is larger than {MOST_BYTES >> 20} MiB")
        return b"".join(parts)

    def _send(self, command: str) -> None:
        self.connection.settimeout(_left(self.end))
        self.connection.sendall(f"{command}\n".encode())

    def _receive(self) -> bytes:
        self.connection.settimeout(_left(self.end))
        return self.connection.recv(CHUNK_BYTES)


def _is_of_run(connection: socket.socket, run: Path) -> bool:
    """Whether the other end is a process that was started with the run's folder, which its command line shows."""
    inode = _inode_of_peer(connection)
    return inode is not None and any(_has_socket(process, inode) for process in _processes_of(run))


def _inode_of_peer(connection: socket.socket) -> str | None:
    """By the kernel's table of connections; that of a socket that is not accepted yet is 0."""
    here, there = _table_entry(connection.getsockname()), _table_entry(connection.getpeername())
    for name in ("tcp", "tcp6"):
        with suppress(OSError), Path("/proc/self/net", name).open() as table:
            for line in table:
                fields = line.split()
                if fields[1].endswith(there) and fields[2].endswith(here):
                    return fields[9]
    return None


def _table_entry(address: tuple[str, int]) -> str:
    """As the kernel writes it: words of the address in the machine's order. An IPv4 one ends an IPv6 one."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    packed = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _processes_of(run: Path) -> Iterator[Path]:
    """This one is of the run however it was started."""
    yield Path("/proc/self")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(run) in (process / "cmdline").read_bytes().split(b"\0"):
                yield process


def _has_socket(process: Path, inode: str) -> bool:
    """Another user's files are not shown."""
    try:
        entries = list((process / "fd").iterdir())
    except OSError:
        return False
    for entry in entries:
        with suppress(OSError):
            if str(entry.readlink()) == f"socket:[{inode}]":
                return True
    return False
