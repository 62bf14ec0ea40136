# SPDX-License-Identifier: Apache-2.0
"""Nobody else gets into a run on one machine: neither from the network, nor by files in the folder it is started in."""

import ipaddress
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmb.base.processes import family
from llmb.engine.parallel.rendezvous import STORE as READ_STORE
from llmb.launch.ranks import STORE

TWO = ("-w", "pretrain_llama3.1", "--scale", "2", "--steps", "100000")
LISTENING = "0A"
ENDS_WITHIN_S = 300


def listeners(pids: Iterable[int]) -> set[str]:
    """The addresses of TCP sockets that processes listen on."""
    return {address for pid in pids for address in _listeners(Path(f"/proc/{pid}"))}


def _listeners(proc: Path) -> Iterator[str]:
    own = set()
    for file in (proc / "fd").iterdir():
        try:
            own.add(str(file.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in [*_lines("tcp"), *_lines("tcp6")]:
        local, state, number = line[1], line[3], line[9]
        if state == LISTENING and f"socket:[{number}]" in own:
            address, _, _ = local.partition(":")
            words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
            yield str(ipaddress.ip_address(b"".join(words)))


def _lines(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


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
    assert listeners(pids) == {"127.0.0.1"}  # gloo's
    run.process.terminate()
    run.process.communicate(timeout=ENDS_WITHIN_S)
    assert not (tmp_path / "executed").exists()
    assert READ_STORE == STORE
