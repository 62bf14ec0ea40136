# SPDX-License-Identifier: Apache-2.0
"""Installations on a real Slurm: what it offers, without and with a terminal, and runs that follow."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_client import wait_until
from slurm_cluster import SlurmCluster
from terminal import talk

from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.scheduler_port import Partition

ANSWERS = """\
path: {root}
scheduler: slurm
gpu_partition: gpu
gpu_type: cpu
gpus_per_node: 2
workloads: [pretrain_llama3.1]
variables: {{GLOO_SOCKET_IFNAME: lo, OMP_NUM_THREADS: "1"}}
environment: existing
python: {python}
"""


@pytest.fixture
def environ(slurm: SlurmCluster) -> Iterator[dict[str, str]]:
    yield {name: value for name, value in slurm.environ.items() if name not in ("LLMB_INSTALL", "STAGE_PATH")}
    slurm.run("scancel", f"--user={os.geteuid()}")
    wait_until(lambda: not slurm.run("squeue", "-h").stdout.strip(), "an empty queue")


def llmb(
    *arguments: object, environ: dict[str, str], code: int = 0, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python, "-m", "llmb.cli.main", *map(str, arguments)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def test_slurm_tells_its_partitions(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    offer = find_scheduler("slurm").offer()
    here = os.uname().machine
    assert offer.partition("gpu") == Partition(
        name="gpu", is_default=True, nodes=2, gpus_per_node=8, gres_type="h100", architecture=here
    )
    assert offer.partition("debug") == Partition(
        name="debug", nodes=1, gpus_per_node=8, gres_type="h100", architecture=here
    )
    assert offer.accounts is None


def test_missing_answers_are_named_with_what_slurm_has(environ: dict[str, str], tmp_path: Path) -> None:
    done = llmb("install", tmp_path / "root", "--gpu-type", "cpu", "--json", environ=environ, code=2)
    what = json.loads(done.stderr.splitlines()[-1])["error"]["what"]
    assert "--gpu-partition: it is not specified; valid: gpu, debug" in what
    assert "--workloads: it is not specified" in what
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_installed_from_a_file_it_submits_and_has_a_result(
    environ: dict[str, str], tmp_path: Path, forked_python: str
) -> None:
    root = tmp_path / "root"
    (tmp_path / "answers.yaml").write_text(ANSWERS.format(root=root, python=forked_python))
    done = llmb("install", "--config", tmp_path / "answers.yaml", "--json", environ=environ)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["status"] == "installed"
    assert document["next"][0] == f"export LLMB_INSTALL={root}"
    own = {**environ, "LLMB_INSTALL": str(root)}
    model = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "2", "--steps", "5")
    script = llmb("submit", *model, "--dry-run", environ=own, python=forked_python).stdout
    assert "#SBATCH --partition=gpu" in script
    assert forked_python in script
    result = json.loads(llmb("submit", *model, "--wait", "--json", environ=own, python=forked_python).stdout)
    assert result["status"] == "success"
    launched = subprocess.run(
        [root / "workloads" / "pretrain_llama3.1" / "launch.sh", "--dry-run"],
        env={**environ, "JOB_TOTAL_GPUS": "2", "MODEL_SIZE": "tiny", "DTYPE": "fp32"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    assert f"--chdir={root}/" in launched.stdout


def test_on_a_terminal_it_asks_until_answers_are_valid(
    environ: dict[str, str], tmp_path: Path, small_python: Path
) -> None:
    root = tmp_path / "root"
    answers = [
        ("Folder of the installation", "/"),
        ("is not a folder of its own", str(root)),
        ("What starts jobs", ""),
        ("Slurm account", ""),
        ("Partition of the nodes that train", "gpuu"),
        ("did you mean 'gpu'?", "2"),
        ("Partition for jobs that need no GPU", ""),
        ("GPU type", "cpu"),
        ("How jobs ask Slurm for GPUs", ""),
        ("Workloads", "5,8"),
        ("Containers", ""),
        ("Python environment", "existing"),
        ("Python: a program", str(small_python)),
        ("Enter installs", "gpu-partition"),
        ("Partition of the nodes that train", "gpu"),
        ("Enter installs", ""),
    ]
    code, shown = talk(
        [sys.executable, "-m", "llmb.cli.main", "install"], {**environ, "TERM": "dumb", "COLUMNS": "80"}, answers
    )
    assert code == 0, shown
    assert "2  debug  1 node, 8 x h100 each" in shown
    assert "\x1b[" not in shown
    asked = shown.partition("Enter installs")[0].replace(str(tmp_path), "")
    assert max(map(len, asked.splitlines())) <= 80
    config = (root / "cluster_config.yaml").read_text()
    assert "  partition: gpu  # of jobs that train" in config
    assert {path.name for path in (root / "workloads").iterdir()} == {"pretrain_llama3.1", "pretrain_qwen3"}


def test_the_end_of_the_input_installs_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    code, shown = talk(
        [sys.executable, "-m", "llmb.cli.main", "install", str(tmp_path / "root")],
        environ,
        [("What starts jobs", "local"), ("GPU type", "cpu"), ("Workloads", "\x04")],
    )
    assert code == 130, shown
    assert "nothing was installed" in shown
    assert not (tmp_path / "root").exists()
