# SPDX-License-Identifier: Apache-2.0
"""Answers: from options and files, missing, wrong, recorded, and those of the reference suite's installer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.launch.scheduler_port import Offer, Partition
from llmb.setup.install.answers import answers_of_shell, answers_schema
from llmb.setup.install.cluster_file import read_answers
from llmb.setup.install.python_environment import Surroundings
from llmb.setup.install.questions import Python, SchedulerName, completed

Install = Callable[..., Any]
ANSWERS = answers_schema()
TOKEN = "hf_" + "a1B2" * 8


def cluster(**changes: Any) -> Surroundings:
    """A cluster as Slurm would show it."""
    offer = Offer(
        partitions=(
            Partition(name="batch", nodes=4, gpus_per_node=8, gres_type="h100", architecture="x86_64"),
            Partition(name="big", nodes=2, gpus_per_node=8, gres_type="b200", architecture="x86_64"),
            Partition(name="cpu", nodes=9, is_default=True, architecture="x86_64"),
        ),
        accounts=("bench", "other"),
    )
    return Surroundings(
        catalogue=Catalogue(), programs=frozenset(["uv"]), architecture="x86_64", offers={"slurm": offer}, **changes
    )


def test_all_that_is_missing_is_named_at_once_with_options_and_choices() -> None:
    with pytest.raises(UsageError) as caught:
        completed(ANSWERS(), cluster(), None)
    lines = caught.value.what.splitlines()
    assert lines[0] == "4 answers are missing or invalid:"
    assert lines[1].strip() == "--account: it is not specified; valid: bench, other, none"
    assert lines[2].strip() == "--gpu-partition: it is not specified; valid: batch, big, cpu"
    assert lines[3].strip().startswith("--gpu-type: it is not specified; valid: h100, h200")
    assert lines[4].strip().startswith("--workloads: it is not specified; valid: finetune_llama3")


def test_what_the_cluster_shows_need_not_be_answered() -> None:
    given = ANSWERS(account="bench", gpu_partition="big", workloads=("pretrain_llama3.1",))
    found = completed(given, cluster(), None)
    assert (found.scheduler, found.gpu_type, found.gpus_per_node) == ("slurm", "b200", 8)
    assert (found.gpu_request, found.node_architecture, found.environment) == ("gpus-per-node", "x86_64", "uv")
    assert (found.prepare, found.torch) == (None, "pypi"), "there is nothing to prepare"
    conda = Python(ANSWERS(environment="conda"), cluster())
    assert (conda.check(conda.assumed()), conda.check("/bin/sh")) == (None, "'/bin/sh' is not a version, such as 3.12")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"account": "benhc"}, "--account: 'benhc' is not one of: bench, other, none; did you mean 'bench'?"),
        ({"gpu_partition": "batch,gpu"}, "--gpu-partition: 'gpu' is not one of: batch, big, cpu"),
        ({"gpus_per_node": 16}, "--gpus-per-node: the nodes of batch have 8"),
        ({"gpu_partition": "cpu", "gpu_request": "gres", "gpu_type": "h100"}, "have no generic resource 'gpu'"),
        ({"gpu_type": "gb200", "node_architecture": "x86_64"}, "gb200 has aarch64 hosts"),
        ({"gpu_type": "gb200"}, "this machine is x86_64 and the nodes are aarch64"),
        ({"environment": "conda"}, "--environment: conda is not on this machine"),
        ({"workloads": ("pretrain_llama3",)}, "did you mean 'pretrain_llama3.1'?"),
        ({"workloads": ("finetune_llama3",)}, "--prepare: it is not specified; valid: here, job, no"),
        ({"torch": "cu99"}, "--torch: 'cu99' is neither"),
        ({"size": "8b"}, "--size: '8b' is not one of the sizes: none, as these workloads do not fine-tune"),
        ({"container_runtime": "pyxis"}, "--image: it is not specified"),
        ({"container_runtime": "pyxis", "image": "oras://a"}, "this is not the name of an image: 'oras://a'"),
        ({"variables": {"HF_TOKEN": TOKEN}}, "HF_TOKEN looks like a secret"),
        ({"gpus_per_node": 0}, "--gpus-per-node is 0; it must be at least 1"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_reason(wrong: dict[str, Any], why: str) -> None:
    right = {"account": "bench", "gpu_partition": "batch", "workloads": ("pretrain_llama3.1",)}
    with pytest.raises(UsageError) as caught:
        completed(ANSWERS(**{**right, **wrong}), cluster(), None)
    assert why in caught.value.what
    assert TOKEN not in str(caught.value)


def test_the_build_of_torch_fits_the_driver() -> None:
    given = ANSWERS(account="bench", gpu_partition="batch", workloads=("pretrain_llama3.1",))
    found = {driver: completed(given, cluster(driver=driver), None).torch for driver in (None, 470, 535, 580)}
    assert found == {None: "pypi", 470: "pypi", 535: "cu128", 580: "pypi"}
    assert completed(given.model_copy(update={"gpu_type": "cpu"}), cluster(), None).torch == "cpu"


def test_all_workloads_are_those_of_the_gpu_type() -> None:
    given = ANSWERS(account="none", gpu_partition="batch", workloads=("all",), prepare="no")
    assert set(completed(given, cluster(), None).workloads) == set(Catalogue().workloads) - {"pretrain_kimi-k2"}


def test_without_a_terminal_a_wrong_path_and_missing_answers_are_errors(call: Install, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--path: it is not specified"):
        call("--scheduler", "local")
    for path, why in (
        ("/", "not a folder of its own"),
        (tmp_path / "no" / "root", "there is no folder"),
        (tmp_path / "a,b", "a comma"),
        ("/dev/null", "is not a folder"),
    ):
        with pytest.raises(UsageError, match=why):
            call(path, "--scheduler", "local")
    with pytest.raises(UsageError, match="--workloads: it is not specified"):
        call(tmp_path / "root", "--scheduler", "local")
    assert list(tmp_path.iterdir()) == []


def test_a_record_holds_all_answers_and_repeats_an_installation(here: Install, call: Install, tmp_path: Path) -> None:
    record, again = tmp_path / "answers.yaml", tmp_path / "again.yaml"
    here("-w", "pretrain_llama3.1,finetune_llama3", "--prepare", "no", "--record", record, "--dry-run")
    assert record.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "root").exists(), "a dry run makes nothing"
    call("--config", record, "--record", again)
    assert again.read_text() == record.read_text()
    with pytest.raises(EnvironmentProblem, match="pass another file with --record"):
        call("--config", record, "--record", tmp_path / "missing" / "file.yaml")
    assert (tmp_path / "root" / "workloads" / "finetune_llama3" / "launch.sh").exists()


def test_every_mistake_in_a_file_of_answers_has_its_line(call: Install, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("path: /x\nscheduler: pbs\ngpus_per_nod: 8\n")
    with pytest.raises(UsageError) as caught:
        call("--config", tmp_path / "a.yaml")
    assert "a.yaml:2: scheduler" in caught.value.what
    assert "a.yaml:3: gpus_per_nod: unknown key" in caught.value.what
    (tmp_path / "a.yaml").write_text("path: /x\nworkloads: [pretrain_llama3.1]\nworkloads: all\n")
    with pytest.raises(UsageError, match=r"a\.yaml:3: duplicate key 'workloads'"):
        call("--config", tmp_path / "a.yaml")


REFERENCE = f"""
venv_type: uv
install_path: /lustre/bench
slurm:
  account: acct
  gpu_partition: batch
  cpu_partition: cpu
  gpu_partition_gres: 8
  cpu_partition_gres: null
gpu_type: H100
node_architecture: x86_64
install_method: slurm
selected_workloads: [pretrain_llama3.1, finetune_llama3]
environment_vars:
  HF_TOKEN: {TOKEN}
  NCCL_IB_HCA: mlx5
image_folder: /lustre/img
workload_selection_mode: custom
"""


def test_the_headless_file_of_the_reference_suite_is_read_without_its_token(tmp_path: Path) -> None:
    (tmp_path / "play.yaml").write_text(REFERENCE)
    said: list[str] = []
    found = read_answers(tmp_path / "play.yaml", said.append)
    assert found.document() == {
        "path": "/lustre/bench",
        "workloads": ["pretrain_llama3.1", "finetune_llama3"],
        "scheduler": "slurm",
        "account": "acct",
        "gpu_partition": "batch",
        "cpu_partition": "cpu",
        "gpu_type": "h100",
        "node_architecture": "x86_64",
        "gpus_per_node": 8,
        "gpu_request": "gpus-per-node",
        "variables": {"NCCL_IB_HCA": "mlx5"},
        "environment": "uv",
        "image_folder": "/lustre/img",
        "prepare": "job",
    }
    assert any("HF_TOKEN" in line and "is skipped" in line for line in said)
    assert TOKEN not in "".join(said)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"slurm_info": {}}, "slurm_info (now slurm)"),
        ({"env_vars": {}}, "env_vars (now environment_vars)"),
        ({"environment_vars": {"A": None}}, "environment_vars must map names to values other than null"),
        ({"gpu_typ": "h100"}, "unknown keys: gpu_typ"),
    ],
)
def test_what_the_reference_suite_refuses_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "play.yaml").write_text(yaml.safe_dump({**yaml.safe_load(REFERENCE), **change}))
    with pytest.raises(UsageError) as caught:
        read_answers(tmp_path / "play.yaml", lambda text: None)
    assert why in caught.value.what


def test_whole_nodes_of_the_reference_file_are_asked_for_without_a_flag(tmp_path: Path) -> None:
    (tmp_path / "play.yaml").write_text(REFERENCE.replace("gpu_partition_gres: 8", "gpu_partition_gres: null"))
    assert read_answers(tmp_path / "play.yaml", lambda text: None).gpu_request == "none"
    (tmp_path / "own.yaml").write_text("prepare: no\n")
    assert read_answers(tmp_path / "own.yaml", lambda text: None).prepare == "no", "YAML reads false"


def test_commands_of_slurm_without_its_configuration_are_no_slurm(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the packages of a workstation: this machine alone is assumed, and Slurm is refused with the reason."""
    program("sinfo", "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    question = SchedulerName(ANSWERS(), Surroundings(catalogue=Catalogue()))
    assert question.assumed() == "local"
    assert "no configuration" in str(question.problem("slurm"))
    assert question.problem("local") is None


def test_the_variables_of_the_documents_are_answers() -> None:
    shell = {"GPU_TYPE": "H100", "SBATCH_ACCOUNT": "bench", "SBATCH_PARTITION": "batch", "HOME": "/root"}
    expected = ANSWERS(gpu_type="h100", account="bench", gpu_partition="batch")
    assert answers_of_shell(shell, ["slurm"]) == expected
    assert answers_of_shell(shell, []) == ANSWERS(gpu_type="h100")
    given = ANSWERS(account="other").above(answers_of_shell(shell, ["slurm"]))
    assert (given.account, given.gpu_partition) == ("other", "batch")
    assert answers_of_shell({"SBATCH_ACCOUNT": " "}, ["slurm"]) == ANSWERS()
