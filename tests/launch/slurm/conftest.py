# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

SETTINGS = """\
gpu_type: cpu
environment: {GLOO_SOCKET_IFNAME: lo, OMP_NUM_THREADS: 1}
slurm: {partition: gpu, gpus_per_node: 2}
"""


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``llmb submit`` of a tiny model on the test cluster, with its install root at ``tmp_path``/install."""
    install = tmp_path / "install"
    install.mkdir()
    (install / "cluster_config.yaml").write_text(SETTINGS)

    def submitter(*options: str, python: str = sys.executable, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "llmb.cli.main", "submit", "-w", "pretrain_llama3.1", "-s", "tiny", *options]
        environ = {**slurm.environ, "LLMB_INSTALL": str(install), **variables}
        return subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
        )

    return submitter
