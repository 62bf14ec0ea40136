# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a run's processes, and gloo with one thread per group: torch's two race (2.11 and 2.13)."""

import errno
import ipaddress
import json
import os
import re
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from llmb.base.errors import EnvironmentProblem

STORE = "LLMB_STORE"
"""The variable with the path of the store's file on a single node; llmb.launch.ranks sets it."""
STORE_ID = "LLMB_STORE_ID"
PATIENCE = timedelta(minutes=10)
FOLDER = "run_folder"
HARMLESS = re.compile(
    "OMP_NUM_THREADS|GOMP_SPINCOUNT|MALLOC_[A-Z_]+|PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_NCCL_[A-Z_]+"
    "|CUDA_DEVICE_MAX_CONNECTIONS"
)
UNTIL_REMOVED = -1
BACKLOG = 4096
"""Maximum number of connections of ranks that wait to be accepted."""
FILES_PER_RANK = 4
"""Open files per rank in the process that hosts the store."""


def host_store() -> Store:
    """Return this rank's connection to the store; raise EnvironmentProblem on rank 0 if it cannot serve the store."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return connect(PATIENCE, hosts=os.environ["RANK"] == "0" and not agent)


def announce_folder(store: Store, folder: Path) -> None:
    """Announce the run's folder, its plan's variables and whether ranks are bound to cores, to ranks of another
    launcher."""
    names = os.environ.get("LLMB_RANK_VARIABLES", "").split(",")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    announced = {"folder": str(folder), "variables": variables, "binds": "LLMB_BINDING" in os.environ}
    store.set(FOLDER, json.dumps(announced))


def announced_folder() -> tuple[Path, dict[str, str], bool]:
    """Return the run's folder, variables and whether to bind ranks; raise EnvironmentProblem unless rank 0 announces
    them within ``PATIENCE``."""
    try:
        announced = json.loads(connect(PATIENCE).get(FOLDER))
        variables = {name: str(value) for name, value in announced["variables"].items() if HARMLESS.fullmatch(name)}
        return Path(announced["folder"]), variables, bool(announced["binds"])
    except RuntimeError as error:
        what = f"rank {os.environ['RANK']} has received nothing from {store_host()} in {PATIENCE.seconds // 60} min"
        raise EnvironmentProblem(what, do="check that rank 0 has started, and that this node can reach it") from error


def connect(patience: timedelta, *, hosts: bool = False) -> Store:
    """Return a new connection to the run's store. With ``hosts``, serve it; raise EnvironmentProblem if that fails."""
    file = os.environ.get(STORE)
    if file:
        return FileStore(file, UNTIL_REMOVED)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if hosts:
        check_open_files(int(os.environ["WORLD_SIZE"]))
    listener = listen(address, port).detach() if hosts else None
    store = TCPStore(
        address, port, is_master=hosts, wait_for_workers=False, master_listen_fd=listener, timeout=patience
    )
    return PrefixStore(os.environ.get(STORE_ID, ""), store)


def check_open_files(ranks: int) -> None:
    """Raise EnvironmentProblem if this process may open too few files for the store of ``ranks`` ranks."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_PER_RANK * ranks
    if limit != resource.RLIM_INFINITY and limit < need:
        do = f"raise the hard limit, now {hard}, in /etc/security/limits.conf and slurmd's unit (LimitNOFILE)"
        do = do if resource.RLIM_INFINITY != hard < need else f"run 'ulimit -n {need}' before the launcher"
        what = f"rank 0 of {ranks} may open {limit} files, but needs {need} for the others' connections"
        raise EnvironmentProblem(what, do=do)


def store_host() -> str:
    """Describe the host or the file that provides the store."""
    if STORE in os.environ:
        return f"the file system of {os.environ[STORE]}"
    return f"rank 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def listen(address: str, port: int) -> socket.socket:
    """Listen on ``address`` or, if necessary, on all interfaces; raise EnvironmentProblem if that fails."""
    try:
        return _listen(address, port)
    except OSError as error:
        what = f"rank 0 cannot listen at {address}, port {port}, where the ranks meet: {error.strerror or error}"
        raise EnvironmentProblem(what, do="if you set MASTER_ADDR or MASTER_PORT, change it; if not, retry") from error


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, (host, *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if _is_loopback(str(host)) and not _is_loopback(address):
        return _on_all(port)
    try:
        return socket.create_server((str(host), port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _on_all(port)


def _on_all(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


GLOO = "gloo_one_thread"
THREADS = 1
Given = TypeVar("Given")
Answer = TypeVar("Answer")


def gloo_backend() -> str:
    """Register the backend for communication through hosts, and return its name, which a run's record contains."""
    # As torch's own: a process that is bound to a GPU asks each of its groups for the backend of that device.
    dist.Backend.register_backend(GLOO, _one_thread, extended_api=True, devices=["cpu", "cuda"])
    return GLOO


def ranks_of_node(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


class Hosts:
    """Groups that exchange values of all ranks in host memory: within nodes, and between the nodes' first ranks."""

    def __init__(
        self, rank: int, world_size: int, per_node: int, description: str, timeout: timedelta | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.first = rank - rank % per_node
        self.node = _group(range(self.first, self.first + per_node), description, timeout)
        firsts = range(0, world_size, per_node)
        self.nodes = None
        if len(firsts) > 1:
            is_one = rank == self.first
            # The others create groups of one: torch names a group by its ranks and the number of groups before it.
            made = _group(firsts if is_one else range(rank, rank + 1), description, timeout)
            self.nodes = made if is_one else None

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, [ranks, values]."""
        of_node = all_gather(values, self.node)
        if len(of_node) == self.world_size:
            return of_node
        gathered = values.new_empty(self.world_size, len(values))
        if self.nodes:
            gathered = all_gather(of_node, self.nodes).flatten(0, 1)
        dist.broadcast(gathered, self.first, group=self.node)
        return gathered

    def ask(self, give: Callable[[], Given], decide: Callable[[list[Given]], Sequence[Answer]]) -> Answer:
        """Gather ``give`` of all ranks, and return this rank's answer from ``decide`` on rank 0. A collective;
        propagates OSError."""
        try:
            mine: Given | OSError = give()
        except OSError as error:
            mine = error
        gathered: list[Given | OSError] | None = self._gather(mine)
        answers: Sequence[Answer | OSError] | None
        try:
            for rank, value in enumerate(gathered or ()):
                if isinstance(value, OSError):
                    raise OSError(f"rank {rank}: {value}") from value
            answers = decide([each for each in gathered if not isinstance(each, OSError)]) if gathered else None
        except OSError as error:
            answers = [error] * self.world_size
        answer: Answer | OSError = self._scatter(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _gather(self, value: object) -> list[Any] | None:
        of_node = _gather_objects(value, self.node)
        if self.nodes is None or of_node is None:
            return of_node if self.rank == 0 else None
        of_nodes = _gather_objects(of_node, self.nodes)
        return list(chain.from_iterable(of_nodes)) if of_nodes else None

    def _scatter(self, values: Sequence[Any] | None) -> Any:  # noqa: ANN401 (whatever the first rank gives)
        of_node = values
        if self.nodes:
            size = dist.get_world_size(self.node)
            of_nodes = [values[at : at + size] for at in range(0, len(values), size)] if values else None
            of_node = _scatter_objects(of_nodes, self.nodes)
        return _scatter_objects(of_node, self.node)


def _gather_objects(value: object, group: dist.ProcessGroup) -> list[Any] | None:
    gathered = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, gathered, group=group, group_dst=0)
    return gathered


def _scatter_objects(values: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:  # noqa: ANN401 (of the first rank)
    own: list[Any] = [None]
    dist.scatter_object_list(own, list(values) if values else None, group=group, group_src=0)
    return own[0]


def all_gather(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the tensors of all ranks of a group, by default of all ranks, in a new first dimension."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values, group=group)
    return torch.stack(gathered)


def _group(ranks: range, description: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create the group of ``ranks``; only these ranks call this function."""
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout, gloo_backend(), use_local_synchronization=True, group_desc=description
    )
    return made


def _one_thread(group: Any, _options: object) -> dist.ProcessGroupGloo:  # noqa: ANN401 (torch does not export its type)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads = THREADS
    options._timeout = group.timeout
    options.global_ranks_in_group = group.global_ranks_in_group
    options.group_name = group.group_id
    made: dist.ProcessGroupGloo = gloo(group.store, group.group_rank, group.group_size, options)
    return made


@cache
def _devices(interfaces: str) -> list[Any]:
    """Shared by all groups: torch would create one per group, with a thread that wakes up 100 times per second."""
    gloo: Any = dist.ProcessGroupGloo
    if named := [gloo.create_device(interface=name) for name in interfaces.split(",") if name]:
        return named
    address = route_address(os.environ)
    return [gloo.create_device(hostname=address) if address else gloo.create_default_device()]


ELSEWHERE = "203.0.113.1"
"""An address of no host, reserved for documentation (RFC 5737): the route to it is the default route."""


def route_address(environ: Mapping[str, str]) -> str | None:
    """Return this node's address on the route to rank 0; None without MASTER_ADDR or a route."""
    master = environ.get("MASTER_ADDR", "")
    address = _source_address(master) if master else None
    one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE") or _is_loopback(master)
    if address and _is_loopback(address) and not one_node:
        return _source_address(ELSEWHERE)
    return address


def _source_address(host: str) -> str | None:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None
