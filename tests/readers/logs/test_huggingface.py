# SPDX-License-Identifier: Apache-2.0
"""Logs that the Trainer of transformers wrote just now, and the true times of its steps beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.readers.logs.log_files import parse_file

pytestmark = pytest.mark.measured  # each change reads the stored logs of test_samples.py
SCRIPT = Path(__file__).parents[2] / "support" / "trainer_logs.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def true_mean_s(folder, name, window):
    """The least and the largest mean step time in the window that the ends of steps allow."""
    times = json.loads((folder / f"{name}.json").read_text().splitlines()[-1])
    before, after = ({int(step): seconds for step, seconds in times[when].items()} for when in ("before", "after"))
    first, last = window.first - 1, window.last
    left_out_s = sum(seconds for step, seconds in times["evaluations"].items() if first <= int(step) < last)
    return [
        (end[last] - begin[first] - left_out_s) / (last - first) for begin, end in ((after, before), (before, after))
    ]


NAMES = ["fast_1", "fast_10", "slow", "saved", "resumed", "two", "evaluated", "rare", "rare_resumed", "evaluated_rare"]


@pytest.mark.parametrize("rule", ["all", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_within_its_interval_of_the_wall_time_or_there_is_none(logs, name, rule):
    found = parse_file(logs / f"{name}.out", rule).outcome
    if found.step_time_s is None:
        known = ("slow", "two", "resumed", "evaluated", "rare")  # however busy the machine is
        assert (found.status, name in known and rule == "all") == ("too_few_steps", False)
        return
    low, high = true_mean_s(logs, name, found.window)
    mean, error = found.step_time_s.mean, found.clock_error_s
    if error is None:  # no bar moved: the mean of the whole run by its runtime
        wall_s = json.loads((logs / f"{name}.json").read_text())["wall_s"]
        low, high, error = low, wall_s / found.step_time_s.count, 0.001 * mean
    assert low - error <= mean <= high + error, found.reason


def test_the_step_from_which_a_run_resumed_is_told(logs):
    found = parse_file(logs / "resumed.out", "all").outcome
    assert (found.status, found.attempts, found.max_step) == ("success", 1, 50)
    assert found.window.first in (21, 22)


def test_two_trainings_are_two_attempts_or_refused(logs):
    assert parse_file(logs / "two.out", "all").outcome.attempts == 2
    different = parse_file(logs / "different.out", "all").outcome
    assert (different.status, different.step_time_s) == ("unreadable", None)
    assert "progress bars of 20, 30 steps" in different.reason
