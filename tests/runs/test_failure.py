# SPDX-License-Identifier: Apache-2.0
"""Cause and victims told apart. The real reports are tested where runs are really killed."""

import pytest

from llmb.runs.failure import failure_line, first_failure

LOST = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:7044:\nConnection reset by peer")


def entry(rank: int, code: int) -> str:
    return f"  host      : node{rank}\n  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 7) \n"


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    log = f"{failure_line(0, 'node0', LOST)}\n{entry(1, -9)}{entry(2, -15)}{entry(0, 1)}"
    assert first_failure(log) == "rank 1 on node1 was killed by signal 9 (SIGKILL)"


def test_an_error_of_its_own_comes_before_a_lost_connection() -> None:
    lines = [failure_line(0, "node0", LOST), failure_line(3, "node3", ValueError("wrong shape"))]
    assert first_failure("\n".join(lines)) == "rank 3 on node3 failed: ValueError: wrong shape"


def test_ranks_ended_by_the_launcher_are_not_the_cause() -> None:
    assert first_failure(entry(4, -15) + failure_line(5, "node5", LOST)).startswith("rank 5 on node5")


@pytest.mark.parametrize("log", ["", "Training epoch 0, iteration 3/49 | lr: 1", "no rank here : at all"])
def test_a_log_without_failures_names_none(log: str) -> None:
    assert first_failure(log) is None


def test_a_long_message_takes_one_line() -> None:
    line = failure_line(0, "node", RuntimeError("many\nlines " * 500))
    assert "\n" not in line
    assert len(line) < 400
