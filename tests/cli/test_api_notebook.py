# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of runs, verdicts and comparisons, and their data frames."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest
from recorded_runs import gpu_record, times_around, write_run
from typer.testing import CliRunner

import llmb
from llmb.cli.main import app
from llmb.reports.export_tables import RESULTS, STEPS

HOSTILE = "<script>alert(1)</script>"


class Cells(HTMLParser):
    """The texts of all cells, and the names of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.elements: set[str] = set()
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.add(tag)
        self.in_cell = tag in ("td", "th")
        self.cells += [""] if self.in_cell else []

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.cells[-1] += data


def shown(thing: object) -> Cells:
    return Cells(thing._repr_html_())


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "root"))
    runs = []
    for side, mean_s in (("before", 12.3), ("after", 13.5)):
        for _ in range(2):
            runs.append(
                write_run(tmp_path / side, gpu_record().model_copy(update={"label": HOSTILE}), times_around(mean_s))
            )
    return runs


def test_a_run_is_shown_and_its_steps_are_a_frame(folders: list[Path]) -> None:
    run = llmb.result(folders[0])
    found = shown(run)
    assert "step time s, mean" in found.cells and "12.3" in found.cells
    assert found.elements == {"table", "tr", "th", "td", "p", "b", "br"}
    steps = run.to_pandas()
    assert list(steps.columns) == [column.header for column in STEPS] and len(steps) == 50
    assert steps[steps.in_window].step_time_s.mean() == pytest.approx(run.step_time_s)
    assert (str(steps.step.dtype), str(steps.loss.dtype), str(steps.updated.dtype)) == ("Int64", "float64", "boolean")
    assert steps.host_ahead_s.isna().all()


def test_several_runs_are_a_frame(folders: list[Path]) -> None:
    runs = llmb.Runs(map(llmb.result, folders))
    frame = runs.to_pandas()
    assert list(frame.columns) == [column.header for column in RESULTS]
    assert list(frame.step_time_mean_s) == [run.step_time_s for run in runs]
    assert list(frame.label) == [HOSTILE] * 4 and HOSTILE not in runs._repr_html_()
    assert HOSTILE in shown(runs).cells


def test_a_verdict_is_shown(folders: list[Path]) -> None:
    verdict = llmb.judge(folders[2], against=folders[0])
    document = json.loads(
        CliRunner().invoke(app, ["judge", str(folders[2]), "--against", str(folders[0]), "--json"]).stdout
    )
    assert verdict.model_dump(mode="json").items() <= document.items()
    found = shown(verdict)
    assert f"{verdict.delta_pct:+.2f}" in found.cells and "effect" in found.cells
    assert verdict.sentence in verdict._repr_html_()
    assert len(verdict.to_pandas()) == len(verdict.conditions)
    published = llmb.judge(folders[2])
    assert list(published.to_pandas().key) == [condition.key for condition in published.conditions]


def test_a_comparison_is_shown(folders: list[Path], tmp_path: Path) -> None:
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    comparison = llmb.compare(before, after)
    document = json.loads(CliRunner().invoke(app, ["compare", before, after, "--json"]).stdout)
    assert comparison.model_dump(mode="json") == document
    assert comparison.rows[0].verdict in shown(comparison).cells
    frame = comparison.to_pandas()
    assert frame.to_dict("records")[0]["delta_pct"] == document["rows"][0]["delta_pct"]
    assert isinstance(frame, pandas.DataFrame)


def test_pandas_is_loaded_by_a_frame_alone(folders: list[Path]) -> None:
    code = (
        "import sys, llmb\n"
        f"run = llmb.result({str(folders[0])!r})\n"
        "run._repr_html_()\n"
        "print(sorted(name for name in ('pandas', 'pyarrow', 'tensorboard', 'zstandard') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
