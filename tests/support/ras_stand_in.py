# SPDX-License-Identifier: Apache-2.0
"""Answers as NCCL's RAS does, in the place of a rank: ``ras_stand_in.py ANSWER [WORD...]`` prints its port."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def converse(connection: socket.socket, answer: bytes, asked: list[str] | None = None, *, pause_s: float = 0.0) -> None:
    """One client, whose commands are noted in ``asked``. Text is of an NCCL that knows no other form."""
    for line in connection.makefile("r"):
        command = line.strip()
        if asked is not None:
            asked.append(command)
        if command == "VERBOSE STATUS":
            part = 100 if pause_s else len(answer)
            for at in range(0, len(answer), part):
                connection.sendall(answer[at : at + part])
                time.sleep(pause_s)
            return
        connection.sendall(f"{_reply(command, answer)}\n".encode())


def _reply(command: str, answer: bytes) -> str:
    if command == "CLIENT PROTOCOL 2":
        return "SERVER PROTOCOL 2"
    if command.startswith("TIMEOUT ") or (command == "SET FORMAT json" and answer.startswith(b"{")):
        return "OK"
    return f"ERROR: Unknown command {command}"


@contextmanager
def stand_in(answer: Path, *words: str) -> Iterator[str]:
    """The address of another process that has ``words`` in its command line."""
    command = [sys.executable, __file__, str(answer), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            yield f"127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # the other end may have heard enough
                converse(connection, Path(sys.argv[1]).read_bytes())


if __name__ == "__main__":
    main()
