# SPDX-License-Identifier: Apache-2.0
"""Times of single ranks: what is written is read, each step once, and no run makes a large file."""

from pathlib import Path

import pytest

from llmb.runs import steps as steps_module
from llmb.runs.record_file import BrokenRecord
from llmb.runs.steps import RankTimes, RankTimesFile, read_rank_times


def write(path: Path, steps: range, ranks: int = 3, *, of: int | None = None) -> None:
    file = RankTimesFile(path, of or steps.stop, ranks)
    for step in steps:
        file.add(step, [1e-3 * (step + rank / 10) for rank in range(ranks)])
    file.close()


def test_each_step_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank_times.jsonl"
    write(path, range(4))
    assert read_rank_times(path)[2] == RankTimes(first_step=2, last_step=2, layer_us=(2000.0, 2100.0, 2200.0))
    assert len(read_rank_times(path)) == 4
    assert read_rank_times(tmp_path / "none") == []


def test_a_long_run_keeps_the_longest_of_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MOST_VALUES", 12)
    path = tmp_path / "rank_times.jsonl"
    write(path, range(10))
    found = read_rank_times(path)
    assert [(line.first_step, line.last_step) for line in found] == [(0, 2), (3, 5), (6, 8), (9, 9)]
    assert found[1].layer_us == (5000.0, 5100.0, 5200.0)
    assert sum(len(line.layer_us) for line in found) <= 12


def test_fifty_steps_of_the_largest_published_scale_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "rank_times.jsonl"
    write(path, range(50), ranks=2304)
    assert [line.last_step for line in read_rank_times(path)] == list(range(50))
    assert path.stat().st_size < 2**20


def test_steps_that_are_done_again_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rank_times.jsonl"
    write(path, range(6))
    write(path, range(3, 8))
    assert [line.first_step for line in read_rank_times(path)] == list(range(8))


def test_a_line_that_a_crash_cut_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rank_times.jsonl"
    write(path, range(3))
    text = path.read_text()
    path.write_text(text[:-10])
    assert [line.first_step for line in read_rank_times(path)] == [0, 1]
    path.write_text(text.replace('"first_step":1', '"first":1'))
    with pytest.raises(BrokenRecord, match="not a complete step"):
        read_rank_times(path)
