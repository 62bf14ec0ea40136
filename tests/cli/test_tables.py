# SPDX-License-Identifier: Apache-2.0
"""A table reads the same in a pipe as on a terminal that is wide enough."""

import re
from collections.abc import Callable

import pytest

from llmb.report.output import terminal_lines
from llmb.report.table import Table, interval_of, plain_lines, result_table

STYLES = re.compile(r"\x1b\[[0-9;]*m")


def numbers() -> Table:
    table = result_table("Nodes: 2", "node", "runs", "reason", right=("runs",))
    table.add_row("node[1-2]", "7", "[red]not markup[/red] :smile:")
    table.add_row("n", "1,234", "日本語 é é")
    return table


def with_caption() -> Table:
    table = result_table("Campaign", "what it is that is counted", "jobs", right=("jobs",))
    table.add_row("all", "20")
    table.caption = "Two kinds of job."
    return table


def without_headers() -> Table:
    table = result_table("Run", "", "")
    table.add_row("state", "failed\nfor a reason of two lines")
    table.add_row("alone")
    table.add_row("more", "cells", "than columns")
    return table


def with_long_reasons() -> Table:
    table = result_table("Step times", "run", "reason", "more")
    table.columns[1].max_width = 20
    table.add_row("a", "a collective took too-long-to-wait-for and was ended", "x")
    table.add_row("b", "/a/path/that/is/longer/than/the/column", "y")
    return table


def empty() -> Table:
    return result_table("Jobs: 0", "job", "state")


@pytest.mark.parametrize("make", [numbers, with_caption, without_headers, with_long_reasons, empty])
def test_a_pipe_and_a_wide_terminal_get_the_same_lines(make: Callable[[], Table]) -> None:
    shown = [STYLES.sub("", line).rstrip() for line in terminal_lines(make(), 200)]
    assert list(plain_lines(make())) == shown


@pytest.mark.parametrize("width", [1, 2, 3, 40])
def test_a_narrow_terminal_folds_and_loses_nothing(width: int) -> None:
    table = result_table("Long", "name", "words")
    table.add_row("one", "two words", "x" * 200)
    lines = [STYLES.sub("", line) for line in terminal_lines(table, width)]
    assert "".join(lines).count("x") == 200
    assert width < 40 or max(map(len, lines)) <= width


def test_names_stay_whole_where_they_fit_in_a_line() -> None:
    name = "pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128"
    table = result_table("Step times", "run", "status", "time (s)", "reason", right=("time (s)",))
    table.add_row(name, "success", "12.34", "steps 35-44 of 50, as the window of the document says")
    for width in (72, 80, 100, 120):
        lines = [STYLES.sub("", line) for line in terminal_lines(table, width)]
        assert max(map(len, lines)) <= width
        assert any(name in line for line in lines)
    assert f"{name}  success" in [STYLES.sub("", line) for line in terminal_lines(table, 80)]


def test_a_name_longer_than_a_line_is_broken_after_punctuation() -> None:
    table = result_table("", "path", "size", right=("size",))
    table.add_row("/work/experiments/pretrain_llama3.1_8b/pretrain_llama3.1_8b_1795255502", "5")
    lines = [STYLES.sub("", line) for line in terminal_lines(table, 30)]
    assert "".join(lines).replace(" ", "").startswith("/work/experiments/pretrain_llama3.1_8b/pretrain_")
    assert all(line.rstrip()[-1] in "_/" for line in lines[1:3])


def test_a_percentage_is_not_broken_before_its_sign() -> None:
    table = result_table("slower by 3.0 %; the rest", "more", "why")
    table.add_row("a", "it is 3.0 % slower than 2.0 %")
    for width in range(12, 40):
        assert not [line for line in terminal_lines(table, width) if STYLES.sub("", line).lstrip().startswith("%")]
        assert "".join("".join(terminal_lines(table, width)).split()).count("3.0%") == 2


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (None, "n/a"),
        ((0.5, 1.25), "0.5 to 1.25"),
        ((-0.15, 0.88), "n/a (too few steps)"),
        ((0.0, 1.0), "n/a (too few steps)"),
    ],
)
def test_an_interval_of_times_that_includes_0_says_why_it_is_none(
    interval: tuple[float, float] | None, text: str
) -> None:
    assert interval_of(interval) == text
