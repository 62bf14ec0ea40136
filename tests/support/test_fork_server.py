# SPDX-License-Identifier: Apache-2.0
"""What is forked is as the interpreter would be, in all that tests rely on."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import STAND_IN, Fork, ForkServer

SAYS = """
import json, os, signal, sys, torch
threads, default = torch.get_num_threads(), signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(json.dumps([sys.argv[1:], os.environ["NAME"], os.getcwd(), sys.stdin.read(), __name__, threads, default]))
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
SOON_S = 60
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def writer(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return writer


def test_arguments_variables_files_and_exit_code_are_its_own(forked_python: str, write: Write, tmp_path: Path) -> None:
    environ = {**os.environ, "NAME": "a \u00fc", "OMP_NUM_THREADS": "3"}
    command = [forked_python, write(SAYS), "7", "b c"]
    done = subprocess.run(command, env=environ, input="x", capture_output=True, text=True, cwd=tmp_path, check=False)
    assert json.loads(done.stdout) == [["7", "b c"], "a \u00fc", str(tmp_path), "x", "__main__", 3, True]
    assert (done.returncode, done.stderr) == (7, "to stderr\n")


def test_an_error_is_printed_and_fails(forked_python: str, write: Write) -> None:
    done = subprocess.run([forked_python, write("1 / 0")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_stand_in_and_as_it(forked_python: str, write: Write, number: signal.Signals) -> None:
    with subprocess.Popen([forked_python, write(WAITS)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(SOON_S) == -number
    assert soon(lambda: not Path(f"/proc/{pid}").exists())


def test_one_that_ends_as_its_stand_in_is_killed_harms_no_other(
    forked_python: str, fork_server: ForkServer, write: Write
) -> None:
    """The server, which is stopped here as on a busy machine, learns of both at once."""
    with subprocess.Popen([forked_python, write(WAITS)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        os.kill(fork_server.pid, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            assert soon(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"))
            process.kill()
            assert process.wait(SOON_S) == -signal.SIGKILL
        finally:
            os.kill(fork_server.pid, signal.SIGCONT)
    assert soon(lambda: not Path(f"/proc/{pid}").exists())
    subprocess.run([forked_python, write("pass")], check=True)


def test_a_signal_waits_until_its_stand_in_knows_whom_it_is_for() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/server")
        listener.listen()
        stand_in = subprocess.Popen([sys.executable, "-SI", STAND_IN, f"{folder}/server", sys.executable, "any.py"])
        connection, _ = listener.accept()
        told = subprocess.Popen(["sleep", "600"])
        with connection:
            try:
                stand_in.send_signal(signal.SIGUSR1)
                connection.send(told.pid.to_bytes(8, "little"))
                assert told.wait(SOON_S) == -signal.SIGUSR1
                connection.send((7).to_bytes(8, "little"))
                assert stand_in.wait(SOON_S) == 7
            finally:
                for process in (told, stand_in):
                    process.kill()
                    process.wait()


def soon(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_signal_is_not_lost_however_early_it_comes(fork_server: ForkServer, write: Write, tmp_path: Path) -> None:
    fork = Fork(fork_server, [write(WAITS)], dict(os.environ), tmp_path / "output")
    fork.send_signal(signal.SIGTERM)
    assert fork.wait(SOON_S) == -signal.SIGTERM


def test_what_is_no_program_gets_the_real_interpreter(forked_python: str) -> None:
    command = [forked_python, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_it_lasts_as_long_as_anybody_uses_it(fork_server: ForkServer, write: Write) -> None:
    other = ForkServer(fork_server.address.parent)
    assert other.pid == fork_server.pid
    other.stop()
    subprocess.run([str(other.python), write("pass")], check=True)
