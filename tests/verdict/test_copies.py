# SPDX-License-Identifier: Apache-2.0
"""A run that was copied, moved, linked or found on several ways counts once; a copy that was changed is named."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from step_lines import step_line
from timed_runs import noisy_times, write_run
from typer.testing import CliRunner

from llmb.catalogue.window import DEFAULT_RULE
from llmb.cli.judge import app as judge
from llmb.jobs.find_runs import find_ended_runs, find_runs, find_sides
from llmb.jobs.judge_runs import Against, judge_runs
from llmb.jobs.read_run import run_of_log
from llmb.readers.logs.log_files import find_all_logs, parse_file
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.steps import read_steps, step_to_json
from llmb.verdict.compare_runs import IN_BOTH, compare_runs
from llmb.verdict.copies import with_copies
from llmb.verdict.judge_run import write_expectations
from llmb.verdict.parsed_scaling import group_runs


def quiet(_: str) -> None:
    pass


def made_run(root: Path, plan: Plan, number: int) -> RunFolder:
    folder = write_run(root, plan, noisy_times(2.0, 0.01, plan.steps, number), number=number, label="same")
    lines = (
        step_line(step.step, plan.steps, loss=step.loss, step_time_s=step.step_time_s, tflops_per_gpu=None)
        for step in read_steps(folder.steps)
    )
    folder.log.write_text("".join(lines))
    return folder


@pytest.fixture
def root(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Path:
    """One run in three folders of one root, of which the label finds all, its log, and a second run."""
    folder = made_run(tmp_path / "root", tiny_plan(), 1).path.parent
    made_run(tmp_path / "root", tiny_plan(), 2)
    shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
    unpacked = folder.with_name("unpacked")
    unpacked.mkdir()
    subprocess.run(
        ["tar", "-xf", shutil.make_archive(str(tmp_path / "kept"), "tar", folder), "-C", unpacked], check=True
    )
    shutil.copy(next(folder.glob("*/log-*.out")), tmp_path / "root" / "log-saved.out")
    return tmp_path / "root"


@pytest.mark.parametrize("selector", ["same", "label:same", "2026-11-01", "{root}"])
def test_a_selection_has_each_run_once(root: Path, selector: str) -> None:
    found = find_runs(selector.format(root=root), root, quiet)
    assert len({run.counted_as for run in found.runs}) == len(found.runs) == 2
    copies = 4 if "root" in selector else 3  # a path finds the log as well
    reasons = {one.reason for one in found.left_out}
    assert reasons == {f"{copies} copies of one run, counted once: {found.runs[0].path}"}
    assert len({one.run for one in found.left_out}) == copies - 1


def test_roots_that_were_moved_linked_or_copied_hold_the_same_runs(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    shutil.copytree(root, root.parent / "moved")
    selectors = [str(root), str(root.parent / "link"), str(root.parent / "moved")]
    done = CliRunner().invoke(judge, ["judge", *selectors, "--against", str(root), "--json"])
    document = json.loads(done.stdout)
    assert [len(one["runs"]) for one in document["judged"]] == [2]
    copies = {one["reason"].partition(",")[0] for one in document["left_out"]}
    assert copies == {"12 copies of one run", "3 copies of one run"}
    (judged,) = judge_runs(find_runs(str(root), root, quiet).runs, Against(runs=selectors[2]), root, quiet)
    assert judged.verdict.verdict == "not comparable"  # a run is no baseline of its copy


def test_both_sides_of_a_comparison_may_be_copies(root: Path) -> None:
    moved = shutil.copytree(root, root.parent / "moved")
    with pytest.raises(Exception, match="both sides have the same runs"):
        compare_runs(*find_sides(str(root), str(moved), root, quiet))
    second = next(run.path for run in find_runs(str(root), root, quiet).runs if run.path.parent.name.endswith("2"))
    compared = compare_runs(*find_sides(str(root), str(second), root, quiet))
    (row,) = compared.rows
    assert (row.n_before, row.n_after) == (1, 1)
    assert "counted once" in compared.model_dump_json()


def test_a_log_is_its_run_folder(root: Path) -> None:
    folder = find_runs(str(root), root, quiet).runs[0].path
    saved = root / "log-saved.out"
    with pytest.raises(Exception, match="both sides have the same runs"):
        compare_runs(*find_sides(str(folder), str(saved), root, quiet))
    alone = compare_runs(*find_sides(str(saved), str(root), root, quiet))
    assert alone.rows == () and alone.left_out[0].reason == IN_BOTH


def test_a_copy_that_was_changed_is_named_and_none_is_chosen(root: Path) -> None:
    copy = next(root.rglob("unpacked/*/metrics.jsonl"))
    copy.write_text("".join(copy.read_text().splitlines(keepends=True)[:-5]))
    found = find_ended_runs(str(root), root, quiet)
    assert [(run.status, run.step_time_s is None) for run in found.runs] == [("invalid", True), ("success", False)]
    assert len(found.left_out) == 3
    for reason in (str(found.runs[0].reason), *(one.reason for one in found.left_out)):
        assert "one was truncated or edited" in reason and str(copy.parent) in reason
    parsed = with_copies([run_of_log(parse_file(path, DEFAULT_RULE)) for path in sorted(root.rglob("log-*.out"))])
    assert [run.outcome.status for run in parsed].count("invalid") == 4
    assert [len(group.runs) for group in group_runs(parsed)] == [1]


def test_groups_of_parsed_logs_have_each_run_once(root: Path) -> None:
    logs = find_all_logs([root]).logs
    assert len(logs) == 5
    parsed = with_copies([run_of_log(parse_file(path, DEFAULT_RULE)) for path in logs])
    (group,) = group_runs(parsed)
    assert len(group.runs) == group.run_means_s.count == 2
    assert sum(run.copy_of is not None for run in parsed) == 3


def test_expectations_count_a_run_once(root: Path) -> None:
    write_expectations(root / "expected.yaml", find_runs(str(root), root, quiet).runs)
    assert "runs: 2" in (root / "expected.yaml").read_text()


def cut_copy(folder: RunFolder) -> Path:
    """A copy of a run beside it, without its last step."""
    copy = shutil.copytree(folder.path.parent, folder.path.parent.with_name(f"{folder.path.parent.name}-copy"))
    steps = next(copy.glob("*/metrics.jsonl"))
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    return copy


def judged_as(*words: Path | str) -> tuple[list[str], str]:
    done = CliRunner().invoke(judge, ["judge", *map(str, words), "--json"])
    document = json.loads(done.stdout)
    return [one["verdict"] for one in document["judged"]], done.stdout


def test_a_cut_copy_of_a_slow_run_leaves_no_verdict_better_than_inconclusive(
    tmp_path: Path, tiny_plan: Callable[..., Plan]
) -> None:
    def runs(name: str, means_s: tuple[float, ...], seed: int) -> list[RunFolder]:
        return [
            write_run(tmp_path / name, tiny_plan(), noisy_times(mean_s, 0.002, 50, seed + number), number=seed + number)
            for number, mean_s in enumerate(means_s)
        ]

    runs("before", (2.0, 2.0, 2.0, 2.0), 10)
    *others, slow = runs("after", (2.0, 2.0, 2.001, 2.3), 20)
    sides = (tmp_path / "after", "--against", tmp_path / "before")
    assert judged_as(*sides)[0] == ["inconclusive"]
    copy = cut_copy(slow)
    verdicts, text = judged_as(*sides)
    assert verdicts == ["inconclusive"] and "one was truncated or edited" in text
    compared = compare_runs(*find_sides(str(tmp_path / "before"), str(tmp_path / "after"), tmp_path, quiet))
    assert compared.rows[0].verdict == "inconclusive" and "one was truncated or edited" in str(compared.rows[0].reason)
    expected = tmp_path / "expected.yaml"
    expected.write_text(
        "expectations:\n- {workload: pretrain_llama3.1, size: tiny, step_time_s: 2.0, tolerance_pct: 5}\n"
    )
    assert sorted(judged_as(tmp_path / "after", "--expect", expected)[0]) == [*["inconclusive"] * 3, "invalid"]
    shutil.rmtree(copy)
    shutil.rmtree(slow.path.parent)
    assert judged_as(*sides)[0] == ["pass"]
    cut_copy(others[0])
    assert judged_as(*sides)[0] == ["inconclusive"]


def test_a_changed_copy_among_the_baseline_counts_as_well(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    for name, first in (("before", 1), ("after", 11)):
        for seed in range(first, first + 3):
            folder = write_run(tmp_path / name, tiny_plan(), noisy_times(2.0, 0.001, 50, seed), number=seed)
    sides = (tmp_path / "after", "--against", tmp_path / "before")
    assert judged_as(*sides)[0] == ["pass"]
    cut_copy(RunFolder(next((tmp_path / "before").rglob("run.json")).parent))
    assert judged_as(*sides)[0] == ["inconclusive"]
    assert folder.path.exists()


def with_other_id(folder: RunFolder, copy: Path, changed: dict[int, float] | None = None) -> RunFolder:
    """A copy of a run under a new id, in whose steps some times were changed."""
    other = RunFolder(shutil.copytree(folder.path, copy))
    document = json.loads(other.record.read_text())
    other.record.write_text(json.dumps(document | {"run_id": "0" * 16}))
    steps = [
        replace(step, step_time_s=(changed or {}).get(step.step, step.step_time_s)) for step in read_steps(other.steps)
    ]
    other.steps.write_text("".join(f"{step_to_json(step)}\n" for step in steps))
    return other


def test_equal_step_times_under_another_id_are_a_copy(root: Path) -> None:
    folder = RunFolder(next(root.rglob("metrics.jsonl")).parent)
    other = with_other_id(folder, root / "again")
    found = find_runs(str(root), root, quiet)
    assert len(found.runs) == 2
    (reason,) = {one.reason for one in found.left_out}
    assert reason.startswith("5 copies of one run, under different ids, counted once: ")
    shutil.rmtree(other.path)
    with_other_id(folder, root / "again", dict.fromkeys((3, 4), 1.0))
    found = find_ended_runs(str(root), root, quiet)
    assert [run.status for run in found.runs] == ["invalid", "success"]
    assert "one was truncated or edited" in str(found.runs[0].reason)


def test_runs_that_share_few_step_times_are_different_ones(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    """Such as steps of a clock that counts milliseconds."""
    for number in range(2):
        times = [round(time_s, 3) for time_s in noisy_times(2.0, 0.02, 50, number)]
        write_run(tmp_path, tiny_plan(), [2.0, 2.001, 2.002, 2.003, *times[4:]], number=number)
        write_run(tmp_path, tiny_plan(), [1.5] * 50, number=10 + number)
    assert len(find_runs(str(tmp_path), tmp_path, quiet).runs) == 4
