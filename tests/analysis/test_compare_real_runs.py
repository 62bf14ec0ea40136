# SPDX-License-Identifier: Apache-2.0
"""Real runs on a CPU: repeats of one recipe are not distinguished, a delay of 3 % in every step is found.

The machine may be busy, and what others take of it differs from run to run. So that a step lasts the same nevertheless,
it is given a pace that is slower than any step at full speed, and the delay is relative to that. The groups run at the
same time, so that whatever happens to the machine happens to all of them. No step has to take any particular time.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from slowed_runs import Slow, slowed

from llmb.analysis.compare_runs import compare_runs
from llmb.analysis.comparison import Row
from llmb.analysis.find_runs import find_ended_runs

REPEATS = 5
STEPS, WINDOW = 12, "2-11"
GROUPS: dict[str, tuple[Slow, ...]] = {"one": (), "other": (), "delayed": (Slow("step", pct=3),)}
"""The delay is of the whole step, as long as its pace makes it."""
LEAST_MS = 1000
"""A process that slept is some milliseconds late on a busy machine."""
ROOMY = 2
"""The pace of steps relative to the longest one at full speed, all groups at the same time."""
RUN = (
    *("-m", "llmb.cli.main", "run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1"),
    *("--gbs", "1", "--seq-len", "64", "--steps", str(STEPS), "--window", WINDOW),
)


def train(python: str, root: Path, pace: tuple[Slow, ...]) -> None:
    """One run of each group, all at the same time."""
    started = []
    for name, delays in GROUPS.items():
        variables = {"LLMB_INSTALL": str(root / name), "OMP_NUM_THREADS": "1", **slowed(*pace, *delays)}
        command, environ = [python, *RUN], {**os.environ, **variables}
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(forked_python, root / "full speed", ())
    steps = [
        json.loads(line)
        for path in root.glob("full speed/*/workloads/*/experiments/*/*/*/metrics.jsonl")
        for line in path.read_text().splitlines()
    ]
    longest_s = max(step["step_time_s"] for step in steps if step["step"] > 0)
    pace = Slow("pace", ms=max(LEAST_MS, ROOMY * 1000 * longest_s))
    for _ in range(REPEATS):
        train(forked_python, root, (pace,))
    return root


@pytest.fixture(scope="module")
def row_of(runs: Path) -> Callable[[str, str], Row]:
    def row_of(before: str, after: str) -> Row:
        found = [find_ended_runs(str(runs / name), runs, lambda _: None) for name in (before, after)]
        (row,) = compare_runs(*found).rows
        assert (row.n_before, row.n_after) == (REPEATS, REPEATS)
        return row

    return row_of


@pytest.mark.slow
def test_repeats_are_not_distinguished_and_a_delay_of_3_percent_is(row_of: Callable[[str, str], Row]) -> None:
    assert row_of("one", "other").verdict in ("pass", "inconclusive")
    for before in ("one", "other"):
        delayed = row_of(before, "delayed")
        assert delayed.verdict == "regressed"
        assert delayed.ci95_pct and delayed.ci95_pct[0] > 0
        assert delayed.delta_pct == pytest.approx(3, abs=1.5)
    assert row_of("delayed", "one").verdict == "improved"
