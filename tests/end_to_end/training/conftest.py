# SPDX-License-Identifier: Apache-2.0
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fork_server import Fork, ForkServer
from free_ports import free_ports
from torch.distributed import FileStore

from llmb.launch.ranks import STORE

LLMB = [sys.executable, "-P", "-m", "llmb.cli.main"]
STARTED_WITHIN_S = 300


@dataclass
class Run:
    """A ``llmb run`` of the test's own, started as a user would."""

    process: subprocess.Popen[str]
    install: Path

    def wait_for_steps(self, count: int) -> Path:
        """The run's folder, once its workers did ``count`` steps."""
        end = time.monotonic() + STARTED_WITHIN_S
        while time.monotonic() < end:
            for path in self.install.rglob("metrics.jsonl"):
                if path.read_text().count("\n") >= count:
                    return path.parent
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError("the run did not start")

    def wait_for_heartbeats(self) -> None:
        """Returns once every rank has told the others that it lives: one that never did has no host for them."""
        ranks = [found for found in processes_of(self.install).values() if "RANK" in found]
        store = FileStore(ranks[0][STORE], -1)
        store.wait([f"llmb/beat/{found['RANK']}" for found in ranks], timedelta(seconds=STARTED_WITHIN_S))

    def workers(self) -> dict[int, int]:
        """Process ids of the workers by rank."""
        return {int(found["RANK"]): pid for pid, found in processes_of(self.install).items() if "RANK" in found}

    def agent(self) -> int:
        """Process id of the workers' parent."""
        (parent,) = {parent_of(pid) for pid in self.workers().values()}
        return parent

    def samplers(self) -> set[int]:
        """Process ids of what samples the run's resources."""
        found = set()
        for pid in processes_of(self.install):
            with suppress(OSError):  # it ended while we looked
                if "llmb.readers.samples.sampler" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.add(pid)
        return found

    def record(self) -> dict[str, Any]:
        (path,) = self.install.rglob("run.json")
        return json.loads(path.read_text())


def processes_of(install: Path) -> dict[int, dict[str, str]]:
    """Variables of the processes that name ``install`` on their command line, by process id."""
    found = {}
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdigit() and str(install) in (proc / "cmdline").read_text():
                variables = (proc / "environ").read_text().split("\0")
                found[int(proc.name)] = dict(item.split("=", 1) for item in variables if "=" in item)
        except OSError:
            continue  # it ended while we looked
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Whether processes end within some seconds; those that only wait for init to bury them have ended."""

    def check(pids: Iterable[int], within_s: float = 60) -> bool:
        end = time.monotonic() + within_s
        while any(_alive(pid) for pid in pids):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    return check


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts ``llmb run`` of a tiny model below ``tmp_path``, with the interpreter unless told otherwise."""
    runs = []

    def starter(
        *options: str, install: Path = tmp_path, prefix: Sequence[str] = (), python: str = sys.executable
    ) -> Run:
        command = [*prefix, python, *LLMB[1:], "run", "-s", "tiny", "--gpu-type", "cpu", *options]
        environ = {**os.environ, "LLMB_INSTALL": str(install)}
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        runs.append(Run(process, install))
        return runs[-1]

    yield starter
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
        run.process.communicate()


@pytest.fixture
def start_ranks(fork_server: ForkServer) -> Iterator[Callable[..., list[Fork]]]:
    """Starts a command once for each rank, as a launcher would. There is none, so that the test alone ends them."""
    started: list[Fork] = []

    def start(command: list[str], world_size: int, log: Path = Path(os.devnull), **more: str) -> list[Fork]:
        (port,) = free_ports(1)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        environ = {**os.environ, **shared, "OMP_NUM_THREADS": "1", **more}
        numbers = [str(rank) for rank in range(world_size)]
        ranks = [Fork(fork_server, command, {**environ, "RANK": n, "LOCAL_RANK": n}, log) for n in numbers]
        started.extend(ranks)
        return ranks

    yield start
    for rank in started:
        rank.kill()
        rank.wait()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Callable[..., dict[str, Any]]:
    """The result of a finished run of a tiny model; runs with the same options are done once.

    Once for all processes that run tests, too: the first one does it, and others wait for it.
    """
    folder = tmp_path_factory.getbasetemp()
    runs = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "runs"
    runs.mkdir(exist_ok=True)

    @functools.cache
    def result(*options: str) -> dict[str, Any]:
        install = runs / hashlib.blake2b("\0".join(options).encode(), digest_size=8).hexdigest()
        install.mkdir(exist_ok=True)
        with (install / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            printed = install / "printed.json"
            if not printed.exists():
                printed.write_text(run_to_end(forked_python, install, options))
        document: dict[str, Any] = json.loads(printed.read_text())
        return document

    return result


def run_to_end(python: str, install: Path, options: tuple[str, ...]) -> str:
    inputs = () if {"--weights", "--dataset"} & set(options) else ("--synthetic",)
    command = [python, *LLMB[1:], "run", "-s", "tiny", "--gpu-type", "cpu", *inputs, *options, "--json"]
    # One thread is as quick for a tiny model, and leaves the other cores to other tests.
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "LLMB_INSTALL": str(install)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_steps(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def losses(finished: Callable[..., dict[str, Any]]) -> Callable[..., list[dict[str, Any]]]:
    """The steps of a finished run of a tiny model; runs with the same options are done once."""
    return lambda *options: read_steps(finished(*options)["run_dir"])
