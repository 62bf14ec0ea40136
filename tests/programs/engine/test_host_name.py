# SPDX-License-Identifier: Apache-2.0
"""A machine whose own name leads nowhere, as in some containers and on some laptops, trains."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ALONE = ("unshare", "--uts", "--map-root-user")


@pytest.mark.slow
def test_a_run_where_the_host_name_is_unknown(tmp_path: Path, needs: Callable[[str, bool, str], None]) -> None:
    probe = subprocess.run([*ALONE, "true"], capture_output=True, check=False)
    needs("mount", probe.returncode == 0, "unshare (util-linux) must be allowed to give a process another host name")
    line = "run -w pretrain_llama3.1 -s tiny --gpu-type cpu --scale 2 --steps 3 --window 1-2 --seq-len 32"
    script = 'hostname nowhere-at-all; exec "$@"'
    command = [*ALONE, "sh", "-c", script, "sh", sys.executable, "-m", "llmb", *line.split()]
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "step time s, mean" in done.stdout
