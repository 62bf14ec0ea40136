# SPDX-License-Identifier: Apache-2.0
"""An installation that was killed, wherever that was, and is called again ends as one that was not."""

import json
import subprocess
import sys
from pathlib import Path

import killed_installer
import pytest

measured = pytest.mark.measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "distance", "least_changes"),
    [
        ("install", 3, 30),
        pytest.param("install", 1, 30, marks=measured),
        pytest.param("install in a folder that exists", 1, 30, marks=measured),
        pytest.param("extend", 1, 3, marks=measured),
        pytest.param("remove", 1, 10, marks=measured),
    ],
)
def test_killed_before_any_change_and_repeated_it_ends_the_same(
    case: str, distance: int, least_changes: int, tmp_path: Path, small_python: Path
) -> None:
    command = [
        sys.executable,
        killed_installer.__file__,
        str(tmp_path / "work"),
        str(small_python),
        str(distance),
        case,
    ]
    (tmp_path / "work").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[case]["different"] == {}
    assert found[case]["changes"] >= least_changes
