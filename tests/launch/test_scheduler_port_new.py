# SPDX-License-Identifier: Apache-2.0
"""A scheduler that llmb does not have: a package and an entry of the lookup make jobs and installations of it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_client import wait_until

from llmb.runs.folder import RunFolder

FOLDER = Path(__file__).parents[1] / "support" / "fake_scheduler"
MODEL = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "2")
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path, forked_python: str) -> Call:
    """``llmb`` with the install root ``tmp_path``."""
    environ = {name: value for name, value in os.environ.items() if name not in ("LLMB_INSTALL", "STAGE_PATH")}
    environ |= {"PYTHONPATH": str(FOLDER), "LLMB_INSTALL": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*arguments: object, code: int = 0) -> "subprocess.CompletedProcess[str]":
        command = [forked_python, "-m", "llmb.cli.main", *map(str, arguments)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    return run


@pytest.fixture
def site(tmp_path: Path, forked_python: str) -> Path:
    (tmp_path / "cluster_config.yaml").write_text(f"scheduler: desk\npython: {forked_python}\n")
    return tmp_path


@pytest.mark.slow
def test_a_run_is_queued_and_waited_for(call: Call, site: Path) -> None:
    assert "|| exit" in call("submit", *MODEL, "--dry-run").stdout
    call("submit", *MODEL, "--steps", 4, "--wait")
    assert json.loads(call("result", "latest", "--json").stdout)["status"] == "success"
    (job,) = json.loads(call("jobs", "list", "--json").stdout)["jobs"]
    assert (job["scheduler"], job["status"], job["nodes"]) == ("desk", "success", "desk")


@pytest.mark.slow
def test_a_run_is_cancelled(call: Call, site: Path) -> None:
    (job,) = json.loads(call("submit", *MODEL, "--steps", 100_000, "--yes", "--json").stdout)["jobs"]
    try:
        wait_until(lambda: (RunFolder(Path(job["run_dir"])).steps).exists(), "a run that trains")
    finally:
        call("jobs", "cancel", job["job_id"])
    ended = json.loads(call("jobs", "wait", job["job_id"], "--json", code=130).stdout)["jobs"][0]
    assert (ended["state"], ended["status"]) == ("GONE", "cancelled")


def test_what_only_another_scheduler_has_is_refused(call: Call, site: Path) -> None:
    said = call("submit", *MODEL, "--account", "research", "--dry-run", code=2).stderr
    assert "'scheduler: desk' in cluster_config.yaml does not support --account" in said


def test_an_installation_asks_its_question_and_writes_its_settings(
    call: Call, tmp_path: Path, forked_python: str
) -> None:
    root = tmp_path / "root"
    given = ("--scheduler", "desk", "-w", "pretrain_llama3.1", "--gpu-type", "cpu")
    given = (root, *given, "--environment", "existing", "--python", forked_python)
    assert "--room: it is not specified; valid: attic, cellar" in call("install", *given, code=2).stderr
    call("install", *given, "--room", "attic")
    assert "scheduler: desk\n" in (root / "cluster_config.yaml").read_text()
    assert "desk:  # what jobs ask for\n  room: attic\n" in (root / "cluster_config.yaml").read_text()
    assert "a first result" in call("install", root).stdout, "its answers are those of the settings"
