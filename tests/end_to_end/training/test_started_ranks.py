# SPDX-License-Identifier: Apache-2.0
"""``llmb run`` in ranks that something else has started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports

from llmb.cli.main import app, exit_code_of

RUN = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--steps", "5", "--json")
WITHIN_S = 240


def environ(install: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "LLMB_INSTALL": str(install), "OMP_NUM_THREADS": "1", **more}


def started_by_hand(install: Path, *options: str, size: int = 2) -> list[tuple[int, str, str]]:
    """Exit code and output of each rank; the last one is started first."""
    (port,) = free_ports(1)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "llmb.cli.main", *RUN, *options],
            env=environ(install, RANK=str(rank), LOCAL_RANK=str(rank), **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in reversed(range(size))
    ]
    ended = [(*rank.communicate(timeout=WITHIN_S), rank.returncode) for rank in ranks]
    return [(code, out, err) for out, err, code in reversed(ended)]


def losses(document: dict[str, Any]) -> list[float]:
    lines = (Path(document["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_ranks_started_by_hand_and_by_torchrun_train_as_those_that_llmb_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = started_by_hand(tmp_path)
    assert (first[0], other[:2]) == (0, (0, "")), first[2] + other[2]
    by_hand = json.loads(first[1])
    assert (by_hand["status"], by_hand["recipe"]["scale"]) == ("success", 2)
    assert "another run is using this machine" not in first[2]
    record = json.loads((Path(by_hand["run_dir"]) / "run.json").read_text())
    nodes = record["result"]["other_work"]["nodes"]
    runs = [run for node in nodes for run in node["runs"]]
    own = [run for run in runs if run["program"] == "llmb.engine.join" or run["folder"] == by_hand["run_dir"]]
    assert own == [], "the other rank is one of the run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "llmb.cli.main", *RUN]
    done = subprocess.run(words, env=environ(tmp_path), capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    assert exit_code_of(app, [*RUN, "--scale", "2"]) == 0
    usual = losses(json.loads(capsys.readouterr().out))
    assert losses(by_hand) == usual
    assert losses(json.loads(done.stdout)) == usual


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({}, (), "but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, (), "MASTER_PORT is 'x'"),
        (
            {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            ("--scale", "4"),
            "--scale is 4, but the number of started ranks is 2",
        ),
        (
            {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            ("--mbs", "1,2"),
            "2 ranks were started for one run, but these options select several",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    variables: dict[str, str],
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables, "LLMB_INSTALL": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert exit_code_of(app, [*RUN, *options]) == 2
    assert message in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["what"]
