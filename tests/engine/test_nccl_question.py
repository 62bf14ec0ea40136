# SPDX-License-Identifier: Apache-2.0
"""The RAS port is asked on this machine alone, and only a process of the same run is believed.

What answers is a stand-in on a real socket: no NCCL is installed.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ras_answers import BEHIND, FINE_RANKS, answer, communicator, text
from ras_stand_in import converse, stand_in

from llmb.engine.watchdog.nccl_question import OTHER_PROGRAM, NcclQuestion, Refused, ask_ras
from llmb.runs.folder import RunFolder
from llmb.traces.nccl_ras import MOST_BYTES

JSON = answer(communicator("c0ffee", FINE_RANKS))
TEXT = text("2.27.7", warnings=BEHIND).encode()
Serve = Callable[[socket.socket], None]


@contextmanager
def served(serve: Serve, address: str = "127.0.0.1") -> Iterator[str]:
    """By a thread of this process, which is the run's own."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # the other end may have heard enough
                    serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"[{address}]:{server.getsockname()[1]}" if ":" in address else f"{address}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("given", [JSON, TEXT], ids=["JSON", "text"])
def test_a_process_of_the_run_is_asked_in_the_form_that_it_knows(tmp_path: Path, given: bytes) -> None:
    asked: list[str] = []
    with served(lambda connection: converse(connection, given, asked)) as address:
        port = address.rpartition(":")[2]
        for own in (address, f"localhost:{port}", f"0.0.0.0:{port}"):
            assert ask_ras(tmp_path, own) == given
    assert asked[:4] == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with served(lambda connection: converse(connection, JSON), "::1") as address:
        assert ask_ras(tmp_path, address) == JSON


def test_only_a_process_of_the_same_run_is_believed(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "own-2"
    (tmp_path / "answer").write_bytes(JSON)
    with stand_in(tmp_path / "answer", str(own)) as address:
        assert ask_ras(own, address) == JSON
        with pytest.raises(Refused, match="not of this run"):
            ask_ras(other, address)


def garble(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def chatter(connection: socket.socket) -> None:
    connection.sendall(b"x" * 100_000)


def close(_connection: socket.socket) -> None:
    pass


def flood(connection: socket.socket) -> None:
    converse(connection, b"x" * (MOST_BYTES + (1 << 20)))


@pytest.mark.parametrize(
    ("serve", "why"),
    [(garble, OTHER_PROGRAM), (chatter, OTHER_PROGRAM), (close, OTHER_PROGRAM), (flood, "larger than 64 MiB")],
)
def test_what_is_no_answer_is_refused(tmp_path: Path, serve: Serve, why: str) -> None:
    with served(serve) as address, pytest.raises((Refused, ConnectionResetError), match=f"{why}|reset"):
        ask_ras(tmp_path, address)


def test_a_process_that_is_stopped_is_passed_over(tmp_path: Path) -> None:
    """It listens on the same port as the others, and the system still takes connections for it."""
    held: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        if held:
            converse(connection, JSON)
        else:
            held.append(connection.dup())

    with served(serve) as address:
        assert ask_ras(tmp_path, address) == JSON
    held[0].close()


def test_the_time_is_limited_in_all(tmp_path: Path) -> None:
    def drip(connection: socket.socket) -> None:
        converse(connection, JSON, pause_s=0.05)

    with served(lambda _: time.sleep(3)) as silent, pytest.raises(TimeoutError):
        ask_ras(tmp_path, silent, patience_s=0.2)
    with served(drip) as slow, pytest.raises(TimeoutError):
        ask_ras(tmp_path, slow, patience_s=0.5)


@pytest.mark.parametrize("address", ["10.1.2.3:28028", "node7:28028", "[fe80::1]:28028", "localhost", "", "::1"])
def test_no_other_machine_is_asked(tmp_path: Path, address: str) -> None:
    with pytest.raises(Refused, match="no loopback address"):
        ask_ras(tmp_path, address)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"NCCL_RAS_ENABLE": "0"}, "NCCL_RAS_ENABLE=0"),
        ({"NCCL_RAS_ADDR": "10.1.2.3:28028"}, "NCCL_RAS_ADDR is '10.1.2.3:28028', no loopback address"),
        ({"NCCL_RAS_ADDR": "127.0.0.1:1"}, "Connection refused"),
    ],
)
def test_without_an_answer_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "none"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = NcclQuestion(RunFolder(tmp_path), {}).said(60)
    assert (said.text, said.answer, said.reason) == ("", None, why)
