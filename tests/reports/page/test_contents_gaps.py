# SPDX-License-Identifier: Apache-2.0
"""A page of runs that lack things says what is missing, and why."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from called_here import Run
from recorded_runs import gpu_record, times_around, write_run

from llmb.catalogue.window import DEFAULT_RULE
from llmb.readers.logs.formats import FORMATS
from llmb.readers.logs.log_files import parse_file
from llmb.runs.folder import RunFolder

LOGS = Path(__file__).parents[2] / "readers" / "logs" / "samples"


@pytest.fixture
def page(llmb: Run, tmp_path: Path) -> Callable[..., str]:
    """What the command writes."""

    def make(*words: str) -> str:
        llmb("report", *words, "-o", "page.html", code=0, HOME="/nowhere")
        return (tmp_path / "page.html").read_text()

    return make


SAMPLES = {parse_file(path, DEFAULT_RULE).outcome.format: path for path in sorted(LOGS.glob("*.log"))}
"""A log of each format."""


def test_there_is_a_log_of_every_program() -> None:
    assert {known.name for known in FORMATS} <= SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_log_is_shown_as_far_as_it_tells(page: Callable[..., str], tmp_path: Path, name: str) -> None:
    """By itself: the samples have the same steps, and of copies one is shown."""
    shutil.copy(SAMPLES[name], tmp_path / "log.out")
    html = page(str(tmp_path / "log.out"))
    assert "<h1>log.out</h1>" in html
    assert "of $LLMB_INSTALL/log.out<br>" in html
    assert html.count('class="recipe"') == 1
    for lacking, why in {
        "history": "a history needs 2",
        "loss": "the steps are not recorded one by one",
        "ranks": "a log does not contain the times of single ranks",
        "breakdown of a step": "a log contains no profile",
    }.items():
        assert re.search(f"<b>No {lacking}</b>: [^<]*{why}", html), lacking
    step_time_s = parse_file(tmp_path / "log.out", DEFAULT_RULE).outcome.step_time_s
    assert step_time_s and f"{step_time_s.mean:.4g} s" in html


def test_a_run_without_machine_samples_or_profile_names_what_lacks(page: Callable[..., str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs", gpu_record(device=None), times_around(12.0))
    html = page("./runs")
    assert "<b>No breakdown of a step</b>: the run was not profiled" in html
    assert "<b>No history</b>" in html


def test_a_node_without_a_name_hides_no_other_text(page: Callable[..., str], tmp_path: Path) -> None:
    record = gpu_record()
    assert record.environment
    record = record.model_copy(update={"environment": record.environment.model_copy(update={"nodes": ("",)})})
    write_run(tmp_path / "runs", record, times_around(12.0))
    assert "<h1>" in page("./runs")


def test_damaged_steps_of_a_failed_run_leave_the_rest(page: Callable[..., str], tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs", gpu_record(), times_around(12.0)[:9], exit_code=1)
    write_run(tmp_path / "runs", gpu_record(scale=16), times_around(12.0))
    lines = RunFolder(path).steps.read_text().splitlines()
    RunFolder(path).steps.write_text("\n".join([lines[0], "{damaged", *lines[1:]]) + "\n")
    html = page("./runs")
    assert "<h1>runs</h1>" in html
    assert "<b>No steps</b>: they cannot be read" in html
    assert html.count("step-times-") > 0
