# SPDX-License-Identifier: Apache-2.0
"""A partition brings its GPU type and how its GPUs are counted."""

from pathlib import Path

import pytest
from called_here import Run

from llmb.jobspec.options import JobOptions
from llmb.schedulers.lookup import cluster_schema
from llmb.schedulers.slurm.scheduler import SlurmScheduler
from llmb.site.site import Site

SETTINGS = """\
slurm:
  account: research
  partition: hopper
  cpu_partition: cpu
  gpus_per_node: 8
  partitions:
    hopper: {gpu_type: h100}
    hopper-long: {gpu_type: h100}
    blackwell: {gpu_type: b200, gpu_request: gres, gres_type: b200}
    whole: {gpu_type: gb200, gpu_request: none, gpus_per_node: 4}
"""
LLAMA = ("-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16")


@pytest.fixture
def submitted(llmb: Run, tmp_path: Path) -> Run:
    """``llmb submit --dry-run``."""
    (tmp_path / "cluster_config.yaml").write_text(SETTINGS)
    return lambda *options, **variables: llmb("submit", *options, "--dry-run", **variables)


def asked(script: str) -> tuple[str, set[str]]:
    """The GPU type of a script, and what it requests of nodes, partitions and GPUs."""
    lines = script.splitlines()
    wanted = ("partition", "gres", "gpus-per-node", "nodes")
    flags = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}
    return lines[1].rpartition(" x ")[2].split(",")[0], {flag for flag in flags if flag.partition("=")[0] in wanted}


@pytest.mark.parametrize(
    ("options", "variables", "gpu_type", "flags"),
    [
        ((), {}, "h100", {"nodes=2", "gpus-per-node=8", "partition=hopper"}),
        (("-p", "blackwell"), {}, "b200", {"nodes=2", "gres=gpu:b200:8", "partition=blackwell"}),
        ((), {"SBATCH_PARTITION": "blackwell"}, "b200", {"nodes=2", "gres=gpu:b200:8", "partition=blackwell"}),
        (("-p", "whole"), {}, "gb200", {"nodes=4", "partition=whole"}),
        (("--gpu-type", "gb200"), {}, "gb200", {"nodes=4", "partition=whole"}),
        (("-p", "hopper-long,hopper"), {}, "h100", {"nodes=2", "gpus-per-node=8", "partition=hopper-long,hopper"}),
        (("-p", "unlisted", "--gpu-type", "b300"), {}, "b300", {"nodes=2", "gpus-per-node=8", "partition=unlisted"}),
        (("--gpu-request", "none"), {}, "h100", {"nodes=2", "partition=hopper"}),
        ((), {"SBATCH_GPUS_PER_NODE": "null"}, "h100", {"nodes=2", "partition=hopper"}),
        (
            ("-p", "whole", "--gpu-request", "gpus-per-node"),
            {},
            "gb200",
            {"nodes=4", "gpus-per-node=4", "partition=whole"},
        ),
    ],
)
def test_a_partition_decides_what_is_requested(
    submitted: Run, options: tuple[str, ...], variables: dict[str, str], gpu_type: str, flags: set[str]
) -> None:
    done = submitted(*LLAMA, *options, **variables)
    assert done.returncode == 0, done.stderr
    assert asked(done.stdout) == (gpu_type, flags)


def test_a_run_without_gpus_goes_to_the_partition_for_those(submitted: Run) -> None:
    done = submitted("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "2", "--gpu-type", "cpu")
    assert asked(done.stdout)[1] == {"nodes=1", "partition=cpu"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("-p", "blackwell", "--gpu-type", "h100"),
            ("blackwell has b200", "--partition hopper, --partition hopper-long"),
        ),
        (("-p", "hopper", "--gpu-type", "b300"), ("hopper has h100", "--gpu-type h100", "add the partition with b300")),
        (("--gpu-type", "b300"), ("hopper has h100", "--gpu-type h100")),
        (("-p", "hopper,blackwell"), ("different GPU types: hopper has h100, blackwell has b200", "--gpu-type")),
    ],
)
def test_gpus_that_the_partition_lacks_are_refused(
    submitted: Run, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = submitted(*LLAMA, *options)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_a_campaign_gets_the_gpu_type_of_its_partition(submitted: Run) -> None:
    done = submitted("-w", "pretrain_llama3.1", "-s", "8b,70b", "--max-scale", "64", "-p", "blackwell")
    assert done.returncode == 0, done.stderr
    assert "b200" in done.stdout
    assert "h100" not in done.stdout


def test_the_sites_gpu_type_holds_where_the_partition_tells_none() -> None:
    config = cluster_schema().model_validate({"gpu_type": "b300", "slurm": {"partition": "any"}})
    site, scheduler = Site(install=Path("/x"), config=config), SlurmScheduler()
    assert scheduler.defaults(site, JobOptions()).gpu_type == "b300"
    assert scheduler.defaults(site, JobOptions(), "h100").gpu_type == "h100"
