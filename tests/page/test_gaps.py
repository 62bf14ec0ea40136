# SPDX-License-Identifier: Apache-2.0
"""A page of runs that lack things says what is missing, and why."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import gpu_record, times_around, write_run

from llmb.cli.main import app, exit_code_of
from llmb.runs.folder import RunFolder

LOGS = Path(__file__).parent.parent / "logs" / "samples"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the command writes."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def make(*words: str) -> str:
        assert exit_code_of(app, ["report", *words, "-o", "page.html"]) == 0
        return (tmp_path / "page.html").read_text()

    return make


def test_logs_of_every_program_are_shown_as_far_as_they_tell(page: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    names = [path.stem for path in LOGS.glob("*.log")]
    for name in names:
        shutil.copy(LOGS / f"{name}.log", tmp_path / "logs" / f"{name}.out")
    html = page("./logs")
    assert len(names) >= 7
    assert [name for name in names if f"{name}.out" not in html] == []
    assert html.count("a log has no samples of power, clocks and temperature") == html.count('class="recipe"')


def test_a_run_without_machine_samples_or_profile_names_what_lacks(page: Callable[..., str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs", gpu_record(device=None), times_around(12.0))
    html = page("./runs")
    assert "<b>No power, clocks and temperature</b>: the run was not sampled" in html
    assert "<b>No breakdown of a step</b>: the run was not profiled" in html
    assert "<b>No history</b>" in html


def test_damaged_steps_of_a_failed_run_leave_the_rest(page: Callable[..., str], tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs", gpu_record(), times_around(12.0)[:9], exit_code=1)
    write_run(tmp_path / "runs", gpu_record(scale=16), times_around(12.0))
    lines = RunFolder(path).steps.read_text().splitlines()
    RunFolder(path).steps.write_text("\n".join([lines[0], "{damaged", *lines[1:]]) + "\n")
    html = page("./runs")
    assert "<b>No steps</b>: they cannot be read" in html
    assert html.count("step-times-") > 0
