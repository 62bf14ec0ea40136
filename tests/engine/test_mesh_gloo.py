# SPDX-License-Identifier: Apache-2.0
"""Every process group of a training on CPUs has one gloo thread: two of them race."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmb.engine.parallel.rendezvous import gloo_backend
from llmb.runs.checkpoints.checkpoint import saved_checkpoints
from llmb.runs.plan import Plan

HERE = Path(__file__).parent
WORKER, RACE_WORKER, HOSTS_WORKER, LIMIT_WORKER = (
    HERE / f"{name}_worker.py" for name in ("gloo", "race", "hosts", "limit")
)
SLOW_COPY = HERE / "slow_name_copy.c"
SECONDS, UNTIL_ABORT_S, ENDS_WITHIN_S = 10, 400, 600
"""The second is reached by chance only: the race takes half a minute, or several times that on a busy machine."""


def test_every_group_has_one_thread(
    tmp_path: Path, tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]]
) -> None:
    """Those of the world, of both meshes and what is made out of them, of FP8 and of checkpoints."""
    layout = {"tp": 2, "ep": 2, "etp": 1}
    plan = tiny_plan("finetune_llama4-maverick", dtype="fp8", overrides=layout, save_checkpoint=True)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    for printed in run_ranks(WORKER, 2, tmp_path):
        found = json.loads(printed)
        threads = found["groups"]
        assert {name.partition(" ")[2] for name in threads} >= {"default_pg", "checkpoint"}
        assert len(threads) == 3, "and one that all dimensions of one rank share"
        assert set(threads.values()) == {1}, threads
        assert found["devices"] == 1
        assert found["writes"] > 10, "planned before the first step"


@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [
        (1, 2),
        *(pytest.param(*nodes, marks=pytest.mark.slow) for nodes in ((2, 2), (4, 1))),
        pytest.param(8, 8, marks=pytest.mark.measured),
    ],
)
def test_hosts_are_connected_within_a_node_and_first_ranks_with_each_other(
    tmp_path: Path, tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], nodes: int, per_node: int
) -> None:
    """They join, send heartbeats, exchange values, save twice and leave; the worker checks what they exchange.

    64 are counted as 4 are, and show that so many can.
    """
    count = nodes * per_node
    plan = tiny_plan(scale=count, steps=2, save_checkpoint=True, checkpoint_interval=1, overrides={"gbs": count})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    lines = [text.splitlines()[-1] for text in run_ranks(HOSTS_WORKER, count, tmp_path, port, per_node)]
    printed = [json.loads(line)["connections"] for line in lines]
    others = per_node - 1
    of_group = [others + (nodes - 1 if rank % per_node == 0 else 0) for rank in range(count)]
    assert [found["hosts"] for found in printed] == [2 * links for links in of_group], "for figures and for checkpoints"
    # Two of each rank: its own and its heartbeat's. The first rank has the other ends, too.
    assert [found["store"] for found in printed] == [2 + 2 * count, *[2] * (count - 1)]
    assert [checkpoint.record.step for checkpoint in saved_checkpoints(tmp_path / "checkpoints")] == [1, 2]


@pytest.mark.parametrize(("stall_limit_s", "limit_s"), [(5, 60), (0, 24 * 24 * 3600)])
def test_ranks_wait_for_one_that_loads_for_longer_than_torch_s_limit(
    tmp_path: Path,
    tiny_plan: Callable[..., Plan],
    run_ranks: Callable[..., list[str]],
    stall_limit_s: int,
    limit_s: int,
) -> None:
    """In the groups of pipelines, too, which are made after that of all ranks. Zero is no limit."""
    plan = tiny_plan(overrides={"pp": 2, "vp": 2, "layers": 4}, stall_limit_s=stall_limit_s)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    for printed in run_ranks(LIMIT_WORKER, 2, tmp_path):
        limits = json.loads(printed)
        assert len(limits) > 1
        assert set(limits) == {limit_s}


def test_a_process_that_is_bound_to_a_gpu_has_such_a_group_too(tmp_path: Path) -> None:
    """Where ranks exchange figures of steps, and save checkpoints. Here no GPU is used, only named."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, torch.ones(2), group=dist.new_group(backend=gloo_backend()))
    finally:
        dist.destroy_process_group()
    assert gathered[0].tolist() == [1, 1]


@pytest.fixture(scope="module")
def slow_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that, preloaded, makes the race some thousand times as likely."""
    library = tmp_path_factory.mktemp("race") / "slow_name_copy.so"
    # Without the last option the compiler makes a call of memcpy, that is of itself, out of its loop.
    options = ["-O2", "-shared", "-fPIC", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
    subprocess.run(["gcc", *options, "-o", library, SLOW_COPY], check=True)
    return library


def ends(slow_copy: Path, folder: Path, seconds: int, whose: str) -> list[int]:
    """Exit codes of two ranks that take turns with two collectives."""
    variables = {**os.environ, "LD_PRELOAD": str(slow_copy)}
    command = [sys.executable, RACE_WORKER, folder]
    ranks = [
        subprocess.Popen([*command, str(rank), str(seconds), whose], env=variables, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    try:
        return [rank.wait(ENDS_WITHIN_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.measured
def test_one_thread_per_group_does_not_race(slow_copy: Path, tmp_path: Path) -> None:
    assert ends(slow_copy, tmp_path, SECONDS, "llmb") == [0, 0]


@pytest.mark.measured
def test_two_threads_per_group_do(slow_copy: Path, tmp_path: Path) -> None:
    """Otherwise the test above proves nothing, or torch has mended it and our backend can go."""
    assert {-signal.SIGABRT, -signal.SIGSEGV} & set(ends(slow_copy, tmp_path, UNTIL_ABORT_S, "torch"))
