# SPDX-License-Identifier: Apache-2.0
"""Temporary folders: nothing of a killed process stays once another one needs such a folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from llmb.base.scratch import scratch_folder

USES_ONE = """
import signal, sys
from pathlib import Path
from llmb.base.scratch import scratch_folder
with scratch_folder("llmb-x-", Path(sys.argv[1])) as folder:
    (folder / "large").mkdir()
    (folder / "large" / "file").write_text("content")
    print(folder, flush=True)
    signal.pause()
"""


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_another_one_uses_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USES_ONE, str(tmp_path)]
    users = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    used = [Path(user.stdout.readline().strip()) for user in users if user.stdout]
    users[0].kill()
    users[0].wait()
    assert names(tmp_path) == sorted(path.name for path in used)
    for path in used:
        os.utime(path, (0, 0))
    with scratch_folder("llmb-x-", tmp_path) as own:
        assert names(tmp_path) == sorted((used[1].name, own.name))
        assert own.stat().st_mode & 0o777 == 0o700
    users[1].send_signal(signal.SIGTERM)
    for user in users:
        user.communicate()
    with scratch_folder("llmb-x-", tmp_path):
        pass
    assert names(tmp_path) == []


def test_only_abandoned_folders_of_the_name_are_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    place = tmp_path / "place"
    for name in ("llmb-x-new", "llmb-x-old", "llmb-y-other"):
        (place / name).mkdir(parents=True)
        (place / name / "file").touch()
    os.utime(place / "llmb-x-old", (0, 0))
    os.utime(place / "llmb-y-other", (0, 0))
    (place / "llmb-x-link").symlink_to(outside)
    (place / "llmb-x-file").touch()
    with scratch_folder("llmb-x-", place):
        pass
    kept = ["llmb-x-file", "llmb-x-link", "llmb-x-new", "llmb-y-other"]
    assert names(place) == kept
    assert names(outside) == ["kept"]
