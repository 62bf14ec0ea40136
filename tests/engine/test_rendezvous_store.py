# SPDX-License-Identifier: Apache-2.0
"""Where rank 0 listens, and that jobs that meet at one port take nothing of each other."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from llmb.base.errors import EnvironmentProblem
from llmb.engine.parallel.rendezvous import (
    FILES_PER_RANK,
    STORE,
    STORE_ID,
    check_open_files,
    connect,
    host_store,
    listen,
    route_address,
)
from llmb.nodes.doctor.rules import rule

HERE = Path(__file__).parent
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables of a rank, and no others that matter here."""

    def give(**variables: str) -> None:
        for name in (STORE, STORE_ID, "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def test_rank_0_listens_at_the_address_that_it_was_given_alone() -> None:
    with listen("127.0.0.1", 0) as found:
        assert found.getsockname()[0] == "127.0.0.1"
    with listen("localhost", 0) as found:
        assert found.getsockname()[0] in ("127.0.0.1", "::1")


def test_it_listens_everywhere_where_its_address_is_not_the_node_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A documentation address is nobody's; Debian gives a host's own name to loopback, which no other node means."""
    with listen("203.0.113.7", 0) as found:
        assert found.getsockname()[0] in ("::", "0.0.0.0")
    as_on_debian = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: as_on_debian)
    with listen("node1", 0) as found:
        assert found.getsockname()[0] in ("::", "0.0.0.0")


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"127.0.0.1, port {port}, where the ranks meet: Address already"):
            listen("127.0.0.1", port)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"MASTER_ADDR": "10.1.0.1"}, "10.1.0"),
        ({"MASTER_ADDR": "node0"}, "10.1.0"),
        ({"MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "eth1"}, None),
    ],
    ids=["address", "name", "interface that is missing on node0"],
)
def test_ranks_of_two_nodes_meet_though_each_finds_its_own_name_at_loopback(
    tmp_path: Path, needs: Callable[..., None], variables: dict[str, str], address: str | None
) -> None:
    """Not with torch's own device, which listens at that loopback address; a user's own interface is taken."""
    own = ["unshare", "--map-root-user", "--net", "--uts", "--mount"]
    possible = all(map(shutil.which, ("unshare", "ip"))) and not subprocess.run([*own, "true"], check=False).returncode
    needs("mount", possible, "unshare (util-linux) and ip (iproute2) must be allowed to make a network")
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environ |= {"PYTHONPATH": str(HERE.parent / "support"), "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"} | variables
    command = [*own, "sh", str(HERE / "two_nodes.sh"), str(tmp_path), sys.executable, str(HERE / "route_worker.py")]
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    if address is None:
        assert done.returncode
        assert "eth1" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = sorted([*json.loads(line).values()] for line in done.stdout.splitlines())
    assert found == [[0, 3, f"{address}.1"], [1, 3, f"{address}.2"]]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, None),
        ({"MASTER_ADDR": "nowhere.invalid"}, None),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.1.1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "127.0.0.1"),
    ],
)
def test_gloo_uses_loopback_on_one_node(variables: dict[str, str], address: str | None) -> None:
    assert route_address(variables) == address


def test_two_jobs_at_one_port_take_nothing_of_each_other(given: Callable[..., None]) -> None:
    with listen("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    given(**place, LLMB_STORE_ID="one", RANK="0")
    host = host_store()
    host.set("address", "here")
    given(**place, LLMB_STORE_ID="one", RANK="1")
    assert host_store().get("address") == b"here"
    given(**place, LLMB_STORE_ID="other", RANK="1")
    assert not connect(PATIENCE).check(["address"])


def test_the_store_of_one_node_is_a_file_without_a_socket(given: Callable[..., None], tmp_path: Path) -> None:
    before = _sockets()
    given(LLMB_STORE=str(tmp_path / "store"), RANK="0")
    host_store().set("address", "here")
    assert connect(PATIENCE).get("address") == b"here"
    assert _sockets() == before


def test_too_low_a_limit_of_open_files_is_an_error_and_doctor_warns_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_open_files(limit // FILES_PER_RANK)
    for hard, remedy in ((limit, "LimitNOFILE"), (resource.RLIM_INFINITY, "'ulimit -n ")):
        monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (limit, hard)}.__getitem__)
        with pytest.raises(EnvironmentProblem, match=rf"may open {limit} files, but needs \d+ .*") as caught:
            check_open_files(limit // FILES_PER_RANK + 1)
        assert remedy in str(caught.value.do)
    assert rule("limits_nofile").thresholds.warn_below == FILES_PER_RANK * 2304


def _sockets() -> int:
    links = list(Path("/proc/self/fd").iterdir())
    return sum(str(link.readlink()).startswith("socket:") for link in links if link.is_symlink())
