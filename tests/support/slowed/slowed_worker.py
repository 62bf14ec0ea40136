# SPDX-License-Identifier: Apache-2.0
"""What is slow in a worker: patches the engine's functions once it is loaded. Other processes are left alone."""

import importlib.util
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

LOOP = "llmb.engine.loop"
MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux: the kernel sends no faster through this socket, without any rights or devices."""
LONGEST_S = 120
WARM_UP = 2
"""Steps whose delays are not made up for: the first one takes as long as it takes."""
SOCKET = re.compile(r"socket:\[\d+\]")


def slow_down(text: str) -> None:
    """``text``: a JSON list of the fields of ``slowed_runs.Slow``."""
    rank = os.environ.get("RANK")
    wanted = [item for item in json.loads(text) if item["rank"] is None or str(item["rank"]) == rank]

    def patch() -> None:
        for item in wanted:
            PATCHES[item["what"]](item)

    if rank is None:
        return
    if LOOP in sys.modules:
        patch()
    else:
        sys.meta_path.insert(0, OnceLoaded(patch))


class OnceLoaded(MetaPathFinder):
    """Calls ``patch`` when the loop has been loaded."""

    def __init__(self, patch: Callable[[], None]) -> None:
        self.patch = patch

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> Any:
        if name != LOOP:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            self.patch()

        spec.loader.exec_module = load_and_patch
        return spec


def wrap(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """``wrapper`` gets the usual function, then its arguments."""
    usual = getattr(holder, name)
    setattr(holder, name, lambda *arguments, **options: wrapper(usual, *arguments, **options))


def timed(item: dict[str, Any], share: float, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    began = time.perf_counter()
    result = function(*arguments, **options)
    time.sleep(item["ms"] / 1000 * share + (time.perf_counter() - began) * item["pct"] / 100)
    return result


def slow_step(item: dict[str, Any]) -> None:
    wrap(sys.modules[LOOP], "do_step", lambda *call, **options: timed(item, 1, *call, **options))


def paced_step(item: dict[str, Any]) -> None:
    late_s = 0.0

    def do_step(usual: Callable[..., Any], number: int, *arguments: Any) -> Any:
        nonlocal late_s
        began, pace_s = time.perf_counter(), item["ms"] / 1000
        result = usual(number, *arguments)
        time.sleep(max(0.0, pace_s - late_s - (time.perf_counter() - began)))
        late_s = max(0.0, late_s + time.perf_counter() - began - pace_s) if number >= WARM_UP else 0.0
        return result

    wrap(sys.modules[LOOP], "do_step", do_step)


def slow_compute(item: dict[str, Any]) -> None:
    """The delay of a step is spread over the forward passes of its layers, where the engine times them."""
    from llmb.engine.model import decoder

    share = 1.0

    def do_step(usual: Callable[..., Any], number: int, plan: Any, *arguments: Any) -> Any:
        nonlocal share
        share = 1 / (plan.recipe.model.layers * plan.recipe.layout.ga)
        return usual(number, plan, *arguments)

    wrap(sys.modules[LOOP], "do_step", do_step)
    for block in (decoder.Block, decoder.MoEBlock):
        wrap(block, "compute", lambda *call, **options: timed(item, share, *call, **options))


def slow_loader(item: dict[str, Any]) -> None:
    from llmb.engine.data.batches import RankData

    wrap(RankData, "step", lambda *call: timed(item, 1, *call))


def slow_copy(item: dict[str, Any]) -> None:
    from llmb.engine.data import batches

    wrap(batches, "moved", lambda *call: timed(item, 1, *call))


def slow_between(item: dict[str, Any]) -> None:
    """As a host that is late between two layers, which no part of the engine accounts for."""
    from llmb.engine.model import decoder

    wrap(decoder.Block, "forward", lambda *call: timed(item, 1, *call))


def slow_disk(item: dict[str, Any]) -> None:
    from llmb.engine.checkpoint import save

    wrap(save, "_write_pieces", lambda *call, **options: timed(item, 1, *call, **options))


def slow_link(item: dict[str, Any]) -> None:
    """Groups connect when they are first used: all sockets are set again before every step."""

    def do_step(usual: Callable[..., Any], *arguments: Any) -> Any:
        for connection in connections():
            connection.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, item["bytes_per_s"])
            connection.close()
        return usual(*arguments)

    wrap(sys.modules[LOOP], "do_step", do_step)


def sampled_step(item: dict[str, Any]) -> None:
    from llmb.runs.folder import RunFolder

    def samples() -> int:
        folder = RunFolder(Path(sys.argv[1])).resources
        return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.jsonl"))

    def do_step(usual: Callable[..., Any], *arguments: Any) -> Any:
        before, ends = samples(), time.monotonic() + LONGEST_S
        result = usual(*arguments)
        while samples() == before:
            assert time.monotonic() < ends, "nothing is sampled"
            time.sleep(0.005)
        return result

    wrap(sys.modules[LOOP], "do_step", do_step)


def connections() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if SOCKET.fullmatch(str(file.readlink())):
                found = socket.socket(fileno=os.dup(int(file.name)))
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()


PATCHES = {
    "step": slow_step,
    "pace": paced_step,
    "compute": slow_compute,
    "loader": slow_loader,
    "copy": slow_copy,
    "between": slow_between,
    "disk": slow_disk,
    "link": slow_link,
    "sampled": sampled_step,
}
