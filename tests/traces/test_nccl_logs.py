# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines and names as other programs write them)
"""NCCL's logs, with lines as NCCL 2.18 to 2.30 write them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from llmb.errors import UsageError
from llmb.traces import nccl_log
from llmb.traces.nccl_files import find_nccl_files
from llmb.traces.nccl_log import read_nccl_logs
from llmb.traces.nccl_summary import Codes, NcclSummary, summarize_nccl

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
        f" nranks {ranks} cudaDev {rank} nvmlDev {rank} busId 1b000 commId {identifier} - Init COMPLETE\n"
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
