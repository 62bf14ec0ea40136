# SPDX-License-Identifier: Apache-2.0
"""Data and checkpoints that an installation prepares: which, here, and in jobs of a real Slurm."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_client import Client
from slurm_cluster import SlurmCluster

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_workload
from llmb.setup.install.answers import Answers
from llmb.setup.install.installation import prepared_sizes, seq_len_of
from llmb.setup.install.installing import next_commands
from llmb.setup.prepare.small_files import write_small_files

Install = Callable[..., Any]
BOTH = ("finetune_llama3", "pretrain_llama3.1")


def test_sizes_of_the_documents_that_the_gpu_type_trains_are_prepared() -> None:
    catalogue = Catalogue()
    assert "tiny" in find_workload(catalogue, "finetune_llama3").sources
    assert [*prepared_sizes(catalogue, Answers(workloads=BOTH, gpu_type="h100"))] == [("finetune_llama3", "70b")]
    assert [*prepared_sizes(catalogue, Answers(workloads=BOTH, gpu_type="cpu"))] == []
    tiny = Answers(workloads=BOTH, gpu_type="cpu", size="tiny")
    assert [*prepared_sizes(catalogue, tiny)] == [("finetune_llama3", "tiny")]
    lengths = [seq_len_of(catalogue, Answers(gpu_type=name), "finetune_llama3", "70b") for name in ("gb200", "h100")]
    assert lengths == [2048, 4096]


def test_preparations_in_the_background_are_followed_by_commands() -> None:
    python = {"environment": "existing", "python": "/p/python"}
    given = Answers(workloads=("finetune_llama3",), gpu_type="h100", scheduler="slurm", prepare="job", **python)
    found = [command for _, command in next_commands(Catalogue(), given, Path("/r"), jobs=True)]
    assert found[1:3] == [
        "/p/python -P -m llmb.cli.main jobs list",
        "/p/python -P -m llmb.cli.main prepare verify -w finetune_llama3 -s 70b",
    ]


@pytest.mark.slow
def test_prepared_here_once(call: Install, tmp_path: Path, forked_python: str) -> None:
    write_small_files(Catalogue(), "finetune_llama3", "tiny", tmp_path / "small")
    options = ("--scheduler", "local", "--gpu-type", "cpu", "-w", "finetune_llama3", "--environment", "existing")
    sources = ("--checkpoint-source", tmp_path / "small/model", "--dataset-source", tmp_path / "small/squad.jsonl")
    root = tmp_path / "root"
    done = call(root, *options, *sources, "--python", forked_python, "--size", "tiny", "--prepare", "here", "--json")
    assert json.loads(done.stdout)["steps"][-1] == {
        "name": "prepare finetune_llama3",
        "state": "done",
        "text": "finetune_llama3 tiny is prepared",
    }
    assert json.loads(call(root, "--json").stdout)["steps"][-1]["state"] == "kept"


@pytest.mark.slow
def test_prepared_by_jobs_that_are_not_queued_twice(
    slurm: SlurmCluster, call: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: str
) -> None:
    for name, value in slurm.environ.items():
        if name not in ("LLMB_INSTALL", "STAGE_PATH"):
            monkeypatch.setenv(name, value)
    write_small_files(Catalogue(), "finetune_llama3", "tiny", tmp_path / "small")
    options = ("--gpu-partition", "gpu", "--gpu-type", "cpu", "-w", "finetune_llama3", "--environment", "existing")
    sources = ("--checkpoint-source", tmp_path / "small/model", "--dataset-source", tmp_path / "small/squad.jsonl")
    root = tmp_path / "root"
    done = call(root, *options, *sources, "--python", forked_python, "--size", "tiny", "--prepare", "job", "--json")
    jobs = json.loads(done.stdout)["jobs"]
    assert len(jobs) == 2
    again = json.loads(call(root, "--json").stdout)
    assert len(again["jobs"]) < 2, "a job that has not ended is not queued again"
    client = Client(slurm, root, forked_python)
    client.run("jobs", "wait", *(job["job_id"] for job in [*jobs, *again["jobs"]]))
    last = json.loads(call(root, "--json").stdout)
    assert (last["jobs"], last["steps"][-1]["state"]) == ([], "kept")
    assert (root / "workloads/finetune_llama3/preparations").is_dir()


@pytest.mark.parametrize(
    ("workloads", "options"),
    [
        (("pretrain_gpt_oss", "finetune_llama3"), "-w finetune_llama3 --synthetic -s tiny --gpu-type cpu --scale 2"),
        (("finetune_llama3", "pretrain_qwen3"), "-w pretrain_qwen3 -s tiny --gpu-type cpu --scale 2"),
        (("pretrain_gpt_oss",), "-w pretrain_gpt_oss -s tiny --gpu-type cpu --scale 2 --framework torchtitan"),
        (("pretrain_kimi-k2",), "-w pretrain_llama3.1 -s tiny --gpu-type cpu --scale 2"),
    ],
)
def test_the_first_run_is_one_that_trains(workloads: tuple[str, ...], options: str) -> None:
    python = {"environment": "existing", "python": "/p/python"}
    given = Answers(scheduler="local", workloads=workloads, **python)
    *_, (_, command) = next_commands(Catalogue(), given, Path("/r"), jobs=False)
    assert command.partition(" run ")[2] == options
