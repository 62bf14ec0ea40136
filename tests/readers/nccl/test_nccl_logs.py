# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines and names as other programs write them)
"""NCCL's logs, with lines as NCCL 2.19 to 2.30 write them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.readers.nccl import nccl_log
from llmb.readers.nccl.nccl_log import find_nccl_files, read_nccl_logs
from llmb.readers.nccl.nccl_summary import Codes, NcclSummary, summarize_nccl

STEP_LINE = (
    "Training epoch 0, iteration {step}/4 | lr: 0.001 | global_step: {step} | reduced_train_loss: 7 |"
    " train_step_timing in s: 2.6 | consumed_samples: 8\n"
)


def line(
    rank: int,
    operation: str,
    count: int,
    datatype: int,
    ranks: int,
    *,
    handle: str | None = None,
    prefix: str = "node7:{pid}:{tid} [{device}]",
    end: str = "",
) -> str:
    start = prefix.format(pid=4000 + rank, tid=5000 + rank, device=rank % 8)
    return (
        f"{start} NCCL INFO {operation}: opCount 1f sendbuff 0x7ffb4713c200 recvbuff (nil) count {count}"
        f" datatype {datatype} op 0 root 0 comm {handle or f'0x5555{rank:04x}'} [nranks={ranks}] stream 0x5555630c58b0{end}\n"
    )


def init(rank: int, ranks: int, handle: str, identifier: str) -> str:
    return (
        f"node7:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm {handle} rank {rank}"
        f" nranks {ranks} cudaDev {rank} nvmlDev {rank} busId 1b000 commId {identifier} - Init START\n"
    )


def summary_of(tmp_path: Path, lines: Iterable[str]) -> NcclSummary:
    path = tmp_path / "log.out"
    path.write_text("".join(lines))
    return summarize_nccl(read_nccl_logs([path]), Codes())


def test_calls_are_counted_by_operation_size_and_communicator(tmp_path: Path) -> None:
    lines = [line(rank, "AllReduce", 1024, 7, 4) for rank in range(4)] * 3
    lines += [line(rank, "AllGather", 100, 9, 4) for rank in range(4)]
    lines += ["node7:4000:4000 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n", "some other text\n"]
    summary = summary_of(tmp_path, lines)
    assert (summary.calls, summary.logged_ranks, summary.coarse) == (16, 4, False)
    reduce, gather = summary.collectives
    assert (reduce.operation, reduce.datatype, reduce.count, reduce.ranks) == ("AllReduce", "float32", 1024, 4)
    assert (reduce.communicators, reduce.calls, reduce.calls_per_rank) == (1, 12, 3)
    assert (reduce.bytes_per_call, reduce.bytes_per_rank) == (4096, 3 * 4096)
    assert (gather.bytes_per_call, gather.datatype) == (100 * 2 * 4, "bfloat16")  # S of an all-gather: all ranks' data


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        ("[{device}]", ""),
        ("[2026-05-13 18:01:41] node-1.cluster:{pid}:{tid} [{device}]", ""),
        ("(Worker pid={pid}, ip=10.72.7.6) r24-l4-8:{pid}:{tid} [{device}]", ""),
        ("0: node7:{pid}:{tid} [{device}]", " task 0 globalrank 3"),
    ],
)
def test_what_stands_around_a_line_does_not_matter(tmp_path: Path, prefix: str, end: str) -> None:
    lines = [line(rank, "ReduceScatter", 8, 6, 2, prefix=prefix, end=end) for rank in range(2)]
    summary = summary_of(tmp_path, lines)
    assert (summary.calls, summary.logged_ranks) == (2, 2)
    assert summary.collectives[0].bytes_per_call == 8 * 2 * 2


def test_ranks_of_a_communicator_find_together_by_its_identifier(tmp_path: Path) -> None:
    """Two groups of two ranks, and one of eight of which a single rank logged."""
    lines = [init(rank, 2, f"0xaa{rank}", f"0x{rank // 2}00") for rank in range(4)]
    lines += [line(rank, "AllReduce", 16, 7, 2, handle=f"0xaa{rank}") for rank in range(4)]
    lines += [init(0, 8, "0xbb0", "0x900"), line(0, "Broadcast", 4, 1, 8, handle="0xbb0")]
    summary = summary_of(tmp_path, lines)
    reduce, broadcast = summary.collectives
    assert (reduce.communicators, reduce.communicator_names, reduce.logged_ranks) == (2, ("0x000", "0x100"), 4)
    assert (broadcast.communicators, broadcast.logged_ranks, broadcast.calls_per_rank) == (1, 1, 1)


def event(pid: int, end: str, *, handle: str, rank: int, ranks: int, device: int | None = None, more: str = "") -> str:
    """A line that begins or ends the life of a pointer, as NCCL 2.23 to 2.30 write it."""
    device = rank if device is None else device
    return (
        f"node7:{pid}:9 [{device}] NCCL INFO ncclCommSplit comm {handle} rank {rank} nranks {ranks} cudaDev {device}"
        f" nvmlDev {device} busId 1b000{more} - {end}\n"
    )


def call(pid: int, handle: str, ranks: int, count: int = 16, device: int = 0) -> str:
    return line(0, "AllReduce", count, 7, ranks, handle=handle, prefix=f"node7:{pid}:9 [{device}]")


def told(summary: NcclSummary) -> list[tuple[object, ...]]:
    return [
        (row.ranks, row.communicators, row.communicators_from, row.logged_ranks, row.calls_per_rank)
        for row in summary.collectives
    ]


def test_equal_pointers_of_several_processes_are_different(tmp_path: Path) -> None:
    """Processes of one program often have equal addresses."""
    lines = [init(rank, 4, "0xaa", "0x100") for rank in range(4)]
    lines += [line(rank, "AllReduce", 16, 7, 4, handle="0xaa") for rank in range(4)] * 3
    summary = summary_of(tmp_path, lines)
    assert told(summary) == [(4, 1, "init lines", 4, 3)]
    assert (summary.collectives[0].bytes_per_rank, summary.notes) == (3 * 64, ())
    without = summary_of(tmp_path, lines[4:])
    assert told(without) == [(4, 1, "number of ranks", 4, 3)]
    assert without.notes == (
        "4 of 4 pointers to communicators are not identified: the log has no line that initializes them"
        " (NCCL_DEBUG_SUBSYS=INIT)",
    )


def test_processes_of_several_nodes_may_have_equal_numbers(tmp_path: Path) -> None:
    prefixes = [f"node{node}:7:8 [0]" for node in (1, 2)]
    summary = summary_of(
        tmp_path, [line(0, "AllReduce", 16, 7, 2, handle="0xaa", prefix=prefix) for prefix in prefixes]
    )
    assert told(summary) == [(2, 1, "number of ranks", 2, 1)]


def test_devices_of_one_process_are_ranks(tmp_path: Path) -> None:
    """As nccl-tests -g 4 do."""
    more = " commId 0x7"
    lines = [event(1, "Init START", handle=f"0xa{rank}", rank=rank, ranks=4, more=more) for rank in range(4)]
    lines += [call(1, f"0xa{rank}", 4, device=rank) for rank in range(4)] * 5
    assert told(summary_of(tmp_path, lines)) == [(4, 1, "init lines", 4, 5)]


def test_a_pointer_is_another_communicator_after_it_was_destroyed(tmp_path: Path) -> None:
    lines = []
    for number, ranks in ((1, 2), (2, 2), (3, 2)):
        for rank in range(ranks):
            more = f" commId 0x{number}"
            lines.append(event(rank, "Init START", handle="0xaa", rank=rank, ranks=ranks, more=more))
            lines.append(event(rank, "Init COMPLETE", handle="0xaa", rank=rank, ranks=ranks, more=more))
            lines += [call(rank, "0xaa", ranks)] * number
            if number == 1:  # some versions log this at another level
                lines.append(event(rank, "Destroy COMPLETE", handle="0xaa", rank=rank, ranks=ranks))
    summary = summary_of(tmp_path, lines)
    assert told(summary) == [(2, 1, "init lines", 2, number) for number in (3, 2, 1)]
    assert [row.communicator_names for row in summary.collectives] == [("0x3",), ("0x2",), ("0x1",)]
    assert sum(row.calls for row in summary.collectives) == summary.calls == 12


def splits(pattern: str, *, count: bool) -> list[str]:
    """Four ranks split their communicator in pairs, as often as ``pattern`` has words; a rank's letter is its color."""
    lines = [event(rank, "Init START", handle="0xa", rank=rank, ranks=4, more=" commId 0x7") for rank in range(4)]
    for number, colors in enumerate(pattern.split(), start=1):
        for rank, color in enumerate(colors):
            if color == "-":
                continue
            place, ranks = colors[:rank].count(color), colors.count(color)
            counted = f" splitCount {number}" if count else ""
            more = f" parent 0xa{counted} color {ord(color)} key {rank}"
            given = {"handle": f"0xb{number}", "rank": place, "ranks": ranks, "device": rank, "more": more}
            lines += [event(rank, "Init START", **given), event(rank, "Init COMPLETE", **given)]
    for number, colors in enumerate(pattern.split(), start=1):
        for rank, color in enumerate(colors):
            if color != "-":
                lines += [call(rank, f"0xb{number}", colors.count(color), device=rank)] * number
    return lines


@pytest.mark.parametrize("count", [True, False])
def test_splits_with_equal_parent_and_color_are_different(tmp_path: Path, count: bool) -> None:
    """Twice the same pairs: four communicators, two with one call and two with two."""
    summary = summary_of(tmp_path, splits("xxyy xxyy", count=count))
    assert told(summary) == [(2, 2, "init lines", 4, 2), (2, 2, "init lines", 4, 1)]
    assert summary.notes == ()


def test_splits_that_the_log_cannot_tell_apart_are_said(tmp_path: Path) -> None:
    """The second rank's first split with color x is the third rank's only one. With numbers, there is no doubt."""
    lines = splits("xxyy zxx-", count=False)
    summary = summary_of(tmp_path, lines)
    assert {row.communicators_from for row in summary.collectives} == {"number of ranks", "init lines"}
    (note,) = summary.notes
    assert "the log describes several communicators alike" in note
    summary = summary_of(tmp_path, splits("xxyy zxx-", count=True))
    assert {row.communicators_from for row in summary.collectives} == {"init lines"}
    assert summary.notes == ()


def test_splits_of_a_parent_that_is_not_known(tmp_path: Path) -> None:
    lines = [text for text in splits("xxyy", count=True) if "commId" not in text]
    (note,) = summary_of(tmp_path, lines).notes
    assert note == (
        "4 of 4 pointers to communicators are not identified: they belong to splits of unidentified communicators"
    )


def test_equal_commids_of_splits_before_2_21(tmp_path: Path) -> None:
    """There a split's commId is made of its parent and color alone."""
    lines = []
    for number in (1, 2):
        for rank in range(2):
            more = " commId 0x5"
            lines.append(event(rank, "Init START", handle=f"0xb{number}", rank=rank, ranks=2, more=more))
            lines += [call(rank, f"0xb{number}", 2)] * number
    summary = summary_of(tmp_path, lines)
    assert told(summary) == [(2, 1, "init lines", 2, 2), (2, 1, "init lines", 2, 1)]
    assert [row.communicator_names for row in summary.collectives] == [("0x5 (2)",), ("0x5",)]


def test_lines_that_name_no_process_are_said(tmp_path: Path) -> None:
    lines = [line(rank, "AllReduce", 8, 6, 2, handle="0xa", prefix="[{device}]") for rank in range(2)]
    assert (
        "2 of 2 pointers are in lines without a process: equal ones count as one" in summary_of(tmp_path, lines).notes
    )


def test_a_long_line_takes_no_quadratic_time(tmp_path: Path) -> None:
    """Each of these took minutes in a pattern without bounds."""
    path = tmp_path / "log"
    for text in (
        "a" + ":1" * 22_000 + " [0] NCCL INFO AllReduce: opCount 1",
        "- Init START" * 10_000,
        "[0] NCCL INFO x comm 0x1 rank 1 nranks 2 cudaDev 0 " * 5_000 + "- Init START",
        "[0] NCCL INFO A: opCount 1 sendbuff 1 recvbuff 1 count " * 5_000,
    ):
        path.write_text(text)
        assert not read_nccl_logs([path]).calls


def test_very_many_communicators_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "MOST_HANDLES", 100)
    path = tmp_path / "log"
    path.write_text("".join(call(1, f"0x{number:x}", 2) for number in range(101)))
    with pytest.raises(UsageError, match="more than 100 communicators") as raised:
        read_nccl_logs([path])
    assert raised.value.where == str(path)


@pytest.mark.parametrize("text", ["0 0\nx 1\n", "0\n", "0 -1\n", "\xff 0\n", f"0 {'9' * 5000}\n"])
def test_steps_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.log").write_text(line(0, "AllReduce", 1, 7, 2))
    (tmp_path / "rank-0.steps").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="neither 'STEP OFFSET'") as raised:
        read_nccl_logs([tmp_path / "rank-0.log"])
    assert "rank-0.steps:" in str(raised.value.where)


def test_an_operation_that_is_not_known_has_no_size(tmp_path: Path) -> None:
    (row,) = summary_of(tmp_path, [line(0, "AllGatherQuantized", 4, 7, 2)]).collectives
    assert (row.calls, row.bytes_per_call, row.bytes_per_rank) == (1, None, None)


def test_steps_of_a_run_s_own_log_end_with_its_step_lines(tmp_path: Path) -> None:
    lines = []
    for step in range(3):
        lines += [line(rank, "AllReduce", 10 * (step + 1), 7, 2) for rank in range(2)]
        lines.append(STEP_LINE.format(step=step))
    lines.append(line(0, "AllReduce", 10, 7, 2))
    summary = summary_of(tmp_path, lines)
    assert [(step.step, step.calls, step.bytes_per_rank) for step in summary.steps] == [
        (0, 2, 40),
        (1, 2, 80),
        (2, 2, 120),
    ]
    assert summary.calls == 7


def test_steps_of_a_rank_s_log_are_noted_beside_it(tmp_path: Path) -> None:
    """As ``llmb run --nccl-trace`` does: what comes before the first step belongs to none."""
    logs = []
    for rank in range(2):
        before, step = line(rank, "AllReduce", 1, 7, 2), line(rank, "AllGather", 6, 7, 2)
        logs.append(tmp_path / f"rank-{rank}.log")
        logs[-1].write_text(before + step + step + step)
        logs[-1].with_suffix(".steps").write_text(f"0 {len(before)}\n1 {len(before + step)}\n")
    summary = summarize_nccl(read_nccl_logs(logs), Codes())
    assert (summary.calls, summary.logged_ranks) == (8, 2)
    assert [(step.step, step.calls_per_rank, step.bytes_per_rank) for step in summary.steps] == [(0, 1, 48), (1, 2, 96)]


def test_lines_may_end_anywhere_in_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(rank, "AllReduce", 1024, 7, 4) for rank in range(4)] + [STEP_LINE.format(step=0)]
    expected = summary_of(tmp_path, lines * 20)
    for size in (300, 777, 4096):
        monkeypatch.setattr(nccl_log, "CHUNK_BYTES", size)
        assert summary_of(tmp_path, lines * 20) == expected


def test_very_many_sizes_are_told_apart_by_powers_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "MOST_KEYS", 50)
    summary = summary_of(tmp_path, [line(0, "Send", count, 0, 8) for count in range(1000)])
    assert summary.coarse
    assert summary.calls == 1000
    assert sum((row.bytes_per_call or 0) * row.calls for row in summary.collectives) == sum(range(1000))
    row = next(row for row in summary.collectives if row.count_least == 64)
    assert (row.count, row.count_most, row.calls, row.bytes_per_call) == (None, 127, 64, 95.5)


def test_a_datatype_that_is_not_known_has_no_size(tmp_path: Path) -> None:
    (row,) = summary_of(tmp_path, [line(0, "AllReduce", 4, 77, 2)]).collectives
    assert (row.datatype, row.bytes_per_call, row.bytes_per_rank) == ("code 77", None, None)


def test_lines_in_another_form_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "Node 0: NCCL INFO AllReduce: opCount 847, sendbuff 0x7f... OK\n"
        "node:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count x datatype 7 op 0 root 0 comm 0x3 [nranks=2]\n"
        "node:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 5 data\n"
    )
    assert not read_nccl_logs([path]).calls


def test_folders_of_runs_are_searched(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "nccl_trace"
    folder.mkdir(parents=True)
    for rank in (10, 2):
        (folder / f"rank-{rank}.log").write_text(line(rank, "AllReduce", 4, 7, 2))
        (folder / f"rank-{rank}.steps").write_text("0 0\n")
    assert [path.name for path in find_nccl_files([tmp_path])] == ["rank-2.log", "rank-10.log"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="no NCCL log"):
        find_nccl_files([empty])
