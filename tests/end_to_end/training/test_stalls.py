# SPDX-License-Identifier: Apache-2.0
"""A process that stops, hangs or dies ends the run, by name, and nothing is left behind."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.launch.local import run_workers
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.launch.ranks import words
from llmb.runs.experiment import create_run_folder
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, write_record
from llmb.runs.result import Result

Start = Callable[..., Any]
MakePlan = Callable[..., Plan]
Gone = Callable[..., bool]

HOST = socket.gethostname()
FOUR = ("-w", "pretrain_llama3.1", "--scale", "4", "--steps", "100000")
TWO = ("-w", "pretrain_llama3.1", "--scale", "2", "--steps", "100000")
LIMIT_S = 12
SOON_S = 120
"""Far less than torch waits for a rank that is gone."""
ODD_WORKER = Path(__file__).parent / "odd_worker.py"


@pytest.mark.slow
def test_a_killed_worker_of_four_ends_the_run_and_is_named(start: Start, gone: Gone, forked_python: str) -> None:
    run = start(*FOUR, python=forked_python)
    folder = run.wait_for_steps(3)
    workers = run.workers()
    assert set(workers) == {0, 1, 2, 3}
    os.kill(workers[2], signal.SIGKILL)
    began = time.monotonic()
    _, talk = run.process.communicate()
    assert time.monotonic() - began < SOON_S
    assert run.process.returncode == 4
    assert f"the run failed: rank 2 on {HOST} was killed by signal 9 (SIGKILL), after " in talk
    assert "see 'llmb docs when-a-run-hangs-or-dies'" in talk
    assert re.search(r"iteration \d+/99999", talk)  # the last lines; how many steps went by is up to the machine
    assert "torch/distributed/elastic" not in talk
    assert str(folder) in talk
    assert gone(list(workers.values()))
    assert f"rank 2 on {HOST}" in run.record()["reason"]


@pytest.mark.parametrize(
    ("options", "victim", "others"),
    [(TWO, 0, "rank 1 waits in all"), pytest.param(FOUR, 2, "ranks 0, 1, 3 wait in all", marks=pytest.mark.measured)],
)
@pytest.mark.slow
def test_a_stopped_worker_ends_the_run_and_is_named(
    start: Start, gone: Gone, options: tuple[str, ...], victim: int, others: str
) -> None:
    run = start(*options, "--stall-limit", str(LIMIT_S))
    folder = run.wait_for_steps(3)
    run.wait_for_heartbeats()
    workers = run.workers()
    os.kill(workers[victim], signal.SIGSTOP)
    began = time.monotonic()
    _, talk = run.process.communicate()
    assert LIMIT_S / 2 < time.monotonic() - began < LIMIT_S + SOON_S
    assert run.process.returncode == 4
    assert f"the run failed: rank {victim} on {HOST} stopped responding at step " in talk
    assert f"; {others}" in talk
    assert " of group " in talk
    assert "Training epoch 0, iteration " in talk
    assert gone(list(workers.values()))
    kept = run.record()
    assert kept["plan"]["stall_limit_s"] == LIMIT_S
    assert f"rank {victim} on {HOST} stopped responding" in kept["reason"]
    log = (folder / f"log-{folder.name}.out").read_text()
    assert "thread MainThread, most recent call last:" in log
    assert not (folder / "stall.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "stopped"),
    [
        ("run", [0]),
        pytest.param("run", [], marks=pytest.mark.measured),
        pytest.param("agent", [], marks=pytest.mark.measured),
        pytest.param("agent", [0, 1], marks=pytest.mark.measured),
    ],
)
def test_workers_do_not_outlive_those_who_started_them(start: Start, gone: Gone, who: str, stopped: list[int]) -> None:
    """Not even those that are stopped (SIGSTOP) and cannot end by themselves."""
    run = start(*TWO, "--stall-limit", "0")
    run.wait_for_steps(3)
    workers, agent, samplers = run.workers(), run.agent(), run.samplers()
    assert len(samplers) == 1
    for rank in stopped:
        os.kill(workers[rank], signal.SIGSTOP)
    os.kill(run.process.pid if who == "run" else agent, signal.SIGKILL)
    assert gone([agent, *workers.values(), *samplers], within_s=SOON_S)


def run_odd(python: str, plan: Plan, install: Path, odd: str) -> tuple[Result, float]:
    """The result of a run whose rank 1 does something odd in step 3, and the seconds it took from there."""
    folder = create_run_folder(install, plan)
    kept = new_record(plan, (python, *words(1, plan.recipe.scale), python, str(ODD_WORKER), str(folder.path)))
    write_record(folder, kept)
    exit_code = run_workers(kept.command, {"ODD": odd, "OMP_NUM_THREADS": "1"}, folder, lambda: None)
    seconds = time.time() - folder.steps.stat().st_mtime
    return finish_run(folder, kept, End(exit_code)), seconds


@pytest.mark.parametrize(
    ("odd", "limit_s", "within_s", "said"),
    [
        pytest.param(
            "sleep",
            LIMIT_S,
            LIMIT_S + SOON_S,
            rf"rank 1 on {HOST} has hung for \d+ s at step 3, in no collective, at engine/loop",
            marks=pytest.mark.slow,  # it counts seconds, as the others here do
        ),
        ("fail", 300, SOON_S, f"rank 1 on {HOST} failed: ValueError: an odd shape, after 3 of 10"),
        pytest.param(
            "leave", 300, SOON_S, f"rank 1 on {HOST} ended with exit code 3, after 3 of 10", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_hangs_or_leaves_while_the_others_wait_is_named(
    tmp_path: Path, tiny_plan: MakePlan, forked_python: str, odd: str, limit_s: int, within_s: float, said: str
) -> None:
    result, seconds = run_odd(forked_python, tiny_plan(steps=10, stall_limit_s=limit_s), tmp_path, odd)
    assert result.reason is not None
    assert re.match(said, result.reason)
    assert seconds < within_s


@pytest.mark.measured
def test_a_run_that_cannot_disconnect_is_finished_all_the_same(
    tmp_path: Path, tiny_plan: MakePlan, forked_python: str
) -> None:
    result, seconds = run_odd(forked_python, tiny_plan(steps=10), tmp_path, "linger")
    assert result.status == "success"
    assert seconds < SOON_S


@pytest.mark.slow
def test_a_stopped_rank_that_keeps_the_store_is_named(
    tmp_path: Path, tiny_plan: MakePlan, start_ranks: Callable[..., list[Any]]
) -> None:
    """As under Slurm, where no launcher keeps the store: whoever asks it waits forever."""
    plan = tiny_plan(steps=100000, stall_limit_s=LIMIT_S)
    folder = create_run_folder(tmp_path, plan)
    write_record(folder, new_record(plan, ()))
    ranks = start_ranks(["-m", "llmb.engine.worker", str(folder.path)], 2, folder.log)
    while not folder.steps.exists() or folder.steps.read_text().count("\n") < 3:
        assert ranks[0].poll() is None, folder.log.read_text()
        time.sleep(0.05)
    ranks[0].send_signal(signal.SIGSTOP)
    assert ranks[1].wait(timeout=LIMIT_S + SOON_S) == 1
    said = r"llmb: stall: rank 0 at 127\.0\.0\.1:\d+, which hosts the run's store, stopped res"
    assert re.search(said, folder.log.read_text())
    assert folder.stall.exists()
