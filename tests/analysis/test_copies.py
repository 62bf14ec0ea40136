# SPDX-License-Identifier: Apache-2.0
"""A run that was copied, moved, linked or found on several ways counts once; a copy that was changed is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from step_lines import step_line
from timed_runs import noisy_times, write_run
from typer.testing import CliRunner

from llmb.analysis.compare_runs import IN_BOTH, compare_runs
from llmb.analysis.copies import with_copies
from llmb.analysis.find_runs import find_ended_runs, find_runs, find_sides
from llmb.analysis.judge_run import Against, judge_runs
from llmb.analysis.logged_run import known_run
from llmb.analysis.measured_expectations import write_expectations
from llmb.analysis.parsed_scaling import group_runs
from llmb.cli.judge import app as judge
from llmb.logs.files import find_all_logs, parse_file
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.steps import read_steps


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
    shutil.unpack_archive(shutil.make_archive(str(tmp_path / "kept"), "tar", folder), folder.with_name("unpacked"))
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
    done = CliRunner().invoke(judge, [*selectors, "--against", str(root), "--json"])
    document = json.loads(done.stdout)
    assert [len(one["runs"]) for one in document["judged"]] == [2]
    copies = {one["reason"].partition(",")[0] for one in document["left_out"]}
    assert copies == {"12 copies of one run", "3 copies of one run"}
    (judged,) = judge_runs(find_runs(str(root), root, quiet).runs, Against(runs=selectors[2]), root, quiet)
    assert judged.verdict.verdict == "not comparable"  # a run is no baseline of its copy


def test_both_sides_of_a_comparison_may_be_copies(root: Path) -> None:
    moved = shutil.copytree(root, root.parent / "moved")
    with pytest.raises(Exception, match="both sides are the same runs"):
        compare_runs(*find_sides(str(root), str(moved), root, quiet))
    second = next(run.path for run in find_runs(str(root), root, quiet).runs if run.path.parent.name.endswith("2"))
    compared = compare_runs(*find_sides(str(root), str(second), root, quiet))
    (row,) = compared.rows
    assert (row.n_before, row.n_after) == (1, 1)
    assert "counted once" in compared.model_dump_json()


def test_a_log_is_its_run_folder(root: Path) -> None:
    folder = find_runs(str(root), root, quiet).runs[0].path
    saved = root / "log-saved.out"
    with pytest.raises(Exception, match="both sides are the same runs"):
        compare_runs(*find_sides(str(folder), str(saved), root, quiet))
    alone = compare_runs(*find_sides(str(saved), str(root), root, quiet))
    assert alone.rows == () and alone.left_out[0].reason == IN_BOTH


def test_a_copy_that_was_changed_is_named_and_none_is_chosen(root: Path) -> None:
    copy = next(root.rglob("unpacked/*/metrics.jsonl"))
    copy.write_text("".join(copy.read_text().splitlines(keepends=True)[:-5]))
    found = find_ended_runs(str(root), root, quiet)
    assert [run.path.parent.name[-1] for run in found.runs] == ["2"]
    assert len(found.left_out) == 4
    for one in found.left_out:
        assert "one was cut or edited" in one.reason and str(copy.parent) in one.reason
    parsed = with_copies([known_run(parse_file(path, DEFAULT_RULE)) for path in sorted(root.rglob("log-*.out"))])
    assert [run.outcome.status for run in parsed].count("invalid") == 4
    assert [len(group.runs) for group in group_runs(parsed)] == [1]


def test_groups_of_parsed_logs_have_each_run_once(root: Path) -> None:
    logs = find_all_logs([root]).logs
    assert len(logs) == 5
    parsed = with_copies([known_run(parse_file(path, DEFAULT_RULE)) for path in logs])
    (group,) = group_runs(parsed)
    assert len(group.runs) == group.run_means_s.count == 2
    assert sum(run.copy_of is not None for run in parsed) == 3


def test_expectations_count_a_run_once(root: Path) -> None:
    write_expectations(root / "expected.yaml", find_runs(str(root), root, quiet).runs)
    assert "runs: 2" in (root / "expected.yaml").read_text()
