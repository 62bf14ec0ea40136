# SPDX-License-Identifier: Apache-2.0
"""Marked tokens in the shell of a user who installs, looks, submits, runs and prepares, on a real Slurm.

Slurm's commands are called without SLURM_JWT, by which they would authenticate; that they are given it is noted.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from marked_secrets import IS_KNOWN, CommandLines, marked_files, markers, names_in, web_token
from slurm_client import Client
from slurm_cluster import SEARCHED

from llmb import __version__

pytestmark = pytest.mark.slurm
SALT = f"a user's shell {os.getpid()}"
MARKED = {**markers(SALT), "SLURM_JWT": web_token(SALT)}
CALLED = ("sbatch", "srun", "squeue", "sacct", "scontrol", "sinfo", "scancel", "sacctmgr")
TINY = ("-w", "pretrain_llama3.1", "-s", "tiny")
TUNED = ("-w", "finetune_llama3", "-s", "tiny")
ANSWERS = "{{scheduler: local, gpu_type: cpu, environment: existing, python: {python}, workloads: [pretrain_llama3.1]}}"


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """Programs that stand before Slurm's own, and the file where they note that they were given a token."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in CALLED:
        note = f'[ -z "$SLURM_JWT" ] || echo {name} >>{tmp_path}/given\n'
        (folder / name).write_text(f'#!/bin/sh\n{note}unset SLURM_JWT\nPATH={SEARCHED} exec {name} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def llmb(client: Client, called: Path) -> Callable[..., str]:
    """Calls a command with all four tokens; returns what it printed to stdout, and looks for tokens in all it said."""

    def call(*command: str, code: int | None = 0, **variables: str) -> str:
        path = f"{called}{os.pathsep}{client.cluster.environ['PATH']}"
        done = client.run(*command, code=code, **{**MARKED, "PATH": path, **variables})
        assert names_in((done.stdout + done.stderr).encode(), MARKED) == []
        return done.stdout

    return call


def answers(folder: Path) -> Path:
    """Of an installation whose Python is not started in earnest: loading torch takes seconds."""
    told = json.dumps({"python": "3.12.1", "llmb": __version__, "torch": "2.11.0", "cuda": None})
    python, file = folder / "small-python", folder / "answers.yaml"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    python.chmod(0o755)
    file.write_text(ANSWERS.format(python=python))
    return file


def prepare(llmb: Callable[..., str], install: Path) -> str:
    """The job that prepares a checkpoint, whose Python says whether it has the token."""
    python, settings = install / "python", install / "cluster_config.yaml"
    python.write_text('#!/bin/sh\necho "token of ${#HF_TOKEN} characters, ${WANDB_API_KEY:-no} other"\n')
    python.chmod(0o755)
    settings.write_text(f"{settings.read_text()}python: {python}\n")
    out = llmb("prepare", "submit", *TUNED, "--checkpoint-source", "/data/model", "--skip-dataset", "--yes", "--json")
    (job,) = json.loads(out)["jobs"]
    llmb("jobs", "wait", job["job_id"])
    assert f"token of {len(MARKED['HF_TOKEN'])} characters, no other" in llmb("jobs", "log", job["job_id"])
    return str(job["job_id"])


@pytest.mark.slow
def test_no_command_writes_one_of_four_tokens(client: Client, llmb: Callable[..., str], tmp_path: Path) -> None:
    lines = CommandLines(MARKED, every_s=0.2)
    lines.start()
    root = tmp_path / "root"
    llmb("install", str(root), "--config", str(answers(tmp_path)), "--record", str(tmp_path / "kept.yaml"), "--yes")
    assert (root / "cluster_config.yaml").exists()
    llmb("config", "show", "--json")
    (run,) = [json.loads(llmb("submit", *TINY, "--scale", "2", "--steps", "2", "--wait", "--json"))]
    llmb("run", *TINY, "--gpu-type", "cpu", "--scale", "1", "--steps", "2")
    llmb("parse", run["run_dir"], "--json")
    llmb("doctor", "--json", code=None)
    job_id = prepare(llmb, client.install)
    assert lines.stop() == []
    assert len(list(client.install.rglob("run.json"))) == 2
    assert {"sbatch", "squeue"} <= set((tmp_path / "given").read_text().split())
    assert marked_files(tmp_path, MARKED) == []
    assert marked_files(client.cluster.root, MARKED) == []
    assert kept_by_slurm(client.cluster.root) == {job_id: ["HF_TOKEN"]}


def kept_by_slurm(root: Path) -> dict[str, list[str]]:
    """The tokens in what Slurm keeps of the environments of jobs, by job."""
    files = [path for path in (root / "state").rglob("environment") if IS_KNOWN.search(str(path))]
    assert files
    found = {path.parent.name.removeprefix("job."): names_in(path.read_bytes(), MARKED) for path in files}
    return {job_id: names for job_id, names in found.items() if names}
