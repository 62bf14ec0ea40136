# SPDX-License-Identifier: Apache-2.0
"""Nobody else gets into a run on one machine: neither from the network, nor by files in the folder it is started in."""

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmb.engine.parallel.store import STORE as READ_STORE
from llmb.processes.families import family
from llmb.processes.ranks import STORE

ATTACK = Path(__file__).parents[2] / "support" / "store_attack.py"
TWO = ("-w", "pretrain_llama3.1", "--scale", "2", "--steps", "100000")
LISTENING = "0A"
ENDS_WITHIN_S = 300


class Listener(NamedTuple):
    address: str
    port: int


def listeners(pids: Iterable[int]) -> set[Listener]:
    """The TCP sockets that processes listen on."""
    return {listener for pid in pids for listener in _listeners(Path(f"/proc/{pid}"))}


def _listeners(proc: Path) -> Iterator[Listener]:
    own = set()
    for file in (proc / "fd").iterdir():
        try:
            own.add(str(file.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in [*_lines("tcp"), *_lines("tcp6")]:
        local, state, number = line[1], line[3], line[9]
        if state == LISTENING and f"socket:[{number}]" in own:
            address, _, port = local.partition(":")
            words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
            yield Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16))


def _lines(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def other_address() -> str | None:
    """An address of this machine that others could use; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        found: str = asking.getsockname()[0]
    return None if ipaddress.ip_address(found).is_loopback else found


def attack(address: str, ports: Iterable[int], marker: Path) -> subprocess.CompletedProcess[str]:
    """By another user, where this one can become it."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    may = (
        os.geteuid() == 0 and shutil.which("setpriv") and subprocess.run([*user, "-c", ""], check=False).returncode == 0
    )
    command = [*(user if may else [sys.executable]), str(ATTACK), address, str(marker), *map(str, ports)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN_S, cwd="/")


@pytest.mark.slow
def test_a_run_listens_on_loopback_alone_and_executes_nothing_of_its_folder(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("numbers", "types", "random", "torch", "numpy", "llmb"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name}\\n')\n")
    run = start(*TWO)
    run.wait_for_steps(2)
    pids = family(run.process.pid)
    assert set(run.workers().values()) <= set(pids)
    found = listeners(pids)
    assert {listener.address for listener in found} == {"127.0.0.1"}  # gloo's
    address = other_address()
    if address:  # else there is no way in
        assert attack(address, {listener.port for listener in found}, tmp_path / "owned").returncode == 1
    run.process.terminate()
    run.process.communicate(timeout=ENDS_WITHIN_S)
    assert not (tmp_path / "executed").exists()
    assert READ_STORE == STORE


@pytest.mark.slow
def test_the_attack_takes_over_a_launcher_of_torch(needs: Callable[[str, bool, str], None]) -> None:
    """Else the test above would show nothing."""
    address = other_address()
    needs("address", address is not None, "this machine has no address but loopback")
    assert address
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # the attacker looks whether it has succeeded
    marker = folder / "owned"
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    with subprocess.Popen([*command, "sleep", "600"], stderr=subprocess.DEVNULL) as launcher:
        try:
            end = time.monotonic() + ENDS_WITHIN_S
            ports: set[int] = set()
            while not ports and time.monotonic() < end:
                time.sleep(0.2)
                ports = {listener.port for listener in listeners(family(launcher.pid))}
            assert attack(address, ports, marker).returncode == 0
            assert marker.exists()
        finally:
            launcher.terminate()
            shutil.rmtree(folder)
