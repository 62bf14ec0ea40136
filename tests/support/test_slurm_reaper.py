# SPDX-License-Identifier: Apache-2.0
"""A test session that is killed leaves no daemon."""

import shutil
import subprocess
import sys
from pathlib import Path

from slurm_cluster import REAPER

SECONDS, ENDS_WITHIN_S = "600", 60


def daemon(root: Path) -> subprocess.Popen[bytes]:
    """What is called like one."""
    root.mkdir()
    sleep = shutil.which("sleep")
    assert sleep
    return subprocess.Popen([shutil.copy(sleep, root / "slurmctld"), SECONDS])


def test_daemons_end_with_whoever_started_them_and_no_others(tmp_path: Path) -> None:
    one, other = daemon(tmp_path / "one"), daemon(tmp_path / "other")
    try:
        command = [sys.executable, str(REAPER), str(tmp_path / "one")]
        session = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); print(); input()"
        starter = subprocess.Popen(
            [sys.executable, "-uc", session, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert starter.stdout
        starter.stdout.readline()
        assert one.poll() is None
        starter.kill()
        starter.communicate()
        assert one.wait(ENDS_WITHIN_S) < 0
        assert other.poll() is None
    finally:
        for process in (one, other):
            process.kill()
            process.wait()
