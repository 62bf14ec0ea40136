# SPDX-License-Identifier: Apache-2.0
"""Why a run stopped: the rank that blocks it, cause and victims. Real hangs and kills are tested with real runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.launch.ranks import how_it_ended
from llmb.runs.failure import (
    Beat,
    RankStatus,
    Wait,
    failure_line,
    find_stall,
    first_failure,
    last_lines,
    parse_ranks,
    ranks_text,
    time_to_notice,
)

LIMIT_S, PATIENCE_S = 100, 8


def wait(group: str = "0", number: int = 7, ranks: str = "0-3", operation: str = "all_reduce") -> Wait:
    return Wait(operation=operation, group=group, label=f"mesh_{group}", number=number, ranks=ranks)


def beat(rank: int, *waits: Wait, idle_s: float = 101, **more: object) -> Beat:
    begun = {one.group: one.number for one in waits}
    given = {"number": 3, "host": f"node{rank // 2}", "phase": "step", "step": 9, "place": "engine/loop.py:9 train"}
    return Beat(**{**given, "rank": rank, "idle_s": idle_s, "waits": waits, "begun": begun, **more})


def seen(*beats: Beat, silent: dict[int, float] | None = None) -> list[RankStatus]:
    return [RankStatus(one.rank, one, (silent or {}).get(one.rank, 0.5)) for one in beats]


def find(ranks: list[RankStatus]) -> str | None:
    return find_stall(ranks, LIMIT_S, PATIENCE_S)


def test_a_stopped_process_is_named_with_what_the_others_wait_in() -> None:
    ranks = seen(beat(0, wait()), beat(1, wait()), beat(2, idle_s=0, step=8), beat(3, wait()), silent={2: 9})
    assert find(ranks) == (
        "rank 2 on node1 stopped responding at step 9; ranks 0, 1, 3 wait in all_reduce of group mesh_0 (ranks 0-3)"
    )


def test_a_rank_in_no_collective_is_named() -> None:
    ranks = seen(beat(0, wait()), beat(1), beat(2, wait()), beat(3, wait()))
    assert find(ranks) == (
        "rank 1 on node0 has hung for 101 s at step 9, in no collective, at engine/loop.py:9 train; "
        "ranks 0, 2, 3 wait in all_reduce of group mesh_0 (ranks 0-3)"
    )


def test_a_rank_that_waits_for_what_torch_does_not_record_is_not_taken_for_idle() -> None:
    text = find(seen(beat(0), beat(1, communicates=True)))
    assert text.startswith("rank 0 on node0 has hung")


def test_the_end_of_a_chain_of_waiting_ranks_is_named() -> None:
    """0 waits for 1 in a group of two, 1 for 2 in another one, and 2 is in an earlier collective of that."""
    tp, dp = wait("tp", 5, "0, 1"), wait("dp", 3, "1, 2")
    ranks = seen(
        beat(0, tp), beat(1, dp, begun={"tp": 4, "dp": 3}), beat(2, wait("dp", 2, "1, 2")), beat(3, communicates=True)
    )
    assert find(ranks).startswith("rank 2 on node1 has hung for 101 s at step 9, in all_reduce of group mesh_dp")


def test_what_cannot_be_told_is_not_guessed() -> None:
    ranks = seen(beat(0, wait()), beat(1, wait()))
    assert find(ranks).startswith(
        "no rank has made progress for 101 s at step 9, and none was found to block the others; "
    )


@pytest.mark.parametrize(
    ("phase", "idle_s", "stalled"),
    [
        ("step", 99, False),
        ("start", 399, False),
        ("start", 401, True),
        ("checkpoint", 1199, False),
        ("profile", 1199, False),
        ("profile", 1201, True),
        ("end", 101, True),
    ],
)
def test_loading_and_saving_may_take_longer(phase: str, idle_s: float, stalled: bool) -> None:
    assert bool(find(seen(beat(0, phase=phase, idle_s=idle_s), beat(1, wait(), idle_s=2000)))) is stalled


def test_a_process_that_is_stopped_while_others_save_is_noticed_in_the_usual_time() -> None:
    saving = [beat(rank, phase="checkpoint", idle_s=101, place=None) for rank in range(3)]
    assert find(seen(*saving, silent={1: 99})) is None
    going_on = saving[0].model_copy(update={"idle_s": 2})
    assert find(seen(going_on, *saving[1:], silent={1: 101})) is None
    assert find(seen(*saving, silent={1: 101})) == "rank 1 on node0 stopped responding at step 9"


def test_a_rank_that_never_came_has_the_time_of_a_start() -> None:
    others = seen(beat(0, phase="start", idle_s=399))
    assert find([*others, RankStatus(1, None, 399)]) is None
    assert find([*others, RankStatus(1, None, 401)]).startswith("rank 1 never responded")


def test_ranks_that_have_ended_are_not_missed() -> None:
    ranks = seen(beat(0, phase="end"), beat(1, phase="end", place="engine/mesh.py:9 leave"), silent={0: 500})
    assert find(ranks).startswith("rank 1 on node0 has hung for 101 s at step 9, in no collective, at engine/mesh")
    assert find(seen(beat(0, phase="end", idle_s=1), beat(1, phase="end", idle_s=1), silent={0: 500, 1: 500})) is None


def test_many_ranks_take_one_line() -> None:
    ranks = seen(*(beat(rank, wait(f"tp{rank // 4}")) for rank in range(1000)), *(beat(rank) for rank in (1000, 1003)))
    text = find(ranks)
    assert text.startswith("ranks 1000, 1003 on node500, node501 have hung")
    assert text.endswith("; 246 more groups of ranks")
    assert len(text) < 700


@given(st.sets(st.integers(0, 300)))
def test_ranks_survive_their_short_form(ranks: set[int]) -> None:
    assert parse_ranks(ranks_text(ranks)) == ranks


def test_short_forms() -> None:
    assert ranks_text([5, 4, 0, 6, 2]) == "0, 2, 4-6"
    assert ranks_text(range(0, 100, 2), most=2) == "0, 2 and more (50 in all)"


@pytest.mark.parametrize(("limit_s", "notice_s"), [(0, 0), (4, 2), (12, 6), (20, 14), (300, 294)])
def test_ranks_act_early_enough_for_the_run_to_end_within_its_limit(limit_s: int, notice_s: float) -> None:
    assert time_to_notice(limit_s) == notice_s


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
