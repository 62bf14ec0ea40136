# SPDX-License-Identifier: Apache-2.0
"""The agent of a node in pairwise measurements, once a node: ``python -m llmb.bench.pair_agent RUN_FOLDER``.

Agents have no coordinator: they all know the schedule, and tell each other by files in the folder of the job who is
there, what was measured and which nodes form the group. Each measurement is a set of processes of its own, which are
killed when its time is over, so that a node that hangs takes only its partner's time.
"""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from llmb.bench.collective_bench import read_result
from llmb.bench.collectives import JOB as COLLECTIVES_JOB
from llmb.bench.collectives import PROGRAM as COLLECTIVES
from llmb.bench.gpus import read_parts
from llmb.bench.measure import job_folder
from llmb.bench.pair_verdict import Readings, decide, members, pair_rule
from llmb.bench.pairs import (
    ALONE,
    FOLDER,
    GROUP,
    JOB,
    ROLL_CALL_S,
    Members,
    NodeHere,
    NodeReading,
    PairFigures,
    PairJob,
    collective_figures,
    deadlines,
    measurements,
    product_figures,
    read_pairs,
    rounds,
)
from llmb.bench.records import JOB as PRODUCT_JOB
from llmb.bench.records import PROGRAM as PRODUCT
from llmb.catalogue.records import Record
from llmb.errors import RunFailed
from llmb.jobspec.spec import read_spec
from llmb.processes import bind
from llmb.processes.families import started_program
from llmb.processes.ranks import words
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.host import host_name
from llmb.runs.record_file import read_record_file

POLL_S = 0.5
PORTS = range(20_000, 32_768)
"""Which the kernel gives to no connection, and services seldom use."""
LAST_WORDS = 160
"""Characters of a program's last line that are shown."""
LAUNCHER = "llmb: "
"""What the launcher's own lines begin with."""


class PairFiles:
    """The folder in which agents tell each other what they know."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / FOLDER

    def here(self, node: int) -> Path:
        return self.path / f"here-{node}.json"

    def reading(self, measurement: str, node: int) -> Path:
        return self.path / f"{measurement}_{node}.json"

    @property
    def present(self) -> Path:
        """The nodes that answered the roll call."""
        return self.path / "present.json"

    @property
    def group(self) -> Path:
        """The nodes that form the group of good ones."""
        return self.path / "group.json"

    def write(self, path: Path, record: Record) -> None:
        write_atomically(path, record.model_dump_json())

    def write_once(self, path: Path, record: Record) -> None:
        """Unless another agent has: whole or not at all, or all would wait for one that hangs before it has written."""
        own = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
        self.write(own, record)
        with suppress(FileExistsError):
            path.hardlink_to(own)
        own.unlink()

    def wait_for(self, paths: Sequence[Path], until: float) -> bool:
        """Whether all are there by then, in the time of ``time.monotonic``."""
        missing = list(paths)
        while missing := [path for path in missing if not path.exists()]:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
            self._look_anew()
        return True

    def _look_anew(self) -> None:
        """A client of a network file system shows a folder as it was, until it changes something there itself."""
        with suppress(OSError):
            path = self.path / f".look-{socket.gethostname()}-{os.getpid()}"
            path.touch()
            path.unlink()

    def nodes_here(self, nodes: int) -> dict[int, NodeHere]:
        found = {node: self.here(node) for node in range(nodes)}
        return {node: read_record_file(path, NodeHere) for node, path in found.items() if path.exists()}

    def readings(self, names: Sequence[str]) -> Readings:
        """All that is there; no node is present before the roll call is over."""
        present = read_record_file(self.present, Members).nodes if self.present.exists() else ()
        keys = [(name, node) for name in measurements(len(present)) for node in present]
        files = {key: self.reading(*key) for key in keys}
        found = {key: read_record_file(path, NodeReading) for key, path in files.items() if path.exists()}
        return Readings(names, present, found, tuple(read_pairs(found, present)))


class PairAgent:
    """One node of the job, the ``node``-th."""

    def __init__(self, folder: RunFolder, job: PairJob, node: int, bindings: Sequence[str]) -> None:
        """``bindings``: words before the command of each process."""
        self.files, self.job, self.node, self.bindings = PairFiles(folder.path), job, node, bindings
        self.present: tuple[int, ...] = ()
        self.others: Mapping[int, NodeHere] = {}
        self.ends: Mapping[str, float] = {}

    def run(self) -> None:
        """Returns when no measurement of any node is going on: the scheduler then ends what is left of the job."""
        self._answer_roll_call()
        if self.node not in self.present:
            time.sleep(max(0.0, self.ends[GROUP] - time.monotonic()))
            return
        self._write(ALONE, *self._alone())
        for number, round_ in enumerate(rounds(len(self.present)), 1):
            place = round_.partner(self.present.index(self.node))
            if place is not None:
                self._meet(f"round-{number}", self.present[place])
        self._join_group()

    def _answer_roll_call(self) -> None:
        """All begin when all are there, or when the first one has waited long enough."""
        files, until = self.files, time.monotonic() + ROLL_CALL_S
        files.path.mkdir(exist_ok=True)
        files.write(files.here(self.node), self._here())
        while not files.present.exists():
            here = files.nodes_here(self.job.nodes)
            if len(here) == self.job.nodes or time.monotonic() > until:
                files.write_once(files.present, Members(nodes=tuple(here)))
            files.wait_for([files.present], time.monotonic() + POLL_S)
        self.present = read_record_file(files.present, Members).nodes
        self.others = files.nodes_here(self.job.nodes)
        began = time.monotonic()
        self.ends = {name: began + seconds for name, seconds in deadlines(len(self.present)).items()}

    def _here(self) -> NodeHere:
        address = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        ports = tuple(free_ports(address, len(measurements(self.job.nodes))))
        return NodeHere(node=self.node, name=host_name(), address=address, ports=ports, began_s=time.time())

    def _write(self, measurement: str, figures: PairFigures, problem: str | None, *, left_out: bool = False) -> None:
        reading = NodeReading(
            measurement=measurement, node=self.node, figures=figures, problem=problem, left_out=left_out
        )
        self.files.write(self.files.reading(measurement, self.node), reading)

    def _alone(self) -> tuple[PairFigures, str | None]:
        with job_folder(PRODUCT_JOB, self.job.product) as folder:
            problem = self._run((0,), PRODUCT, folder, ALONE)
            figures, wrong = product_figures(read_parts(folder), self.job.device)
        if problem or wrong or self.job.per_node == 1:
            return figures, problem or wrong
        within, problem = self._collectives((self.node,), ALONE)
        return figures.model_copy(update=within.model_dump(include={"gb_per_s"})), problem

    def _meet(self, name: str, partner: int) -> None:
        if not all(self._is_well(node, name) for node in (self.node, partner)):
            self._write(name, PairFigures(), None, left_out=True)
        else:
            self._write(name, *self._collectives(tuple(sorted((self.node, partner))), name))

    def _is_well(self, node: int, name: str) -> bool:
        """Whether it did not fail alone, and comes to the end of each measurement before ``name`` in time."""
        files, place, before = self.files, self.present.index(node), [ALONE]
        for number, round_ in enumerate(rounds(len(self.present)), 1):
            if f"round-{number}" == name:
                break
            if round_.partner(place) is not None:
                before.append(f"round-{number}")
        for each in before:
            if not files.wait_for([files.reading(each, node)], self.ends[each]):
                return False
        return read_record_file(files.reading(ALONE, node), NodeReading).problem is None

    def _join_group(self) -> None:
        """The first agent that knows all, or all that there will be, decides which nodes are good."""
        files = self.files
        for node in self.present:
            self._is_well(node, GROUP)
        readings = files.readings([str(node) for node in range(self.job.nodes)])
        verdicts, _ = decide(readings, pair_rule(self.job.device))
        files.write_once(files.group, Members(nodes=members(verdicts)))
        if not files.wait_for([files.group], self.ends[GROUP]):
            return
        group = read_record_file(files.group, Members).nodes
        if self.node in group:
            self._write(GROUP, *self._collectives(group, GROUP))
        files.wait_for([files.reading(GROUP, node) for node in group], self.ends[GROUP])

    def _collectives(self, nodes: Sequence[int], name: str) -> tuple[PairFigures, str | None]:
        """Between all processes of ``nodes``; the figures are with the first of them."""
        with job_folder(COLLECTIVES_JOB, self.job.collectives) as folder:
            problem = self._run(nodes, COLLECTIVES, folder, name)
            if problem or self.node != nodes[0]:
                return PairFigures(), problem
            try:
                return collective_figures(read_result(folder))
            except RunFailed as error:
                return PairFigures(), error.what

    def _run(self, nodes: Sequence[int], program: str, folder: Path, name: str) -> str | None:
        """Why the processes of this node failed; None if they did not."""
        command = (sys.executable, *words(len(nodes), self.job.per_node), *self.bindings)
        command = (*command, sys.executable, "-P", "-m", program, str(folder))
        seconds = max(1.0, self.ends[name] - time.monotonic())
        with tempfile.TemporaryFile() as log:
            try:
                with started_program(command, log, subprocess.STDOUT, self._variables(nodes, name)) as process:
                    code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return f"it was not done within {seconds:.0f} s, and was killed"
            log.seek(0)
            text = log.read().decode(errors="replace")
        if not code:
            return None
        sys.stderr.write(f"{name} on {host_name()}:\n{text}")
        return last_words(text) or f"it ended with exit code {code}"

    def _variables(self, nodes: Sequence[int], name: str) -> dict[str, str]:
        if len(nodes) == 1:
            return {**os.environ}
        first = self.others[nodes[0]]
        return {
            **os.environ,
            "SLURM_NODEID": str(nodes.index(self.node)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.ports[measurements(len(self.present)).index(name)]),
            "LLMB_STORE_ID": f"{os.environ['LLMB_STORE_ID']}-{name}-{nodes[0]}",
        }


def own_address(other: str, port: int) -> str:
    """The address of this node by which ``other``, and nodes like it, reach it."""
    family, kind, protocol, _, place = socket.getaddrinfo(other, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def free_ports(address: str, count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server((address, port), family=_family(address)):
            found.append(port)
        if len(found) == count:
            break
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def last_words(text: str) -> str:
    """The last line of a program's output, the launcher's own if there is no other."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    others = [line for line in lines if not line.startswith(LAUNCHER)]
    return next(iter((others or lines)[-1:]), "")[:LAST_WORDS]


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    job = PairJob.model_validate_json((folder.path / JOB).read_text())
    binding = read_spec(folder).binding
    how = ("-P", "-m", bind.__name__, str(binding.cpu), binding.numa)
    bindings = (sys.executable, *how) if binding.binds else ()
    PairAgent(folder, job, int(os.environ["SLURM_NODEID"]), bindings).run()


if __name__ == "__main__":
    main()
