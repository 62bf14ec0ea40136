# SPDX-License-Identifier: Apache-2.0
"""``llmb bisect``: by labels and by a command; interrupted, resumed, with candidates that do not run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from timed_runs import noisy_times, write_run

from llmb.analysis.bisect import (
    BisectReport,
    BisectState,
    bisect_by_command,
    bisect_report,
    read_candidates,
    read_state,
    state_path,
    write_state,
)
from llmb.cli.main import app, exit_code_of
from llmb.errors import RunFailed, UsageError
from llmb.report.compare_report import bisect_table, bisect_text
from llmb.report.table import table_lines, text_width
from llmb.runs.plan import Plan

DRIVERS = ("570.86", "570.124", "575.51", "575.57", "580.65")
MAKE_RUN = """
import json, os, shutil, sys
template, seconds, label = sys.argv[1], float(sys.argv[2]), sys.argv[3]
if seconds < 0:
    sys.exit(int(-seconds))
install, name = os.environ["LLMB_INSTALL"], os.path.basename(template)
parent = os.path.join(install, "workloads", "w", "experiments", "e")
number = len(os.listdir(parent)) if os.path.isdir(parent) else 0
folder = os.path.join(parent, f"e_{number}", name)
shutil.copytree(template, folder)
lines = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
factor = seconds * (1 + number % 3 / 1000)
for line in lines:
    line["step_time_s"] *= factor
open(os.path.join(folder, "metrics.jsonl"), "w").write("".join(json.dumps(line) + chr(10) for line in lines))
record = json.load(open(os.path.join(folder, "run.json")))
record["run_id"] = f"{number:016x}"
record["result"]["step_time_s"]["mean"] *= factor
json.dump(record, open(os.path.join(folder, "run.json"), "w"))
print("what the command prints")
"""
"""Copies a run as if it had been made, faster than a run of llmb: TEMPLATE SECONDS LABEL."""


def quiet(_: str) -> None:
    pass


@pytest.fixture
def template(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Path:
    return write_run(tmp_path / "template", tiny_plan(), noisy_times(1.0, 0.001, 50, 1)).path


def make(install: Path, plan: Plan, report: BisectReport, mean_s: float, number: int) -> None:
    assert report.runs is not None
    for repeat in range(report.runs):
        unique = 100 * number + repeat
        write_run(install, plan, noisy_times(mean_s, 0.004, 50, unique), number=unique, label=report.label)


def test_runs_are_found_by_label_until_the_candidate_is(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    state = BisectState(
        name="driver", candidates=DRIVERS, workload="pretrain_llama3.1", size="tiny", options=("--image", "{candidate}")
    )
    write_state(tmp_path, state)
    number = 0
    while (report := bisect_report(read_state(tmp_path, "driver"), tmp_path, quiet)).status == "measure":
        assert report.candidate and report.label == f"driver-{report.candidate}"
        assert report.command == (
            *("llmb", "run", "-w", "pretrain_llama3.1", "-s", "tiny", "--image", report.candidate),
            *("--label", report.label, "--repeats", str(report.runs)),
        )
        assert f"llmb run -w pretrain_llama3.1 -s tiny --image {report.candidate}" in bisect_text(report)
        slow = DRIVERS.index(report.candidate) >= 3
        make(tmp_path, tiny_plan(), report, 2.06 if slow else 2.0, number)
        number += 1
    assert (report.status, report.found) == ("found", ("575.57",))
    assert report.total_runs <= 9
    assert report.delta_pct == pytest.approx(3, abs=0.8)
    assert "The change came with '575.57'" in bisect_text(report)
    assert [one.standing for one in report.candidates] == ["as before", "as before", "as before", *2 * ["as after"]]
    assert all(text_width(line.text) <= 80 for line in table_lines(bisect_table(report), 80))


def test_runs_that_exist_begin_the_search(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    for number in range(6):
        label, mean_s = ("week-45", 2.0) if number < 3 else ("week-46", 2.1)
        write_run(tmp_path, tiny_plan(), noisy_times(mean_s, 0.004, 50, number), number=number, label=label)
    state = BisectState(name="bisect", candidates=DRIVERS, good="week-45", bad="week-46")
    report = bisect_report(state, tmp_path, quiet)
    assert (report.status, report.candidate, report.runs, report.total_runs) == ("measure", "575.51", 1, 6)
    assert report.command is None
    skipped = bisect_report(state.with_skipped("575.51"), tmp_path, quiet)
    assert skipped.candidate in ("570.124", "575.57")
    assert [one.standing for one in skipped.candidates][2] == "skipped"


def test_named_runs_of_another_recipe_are_told(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    write_run(tmp_path, tiny_plan(), 50 * [1.0], number=1, label="week-45")
    state = BisectState(name="bisect", candidates=DRIVERS, good="week-45", workload="pretrain_llama3.1", size="8b")
    messages: list[str] = []
    assert bisect_report(state, tmp_path, messages.append).total_runs == 0
    assert messages == ["warning: 'week-45' has no measured run of the recipe (1 of others)"]


def test_runs_of_two_recipes_are_refused(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    write_run(tmp_path, tiny_plan(), 50 * [1.0], number=1, label="bisect-a")
    write_run(tmp_path, tiny_plan(dtype="bf16"), 50 * [1.0], number=2, label="bisect-b")
    with pytest.raises(UsageError, match=r"not repeats of one recipe: .* differ in dtype"):
        bisect_report(BisectState(name="bisect", candidates=("a", "b")), tmp_path, quiet)
    chosen = BisectState(name="bisect", candidates=("a", "b"), workload="pretrain_llama3.1", size="tiny", dtype="bf16")
    report = bisect_report(chosen, tmp_path, quiet)
    assert [one.runs for one in report.candidates] == [0, 1]
    assert report.command and report.command[2:8] == (*("-w", "pretrain_llama3.1", "-s", "tiny"), "--dtype", "bf16")


def command(template: Path, seconds: dict[str, float], tmp_path: Path) -> list[str]:
    """Takes the seconds of a candidate from its own table, without a shell."""
    script = tmp_path / "make_run.py"
    table = f"import sys; sys.argv[2] = {seconds!r}[sys.argv[2]]"
    script.write_text(f"{table}\n{MAKE_RUN}")
    return [sys.executable, str(script), str(template), "{candidate}", "{label}"]


def test_a_command_makes_the_runs_and_its_output_is_not_the_result(template: Path, tmp_path: Path) -> None:
    words = command(template, dict.fromkeys(DRIVERS[:2], 1.0) | dict.fromkeys(DRIVERS[2:], 1.05), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "llmb", "bisect", "run", "--candidates", ",".join(DRIVERS), "--json", "--", *words],
        env={**os.environ, "LLMB_INSTALL": str(tmp_path / "install")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["found"], report["total_runs"]) == ("found", ["575.51"], 8)
    assert "what the command prints" in done.stderr
    assert "run 1: 570.86" in done.stderr and "run 2: 580.65" in done.stderr, "the two known ones alternate"


def test_an_interrupted_search_is_resumed_with_the_runs_that_it_has(template: Path, tmp_path: Path) -> None:
    words = command(template, dict.fromkeys(DRIVERS[:2], 1.0) | dict.fromkeys(DRIVERS[2:], 1.05), tmp_path)
    install = tmp_path / "install"
    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if text.startswith("run 5"):
            raise KeyboardInterrupt

    state = BisectState(name="bisect", candidates=DRIVERS)
    with pytest.raises(KeyboardInterrupt):
        bisect_by_command(state, words, install, interrupt)
    report = bisect_by_command(read_state(install, "bisect"), words, install, said.append)
    assert (report.found, report.total_runs) == (("575.51",), 8)
    assert [text.partition(":")[0] for text in said].count("run 5") == 2
    assert [text.partition(":")[0] for text in said].count("run 4") == 1


def test_a_candidate_that_does_not_run_is_retried_and_skipped(template: Path, tmp_path: Path) -> None:
    seconds = {"a": 1.0, "b": 1.0, "c": -1.0, "d": 1.05, "e": -125.0, "f": 1.05}
    said: list[str] = []
    words, install = command(template, seconds, tmp_path), tmp_path / "install"
    state = BisectState(name="bisect", candidates=tuple(seconds))
    report = bisect_by_command(state, words, install, said.append)
    assert report.found == ("c", "d")
    assert [text for text in said if text.startswith("c:")] == [
        f"c: the command ended with exit code 1 and no measurement: it made no run below {install}",
        f"c: the command ended with exit code 1 and no measurement: it made no run below {install}",
        "c: it is skipped",
    ]
    assert read_state(install, "bisect").skipped == ("c",)
    assert "'c' or 'd'" in bisect_text(report)
    with pytest.raises(RunFailed, match="'x' cannot be measured"):
        bisect_by_command(
            BisectState(name="other", candidates=("x", "y")), command(template, {"x": -1.0}, tmp_path), install, quiet
        )


def test_a_command_that_trains_something_else_is_not_called_forever(template: Path, tmp_path: Path) -> None:
    words = command(template, {"a": 1.0, "b": 1.0}, tmp_path)
    with pytest.raises(RunFailed, match="does not count"):
        bisect_by_command(BisectState(name="x", candidates=("a", "b"), scale=8), words, tmp_path / "i", quiet)


def test_a_command_that_does_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be started: No such file"):
        bisect_by_command(
            BisectState(name="x", candidates=("a", "b")), ["/nonexistent/{candidate}"], tmp_path / "i", quiet
        )


def test_candidates_are_a_list_or_a_file_with_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "commits.txt"
    file.write_text("# oldest first\nabc123\n\n def456 \n")
    assert read_candidates(str(file)) == ("abc123", "def456")
    assert read_candidates("a, b,c") == ("a", "b", "c")
    missing = str(tmp_path / "missing.txt")
    for text, what in (("a", "fewer than two"), (missing, "there is no such file"), ("a,b,a", "more than once: a")):
        with pytest.raises(UsageError, match=what):
            read_candidates(text)


def test_labels_are_valid_for_any_candidate() -> None:
    images = BisectState(name="image", candidates=("nvcr.io/nvidia/nemo:25.07", "nvcr.io/nvidia/nemo:25.09"))
    assert tuple(images.labels.values()) == ("image-nvcr.io-nvidia-nemo-25.07", "image-nvcr.io-nvidia-nemo-25.09")
    assert BisectState(name="image", candidates=("a/b", "a:b")).labels == {"a/b": "image-1", "a:b": "image-2"}
    assert BisectState(name="image", candidates=("a" * 80, "b")).labels == {"a" * 80: "image-1", "b": "image-2"}


def test_the_commands_keep_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))

    def bisect(*words: str) -> tuple[int, str, str]:
        code = exit_code_of(app, ["bisect", *words])
        return code, *capsys.readouterr()

    options = ("-w", "pretrain_llama3.1", "-s", "tiny")
    _, out, _ = bisect("start", "--candidates", "a,b,c", *options, "--json", "--", "--image", "{candidate}")
    report: dict[str, Any] = json.loads(out)
    assert (report["status"], report["candidate"], report["runs"], report["label"]) == ("measure", "a", 3, "bisect-a")
    assert report["command"][6:8] == ["--image", "a"]
    for wrong in (("-w", "pretrain_llama31"), ("-w", "pretrain_llama3.1", "-s", "7b")):
        code, _, err = bisect("start", "--name", "wrong", "--candidates", "a,b", *wrong)
        assert code == 2 and "did you mean" in err
    code, _, err = bisect("start", "--candidates", "a,b")
    assert code == 2 and "llmb bisect next" in err
    assert json.loads(bisect("skip", "b", "--json")[1])["candidates"][1]["standing"] == "skipped"
    assert bisect("next")[1].startswith("Bisection bisect, 0 runs so far")
    assert bisect("skip", "a")[0] == 2
    state_path(tmp_path, "bisect").write_text("{")
    code, _, err = bisect("next")
    assert code == 2 and "cannot be resumed" in err and "llmb bisect start --fresh --name bisect" in err
    assert bisect("start", "--fresh", "--candidates", "a,b,c")[0] == 0
    assert bisect("next", "--name", "other")[0] == 2
    for words, what in ((("true", "{candidate}"), "other candidates"), (("llmb", "run"), "has no {candidate}")):
        code, _, err = bisect("run", "--candidates", "a,b", "--", *words)
        assert code == 2 and what in err
