# SPDX-License-Identifier: Apache-2.0
"""Real runs on a CPU: repeats of one recipe are not distinguished, a delay of 3 % in every step is found.

The machine may be busy, and what others take of it differs from run to run. So that a step lasts the same nevertheless,
it is given a pace that is slower than the steps at full speed, and the delay is relative to that. The groups run at the
same time, so that whatever happens to the machine happens to all of them. Steps make up for one that was held up; where
that is not enough, as in the last step of a run, the runs of all groups at that time are replaced. No step has to take
any particular time.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from slowed_runs import Slow, slowed

from llmb.analysis.compare_runs import Row, compare_runs
from llmb.analysis.find_runs import find_ended_runs

REPEATS = 5
MOST_TIMES = 4 * REPEATS
"""All groups are trained so often at most, to have as many repeats that nothing held up."""
STEPS, WINDOW = 12, "2-11"
HELD_UP = 1.02
"""Of a run whose steps take longer than their pace by this factor: the machine stood still for a time."""
GROUPS: dict[str, tuple[Slow, ...]] = {"one": (), "other": (), "delayed": (Slow("step", pct=3),)}
"""The delay is of the whole step, as long as its pace makes it."""
LEAST_MS = 1000
"""A process that slept is some milliseconds late on a busy machine."""
ROOMY = 3
"""The pace of steps relative to the usual one at full speed, all groups at the same time."""
RUN = (
    *("-m", "llmb.cli.main", "run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1"),
    *("--gbs", "1", "--seq-len", "64", "--steps", str(STEPS), "--window", WINDOW),
)


def train(python: str, root: Path, time: str, pace: tuple[Slow, ...]) -> None:
    """One run of each group, all at the same time, in the folder ``time`` of each group."""
    started = []
    for name, delays in GROUPS.items():
        variables = {"LLMB_INSTALL": str(root / name / time), "OMP_NUM_THREADS": "1", **slowed(*pace, *delays)}
        command, environ = [python, *RUN], {**os.environ, **variables}
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors


def steps_of(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.rglob("metrics.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def held_up(folder: Path, pace_s: float, delays: tuple[Slow, ...]) -> bool:
    first, last = map(int, WINDOW.split("-"))
    times = [step["step_time_s"] for step in steps_of(folder) if first <= step["step"] <= last]
    return fmean(times) > HELD_UP * pace_s * (1 + sum(delay.pct for delay in delays) / 100)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Path:
    first, root = tmp_path_factory.mktemp("full-speed"), tmp_path_factory.mktemp("runs")
    train(forked_python, first, "first", ())
    pace_s = max(LEAST_MS / 1000, ROOMY * median(step["step_time_s"] for step in steps_of(first)))
    kept = 0
    for number in range(MOST_TIMES):
        train(forked_python, root, str(number), (Slow("pace", ms=1000 * pace_s),))
        if any(held_up(root / name / str(number), pace_s, delays) for name, delays in GROUPS.items()):
            for name in GROUPS:
                shutil.rmtree(root / name / str(number))
        elif (kept := kept + 1) == REPEATS:
            return root
    pytest.fail(f"the machine held up all but {kept} of {MOST_TIMES} times {len(GROUPS)} runs")


@pytest.fixture(scope="module")
def row_of(runs: Path) -> Callable[[str, str], Row]:
    def row_of(before: str, after: str) -> Row:
        found = [find_ended_runs(str(runs / name), runs, lambda _: None) for name in (before, after)]
        (row,) = compare_runs(*found).rows
        assert (row.n_before, row.n_after) == (REPEATS, REPEATS)
        return row

    return row_of


@pytest.mark.measured
def test_repeats_are_not_distinguished_and_a_delay_of_3_percent_is(row_of: Callable[[str, str], Row]) -> None:
    assert row_of("one", "other").verdict in ("pass", "inconclusive")
    for before in ("one", "other"):
        delayed = row_of(before, "delayed")
        assert delayed.verdict == "regressed"
        assert delayed.ci95_pct and delayed.ci95_pct[0] > 0
        assert delayed.delta_pct == pytest.approx(3, abs=1.5)
    assert row_of("delayed", "one").verdict == "improved"
