# SPDX-License-Identifier: Apache-2.0
"""Cause and victims told apart. The real reports are tested where runs are really killed."""

import pytest

from llmb.errors import UsageError
from llmb.processes.ranks import how_it_ended
from llmb.runs.failure import failure_line, first_failure, last_lines

LOST = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:7044:\nConnection reset by peer")


def entry(rank: int, code: int) -> str:
    return f"llmb: rank {rank} on node{rank} {how_it_ended(code)}\n"


def test_an_error_that_says_what_to_do_is_not_preceded_by_its_class() -> None:
    error = UsageError("the data is damaged:\n  - a is missing", where="/data", do="prepare it again")
    assert failure_line(3, "node1", error) == "llmb: rank 3 on node1 failed: the data is damaged: - a is missing"
    assert failure_line(0, "node0", ValueError("no")) == "llmb: rank 0 on node0 failed: ValueError: no"


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    log = f"{failure_line(0, 'node0', LOST)}\n{entry(1, -9)}{entry(2, -15)}{entry(0, 1)}"
    assert first_failure(log) == "rank 1 on node1 was killed by signal 9 (SIGKILL)"


def test_an_error_of_its_own_comes_before_a_lost_connection() -> None:
    lines = [failure_line(0, "node0", LOST), failure_line(3, "node3", ValueError("wrong shape"))]
    assert first_failure("\n".join(lines)) == "rank 3 on node3 failed: ValueError: wrong shape"


def test_ranks_ended_by_the_launcher_are_not_the_cause() -> None:
    assert first_failure(entry(4, -15) + failure_line(5, "node5", LOST)).startswith("rank 5 on node5")


def test_what_made_a_run_stand_still_comes_before_its_ending() -> None:
    log = f"llmb: stall: rank 2 on node2 stopped responding at step 7\n{failure_line(0, 'node0', LOST)}\n{entry(2, -9)}"
    assert first_failure(log) == "rank 2 on node2 stopped responding at step 7"


def test_a_rank_that_left_without_a_word_comes_before_those_that_lost_it() -> None:
    log = f"{failure_line(0, 'node0', LOST)}\n{entry(0, 1)}{entry(1, 3)}"
    assert first_failure(log) == "rank 1 on node1 ended with exit code 3"


def test_a_task_that_the_scheduler_saw_killed_comes_before_those_that_lost_it() -> None:
    aborted = "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: node2: tasks 2-3: Killed\n"
    log = f"{failure_line(0, 'node1', LOST)}\n{aborted}"
    assert first_failure(log) == "task 2-3 on node2 ended: Killed"
    own = failure_line(1, "node1", ValueError("wrong shape"))
    assert first_failure(f"{own}\n{aborted}") == "rank 1 on node1 failed: ValueError: wrong shape"
    assert first_failure("srun: error: node1: task 0: Exited with exit code 1\n") is None


def test_last_lines_lead_to_the_failure_and_leave_out_its_aftermath() -> None:
    lost = f"Traceback (most recent call last):\n  File\n{failure_line(0, 'node0', LOST)}\n"
    own = f"Traceback (most recent call last):\n  File\n{failure_line(1, 'node1', ValueError('wrong shape'))}\n"
    assert last_lines(f"step 1\nstep 2\n{entry(1, -9)}{lost}", 1) == ["step 2"]
    assert last_lines(f"step 1\nstep 2\n{lost}{entry(1, -9)}", 1) == ["step 2"]
    assert last_lines(f"step 1\n{own}{lost}{entry(1, 1)}", 2) == own.splitlines()[1:]
    assert last_lines("llmb: stall: rank 1\nstack of rank 1\n", 5) == ["llmb: stall: rank 1"]
    assert last_lines("usage: something\n", 5) == ["usage: something"]


@pytest.mark.parametrize("log", ["", "Training epoch 0, iteration 3/49 | lr: 1", "no rank here : at all"])
def test_a_log_without_failures_names_none(log: str) -> None:
    assert first_failure(log) is None


def test_a_long_message_takes_one_line() -> None:
    line = failure_line(0, "node", RuntimeError("many\nlines " * 500))
    assert "\n" not in line
    assert len(line) < 400
