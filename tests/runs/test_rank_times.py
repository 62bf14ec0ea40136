# SPDX-License-Identifier: Apache-2.0
"""The times of ranks: their file, and the rank that the others wait for."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from slowed_runs import Slow, slowed

from llmb.base.missing import Missing
from llmb.catalogue.records import Layout
from llmb.jobs.read_run import read_folder, recorded_run
from llmb.runs import rank_times
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.plan import Plan
from llmb.runs.rank_times import Excess, RankTime, RankTimes, RankTimesFile, rank_excess, read_rank_times
from llmb.verdict.explain_run import explain


def write(path: Path, steps: range, ranks: int = 3, *, of: int | None = None) -> None:
    file = RankTimesFile(path, of or steps.stop, ranks)
    for step in steps:
        file.add(step, [RankTime(0.0, 1e-6, 1e-3 * (step + rank / 10), 2e-3) for rank in range(ranks)])
    file.close()


def test_each_step_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank_times.jsonl"
    write(path, range(4))
    assert read_rank_times(path)[2] == RankTimes(
        first_step=2,
        last_step=2,
        input_us=(0.0, 0.0, 0.0),
        copy_us=(1.0, 1.0, 1.0),
        layer_us=(2000.0, 2100.0, 2200.0),
        wait_us=(2000.0, 2000.0, 2000.0),
    )
    assert len(read_rank_times(path)) == 4
    assert read_rank_times(tmp_path / "none") == []


def test_a_long_run_keeps_the_longest_of_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_times, "MOST_VALUES", 48)
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
    assert path.stat().st_size < 2**22


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
    with pytest.raises(BrokenRecord, match="damaged or incomplete"):
        read_rank_times(path)
    path.write_text(text.replace('"copy_us":[1.0,', '"copy_us":['))
    with pytest.raises(BrokenRecord, match="same number of ranks"):
        read_rank_times(path)


def test_why_times_cannot_be_read_is_one_line(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    path = tmp_path / "rank_times.jsonl"
    path.write_text("{}\n{}\n")
    assert rank_times.read_excess(path, tiny_plan().recipe) == Missing(
        "the times of its ranks cannot be read: the line is damaged or incomplete (rank_times.jsonl:1)"
    )


def times(*ranks: RankTime, steps: int = 4) -> list[RankTimes]:
    parts = [tuple(1e6 * value for value in part) for part in zip(*ranks, strict=True)]
    of_ranks = dict(zip(("input_us", "copy_us", "layer_us", "wait_us"), parts, strict=True))
    return [RankTimes(first_step=step, last_step=step, **of_ranks) for step in range(steps)]


def layout_of(make_plan: Callable[..., Plan], **sizes: int) -> Layout:
    return make_plan(**sizes).recipe.layout


USUAL = RankTime(1e-4, 1e-5, 1e-3, 2e-3)


def excess(lines: list[RankTimes], layout: Layout, *, same_layers: bool = True) -> Excess:
    found = rank_excess(lines, layout, same_layers=same_layers)
    assert isinstance(found, Excess)
    return found


@pytest.mark.parametrize("part", range(4))
def test_the_part_in_which_a_rank_is_slow_has_the_excess(tiny_plan: Callable[..., Plan], part: int) -> None:
    layout = layout_of(tiny_plan, scale=4)
    slow = RankTime(*(value + 0.01 * (index == part) for index, value in enumerate(USUAL)))
    found = excess(times(USUAL, USUAL, slow, USUAL), layout).straggler(0.75, 0.05)
    assert found
    passes = layout.layers * layout.ga if part == 2 else 1
    assert (found.rank, found.lines) == (2, 4)
    assert found.excess == pytest.approx([0.01 * passes * (index == part) for index in range(4)], abs=1e-9)


def test_the_ranks_that_wait_for_a_slow_one_are_not_the_slow_ones(tiny_plan: Callable[..., Plan]) -> None:
    busy, waiting = USUAL._replace(layer_s=0.002, wait_s=0.0), USUAL._replace(wait_s=0.05)
    found = excess(times(waiting, busy), layout_of(tiny_plan, scale=2)).straggler(0.75, 0.05)
    assert found
    assert found.rank == 1
    either = excess(times(waiting, USUAL), layout_of(tiny_plan, scale=2))
    assert either.straggler(0.75, 0.05) is None, "its waits may be for what the other does where no one looks"


def test_a_stage_is_compared_with_itself_where_layers_differ(tiny_plan: Callable[..., Plan]) -> None:
    layout = layout_of(tiny_plan, scale=4).model_copy(update={"pp": 2, "dp": 2})
    late = USUAL._replace(layer_s=0.003, wait_s=0.02)
    lines = times(USUAL, USUAL, late, late)
    assert excess(lines, layout, same_layers=False).straggler(0.75, 0.05) is None
    across = excess(lines, layout).straggler(0.4, 0.05)
    assert across
    assert across.excess.wait_s == 0.0
    alone = layout.model_copy(update={"pp": 4, "dp": 1})
    assert rank_excess(lines, alone, same_layers=False) == Missing(
        "each pipeline stage has a single rank, and stages have different layers"
    )
    assert rank_excess(lines, layout_of(tiny_plan, scale=2), same_layers=True) == Missing(
        "the recorded times do not match the run's 2 ranks"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ms", "part"),
    [
        ("loader", 1500, "input_s"),  # but for the time of the step before, in which it prepares
        ("copy", 300, "copy_s"),
        ("compute", 300, "compute_s"),
        ("between", 200, "wait_s"),
    ],
)
def test_a_run_that_one_rank_slows_down_names_the_rank_and_the_part(
    tmp_path: Path, fork_server: ForkServer, what: Any, ms: float, part: str
) -> None:
    words = ["run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "4", "--seq-len", "32"]
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path), "OMP_NUM_THREADS": "1", **slowed(Slow(what, ms, rank=2))}
    command = [str(fork_server.python), "-m", "llmb.cli.main", *words, "--gbs", "4", "--steps", "6", "--window", "1-5"]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    (path,) = tmp_path.rglob("run.json")
    run = recorded_run(read_folder(RunFolder(path.parent)))
    found = rank_times.read_excess(RunFolder(path.parent).rank_times, run.recipe)
    assert isinstance(found, Excess)
    straggler = found.straggler(0.75, 0.05)
    assert straggler
    assert straggler.rank == 2
    assert max(straggler.excess._asdict().items(), key=lambda item: item[1])[0] == part
    explained = explain(run)
    assert explained
    assert next(cause.name for cause in explained.causes if cause.name != "other_work") == "slow_rank"
