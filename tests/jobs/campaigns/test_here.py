# SPDX-License-Identifier: Apache-2.0
"""Campaigns without a scheduler: real runs on this machine, one after another, with clients that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from called_here import Run
from junitparser import JUnitXml

from llmb.base.options import LABEL

WITHIN_S = 300
FILE = "pretrain_llama3.1 tiny fp32 1 repeats={repeats} steps=4 mbs={mbs}\n"


@pytest.fixture
def install(tmp_path: Path) -> Path:
    folder = tmp_path / "install"
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text("scheduler: local\n")
    return folder


def write_file(folder: Path, repeats: int, *mbs: int) -> Path:
    file = folder / "sweep.txt"
    file.write_text(FILE.format(repeats=repeats, mbs=",".join(map(str, mbs))))
    return file


def ended_runs(install: Path) -> list[Path]:
    return [path for path in install.rglob("run.json") if json.loads(path.read_text())["status"] == "success"]


def kill_after(install: Path, file: Path, runs: int) -> None:
    """Kills a client that has made so many runs, in the middle of the next one."""
    environ = {**os.environ, "LLMB_INSTALL": str(install), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "llmb", "bulk", str(file), "--yes"]
    client = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + WITHIN_S
    while len(ended_runs(install)) < runs:
        assert client.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    client.send_signal(signal.SIGKILL)
    client.wait(WITHIN_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repeats", "mbs", "kills"),
    [(1, (1, 2, 4), (1,)), pytest.param(3, (1, 2, 4, 8), (1, 3, 5, 7, 11), marks=pytest.mark.measured)],
)
def test_a_campaign_whose_client_is_killed_runs_each_job_once(
    llmb_program: Run, install: Path, tmp_path: Path, repeats: int, mbs: Sequence[int], kills: Sequence[int]
) -> None:
    file, count = write_file(tmp_path, repeats, *mbs), repeats * len(mbs)
    cases = tmp_path / "cases.xml"
    for runs in kills:
        kill_after(install, file, runs)
    done = llmb_program(install, "bulk", str(file), "--yes", "--json", "--junit", str(cases))
    assert done.returncode == 0, done.stderr
    (suite,) = JUnitXml.fromfile(str(cases))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (count, 0, 0, 0)
    rows = done.document["rows"]
    assert [row["varied"] for row in rows] == [f"mbs {one}" for one in mbs]
    assert [row["runs"] for row in rows] == [repeats] * len(mbs)
    assert rows[0]["to_first_pct"] == 0
    assert len(ended_runs(install)) == count
    listed = llmb_program(install, "runs", "--status", "success", "--json").document
    assert listed["total"] == count
    again = llmb_program(install, "bulk", str(file), "--yes", "--json")
    assert len(ended_runs(install)) == count, "nothing is left to run"
    assert again.document["rows"] == rows


def test_what_cannot_run_here_is_said_before_anything_runs(llmb: Run, install: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text("pretrain_llama3.1 8b bf16 8 gpu_type=h100\n")
    done = llmb("bulk", str(file), "--yes", LLMB_INSTALL=str(install))
    assert done.returncode == 2 and "the campaign cannot run" in done.stderr
    file.write_text("pretrain_llama3.1 tiny fp32 1 partition=batch\n")
    done = llmb("bulk", str(file), "--yes", LLMB_INSTALL=str(install))
    assert done.returncode == 2 and "does not support --partition" in done.stderr
    assert not list(install.rglob("run.json"))
    done = llmb("submit", "pretrain_llama3.1", "tiny", LLMB_INSTALL=str(install))
    assert done.returncode == 2 and "use 'llmb run' to train on this machine" in done.stderr


def test_what_would_run_is_shown_in_its_order(llmb: Run, install: Path, tmp_path: Path) -> None:
    file = write_file(tmp_path, 2, 1, 2)
    file = file.rename(file.with_name("2026 Nov: sweep.txt"))
    done = llmb("bulk", str(file), "--dry-run", LLMB_INSTALL=str(install))
    label = done.stderr.rpartition("the label is ")[2].strip()
    assert label.startswith("campaign-2026-Nov-sweep-") and LABEL.is_written(label)
    title = "pretrain_llama3.1 tiny fp32 on 1 x cpu"
    turns = [(1, 1), (2, 1), (2, 2), (1, 2)]
    assert done.stdout.splitlines() == [f"{title} (mbs {mbs}), repeat {repeat} of 2" for mbs, repeat in turns]
