# SPDX-License-Identifier: Apache-2.0
"""Tables and progress read the same in a pipe as on a terminal."""

import time
from collections.abc import Callable, Iterator

import pytest
from shown_tables import shown_lines

from llmb.cli.progress import ByteProgress
from llmb.reports.formats import interval_of
from llmb.reports.table import Column, Table, plain_lines, rows_table


def numbers() -> Table:
    rows = [("node[1-2]", "7", "[red]not markup[/red] :smile:"), ("n", "1,234", "日本語 é é")]
    return rows_table("Nodes: 2", ("node", "runs", "reason"), rows, right=("runs",))


def with_caption() -> Table:
    headers = ("what it is that is counted", "jobs")
    return rows_table("Campaign", headers, [("all", "20")], right=("jobs",), caption="Two kinds of job.")


def without_headers() -> Table:
    rows = [("state", "failed\nfor a reason of two lines"), ("alone",), ("more", "cells", "than columns")]
    return rows_table("Run", ("", ""), rows)


def empty() -> Table:
    return rows_table("Jobs: 0", ("job", "state"))


@pytest.mark.parametrize("make", [numbers, with_caption, without_headers, empty])
def test_a_pipe_and_a_wide_terminal_get_the_same_lines(make: Callable[[], Table]) -> None:
    assert list(plain_lines(make())) == shown_lines(make(), 200)


@pytest.mark.parametrize("width", [24, 40])
def test_a_narrow_terminal_folds_and_loses_nothing(width: int) -> None:
    table = rows_table("Long", ("name", "words"), [("one", "two words", "x" * 200)])
    lines = shown_lines(table, width)
    assert "".join(lines).count("x") == 200
    assert max(map(len, lines)) <= width
    assert shown_lines(table, 23) == list(plain_lines(table)), "too narrow for three columns"


def test_names_stay_whole_where_they_fit_in_a_line() -> None:
    name = "pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128"
    table = rows_table("Step times", ("run", "status", "time (s)", "reason"), right=("time (s)",))
    table.add_row(name, "success", "12.34", "steps 35-44 of 50, as the window of the document says")
    for width in (100, 120):
        assert f"{name}  success" in "\n".join(lines := shown_lines(table, width))
        assert max(map(len, lines)) <= width
    assert shown_lines(table, 23) == list(plain_lines(table)), "too narrow for three columns"


def test_columns_are_left_out_in_their_order_where_a_terminal_is_too_narrow() -> None:
    columns = [Column("job"), Column("nodes", drop=2), Column("data", drop=1), Column("state")]
    table = Table("Jobs", columns, [("4711", "node[1-64],node99", "synthetic-uniform", "COMPLETED")])
    assert "synthetic-uniform" in "".join(shown_lines(table, 80))
    narrow, narrowest = shown_lines(table, 45), shown_lines(table, 24)
    assert (narrow[1].split(), narrow[-2]) == (["job", "nodes", "state"], "without data, for which the terminal is too")
    assert narrowest[1].split() == ["job", "state"]
    row = ("4711", "node1", "no steps", "ran out", "killed by signal 9 at last")
    assert "ran out  killed by signal" in shown_lines(Table("", [*columns, Column("why")], [row]), 40)[2]


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (None, "n/a"),
        ((0.5, 1.25), "0.5 to 1.25"),
        ((-0.15, 0.9), "n/a (too few steps)"),
        ((0, 1), "n/a (too few steps)"),
    ],
)
def test_an_interval_that_includes_0_says_why_it_is_none(interval: tuple[float, float] | None, text: str) -> None:
    assert interval_of(interval) == text


GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Its only item is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def test_rate_and_remaining_time_count_from_what_was_done_before(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ByteProgress("preparing") as progress:
        progress.bytes(40 * GB, 100 * GB)
        clock[0] += 10
        progress.bytes(60 * GB, 100 * GB)
        clock[0] += 1
        progress.bytes(61 * GB, 100 * GB)
        clock[0] += 20
        progress.bytes(100 * GB, 100 * GB)
    assert capsys.readouterr().err.splitlines() == [
        "preparing: 60 of 100 GB, 2 GB/s, 20 s left",
        "preparing: 100 of 100 GB",
    ]


def test_another_total_begins_new_work(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("preparing") as progress:
        progress.bytes(10 * GB, 10 * GB)
        clock[0] += 100
        progress.bytes(0, 20 * GB)
        clock[0] += 10
        progress.bytes(5 * GB, 20 * GB)
    assert capsys.readouterr().err.splitlines() == [
        "preparing: 10 of 10 GB",
        "preparing: 0 of 20 GB",
        "preparing: 5 of 20 GB, 0.5 GB/s, 30 s left",
    ]
