# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (long sentences)
"""Who is behind, silent or dead by NCCL's RAS, in all forms of its answer. They are written by hand, not by NCCL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ras_answers import (
    AHEAD,
    BEHIND,
    BEHIND_2_24,
    DEAD,
    DEAD_2_24,
    FAILED,
    FINE_RANKS,
    LATE,
    PAIRS,
    SILENT,
    STATES,
    UNKNOWN_2_24,
    WORLD,
    answer,
    communicator,
    missing,
    ras_rank,
    text,
)

from llmb.missing import Missing
from llmb.traces.nccl_ras import CUT, RasStatus, is_ras, ras_text, read_ras

NODE, OTHER = "10.0.0.1", "10.0.0.2"
HOSTS = dict.fromkeys(range(4), "node7") | dict.fromkeys(range(4, 8), "node8")


def read(given: str | bytes) -> RasStatus:
    raw = given.encode() if isinstance(given, str) else given
    assert is_ras(raw[:4096].decode())
    status = read_ras(raw)
    assert isinstance(status, RasStatus)
    return status


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            text("2.24.3+cuda12.6", warnings=BEHIND_2_24),
            "rank 3 on node7 (process 4103, GPU 3) has launched 118 operations, 2 fewer than others of a communicator of"
            " 8 ranks",
            id="2.24, one count",
        ),
        pytest.param(
            text("2.27.7+cuda12.8", warnings=BEHIND),
            "rank 3 on node7 (process 4103, GPU 3) has launched 40 AllReduce operations, 1 fewer than others of a"
            " communicator of 8 ranks",
            id="2.27, by kind",
        ),
        pytest.param(
            text("2.30.7", warnings=BEHIND.replace("has launched up to operation 40", "has not launched any operations")),
            "rank 3 on node7 (process 4103, GPU 3) has launched 0 AllReduce operations, 41 fewer than others of a"
            " communicator of 8 ranks",
            id="2.29, none",
        ),
        pytest.param(
            text("2.29.3", warnings=AHEAD),
            "6 ranks have launched 0 AllReduce operations, 1 fewer than others of a communicator of 8 ranks",
            id="most are behind",
        ),
        pytest.param(
            text("2.27.7", SILENT, BEHIND), "rank 6 on node8 (process 5102, GPU 2) does not answer", id="silent"
        ),
        pytest.param(
            text("2.28.3", DEAD).replace("NCCL version 2.28.3 compiled with CUDA", "RCCL version 2.28.3 compiled with ROCm"),
            "rank 6 on node8 (process 5102, GPU 2) does not answer and is considered dead",
            id="dead, RCCL",
        ),
        pytest.param(
            text("2.24.3", DEAD_2_24),
            f"a process on {OTHER} (process 5102, GPU 2) does not answer and is considered dead; a process on {OTHER}"
            " (process 5103, GPU 3) does not answer and is considered dead",
            id="dead, 2.24",
        ),
        pytest.param(
            text("2.27.7", FAILED),
            "rank 0 on node7 (process 4100, GPU 0) reports an error in a communicator of 8 ranks: Remote process error;"
            " rank 5 on node8 (process 5101, GPU 1) reports an error in a communicator of 8 ranks: Remote process error;"
            " rank 6 on node8 (process 5102, GPU 2) reports an error in a communicator of 8 ranks: System error",
            id="errors",
        ),
        pytest.param(
            text("2.27.7", warnings=STATES), "rank 7 on node8 has left a communicator of 8 ranks", id="states",
        ),
        pytest.param(text("2.27.7"), "all ranks of 1 communicator answer and have launched the same operations", id="fine"),
        pytest.param(
            text("2.27.7", warnings=LATE),
            "all ranks of 1 communicator answer and have launched the same operations; NCCL waited in vain for 2 answers"
            " of other processes",
            id="timeouts",
        ),
    ],
)  # fmt: skip
def test_text_names_who_is_unlike_the_others(given: str, said: str) -> None:
    assert ras_text(read(given), HOSTS) == said
    assert ras_text(read(given.replace("\n", "\r\n")), HOSTS) == said


def test_ranks_without_a_process_are_listed() -> None:
    found = read(text("2.24.3", warnings=UNKNOWN_2_24)).suspects
    assert [(item.kind, item.rank, item.node) for item in found] == [("absent", 3, None), ("absent", 7, None)]
    dead = read(text("2.24.3", DEAD_2_24)).suspects
    assert [(item.kind, item.rank, item.pid) for item in dead] == [
        ("dead", None, 5102), ("dead", None, 5103), ("silent", 6, None), ("silent", 7, None)
    ]  # fmt: skip


def test_a_rank_of_a_smaller_communicator_is_not_taken_for_the_programs() -> None:
    warnings = BEHIND.replace("#0-0", "#1-2").replace("7 ranks have", "Rank 0 has").replace("Rank 3", "Rank 1")
    status = read(text("2.27.7", warnings=warnings, groups=(WORLD.format("OK"), PAIRS.format("MISMATCH"))))
    (item,) = status.suspects
    assert (item.rank, item.ranks, item.program_rank, item.behind, status.communicators) == (1, 2, None, 1, 5)
    assert ras_text(status).endswith("1 fewer than others of a communicator of 2 ranks")


def test_json_names_the_program_s_rank_in_every_communicator() -> None:
    stuck = ras_rank(3, counts={"AllReduce": 40})
    pair = [{**ras_rank(0, counts={"AllGather": 7}), **{key: one[key] for key in ("pid", "cuda_dev")}, "rank": number}
            for number, one in enumerate((FINE_RANKS[2], stuck))]  # fmt: skip
    pair[1]["collective_counts"]["AllGather"] = 6
    status = read(answer(communicator("c0ffee", [*FINE_RANKS[:3], stuck, *FINE_RANKS[4:]]), communicator("bea", pair)))
    assert (status.gpus, status.communicators, status.notes) == (8, 2, ())
    found = [(item.program_rank, item.rank, item.operation, item.behind) for item in status.suspects]
    assert found == [(3, 3, "AllReduce", 1), (3, 1, "AllGather", 1)]
    assert ras_text(status, HOSTS) == (
        "rank 3 on node7 (process 4103, GPU 3) has launched 40 AllReduce operations, 1 fewer than others of a communicator"
        " of 8 ranks"
    )


def test_a_rank_that_waits_itself_is_no_cause() -> None:
    """Rank 1 waits for rank 3 in one communicator, so that rank 0 waits for rank 1 in another one."""

    def of(number: int, name: str, count: int, own: int) -> object:
        return {**ras_rank(number, counts={name: count}), "rank": own}

    first = communicator("a", [of(0, "AllReduce", 5, 0), of(1, "AllReduce", 4, 1)])
    second = communicator("b", [of(1, "AllGather", 9, 0), of(3, "AllGather", 8, 1)])
    (item,) = read(answer(first, second)).suspects
    assert (item.pid, item.operation) == (4103, "AllGather")


@pytest.mark.parametrize("version", ["2.28.7", "2.28.9", "2.29.2", "2.30.7+cuda13"])
def test_json_of_missing_ranks(version: str) -> None:
    gone = [missing(5), missing(6, dead=True), missing(7, unresponsive=False)]
    raw = answer(communicator("c0ffee", FINE_RANKS[:5], gone), version=version, timeouts=1)
    status = read(raw)
    assert (b'"nvml_dev": 1\n' in raw) == version.startswith("2.28")
    assert [(item.kind, item.program_rank) for item in status.suspects] == [("dead", 6), ("silent", 5), ("absent", 7)]
    assert status.notes == ("NCCL waited in vain for 1 answer of other processes",)


def test_json_of_errors_and_states() -> None:
    ranks = [ras_rank(0, counts={}, async_error=6), ras_rank(1, counts={}, init_state=7), ras_rank(2, counts={}, abort_flag=True),
             ras_rank(3, counts={}, finalize_called=True), ras_rank(4, counts={}, async_error=99), *(ras_rank(n, counts={}) for n in (5, 6))]  # fmt: skip
    found = [(item.kind, item.rank, item.detail) for item in read(answer(communicator("a", ranks))).suspects]
    assert found == [
        ("error", 0, "remote process"), ("error", 4, "number 99"),
        ("state", 1, "INIT"), ("state", 2, "ABORT"), ("state", 3, "FINALIZE"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"read socket: Connection reset by peer", "not an answer of NCCL's RAS"),
        (b"", "not an answer"),
        (answer(communicator("a", FINE_RANKS))[:-10], "cannot be read: Invalid JSON"),
        (answer({"hash": "a", "size": -1, "ranks": []}), "greater than or equal to 0"),
        (b'{"nccl_version": "2.29", "communicators": 3}', "cannot be read"),
        (b'{"communicators": ' + b"[" * 100_000, "cannot be read"),
    ],
    ids=["closed", "empty", "cut", "negative", "other", "deep"],
)
def test_what_is_not_understood_is_refused(given: bytes, reason: str) -> None:
    found = read_ras(given)
    assert isinstance(found, Missing)
    assert reason in found.reason


@pytest.mark.parametrize("errors", [SILENT, DEAD_2_24, FAILED], ids=["silent", "dead", "failed"])
@pytest.mark.parametrize(
    "warnings", [BEHIND, STATES + LATE, UNKNOWN_2_24, AHEAD], ids=["behind", "states", "unknown", "ahead"]
)
def test_a_text_that_ends_anywhere_tells_less(errors: str, warnings: str) -> None:
    raw = text("2.27.7", errors, warnings).encode()
    for end in range(len(raw)):
        found = read_ras(raw[:end])
        if isinstance(found, RasStatus):
            assert found.notes[-1:] == (CUT,) or b"Warnings\n========\n" in raw[:end]
            assert ras_text(found)


def test_json_that_ends_anywhere_is_refused() -> None:
    raw = answer(communicator("a", FINE_RANKS[:2], [missing(2)]), version="2.28.9").rstrip()
    assert not any(read_ras(raw[:end]) for end in range(len(raw)))


@given(st.lists(st.sampled_from([*"".join((BEHIND, DEAD_2_24, AHEAD, UNKNOWN_2_24, FAILED)).splitlines(), "DEAD"])))
def test_lines_in_any_order_are_no_error(lines: list[str]) -> None:
    status = read_ras(text("2.27.7", warnings="\n".join(lines)).encode())
    assert isinstance(status, RasStatus)
    assert ras_text(status)


@given(st.binary(max_size=300))
def test_other_bytes_are_no_error(given: bytes) -> None:
    read_ras(b"NCCL version 2.27.7 compiled with CUDA 12.8\n" + given)
    read_ras(b'{"communicators": ' + given)
