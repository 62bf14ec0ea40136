# SPDX-License-Identifier: Apache-2.0
"""Preparation as jobs: what is asked of Slurm, from options and from the variables of the documents."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmb.base.errors import UsageError
from llmb.cli.main import app
from llmb.launch.documents.variables import documented_variables

MARK = "M4RK"
LORA = "finetune_llama3"
PLACES = {"output", "open-mode", "chdir"}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    for variable in documented_variables():
        monkeypatch.delenv(variable.name, raising=False)
    (tmp_path / "install").mkdir()

    def caller(*arguments: str, **environ: str) -> Result:
        shell = {"LLMB_INSTALL": str(tmp_path / "install"), **environ}
        return CliRunner().invoke(app, ["prepare", "submit", *arguments], env=shell)

    return caller


def scripts(call: Callable[..., Result], *arguments: str, **environ: str) -> dict[str, str]:
    result = call(*arguments, "--dry-run", "--json", **environ)
    assert result.exception is None, result.exception
    return {job["prepares"]: job["script"] for job in json.loads(result.stdout)["jobs"]}


def flags(script: str) -> dict[str, str]:
    found = (line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if "#SBATCH" in line)
    return {name: value for name, _, value in found if name not in PLACES}


def work(script: str) -> list[str]:
    """Arguments of llmb in the job."""
    (command,) = [line for line in script.replace("\\\n", "").splitlines() if line.startswith("srun")]
    words = shlex.split(command.partition(" >>")[0])
    return words[words.index("llmb.cli.main") + 1 :]


SHELL = {"SBATCH_ACCOUNT": "account_name", "SBATCH_PARTITION": "batch", "SBATCH_GPUS_PER_NODE": "1"}


def test_a_job_has_one_node_one_gpu_and_the_documents_time_limit(call: Callable[..., Result]) -> None:
    found = scripts(call, "-w", LORA, "-s", "70b", GPU_TYPE="b200", **SHELL)
    assert list(found) == ["dataset", "checkpoint"]
    for part, script in found.items():
        assert flags(script) == {
            "nodes": "1",
            "ntasks-per-node": "1",
            "gpus-per-node": "1",
            "job-name": f"prepare_{part}_70b",
            "time": "00:55:00",
            "cpus-per-task": "8",
            "no-requeue": "",
            "account": "account_name",
            "partition": "batch",
        }
    assert work(found["dataset"]) == ["prepare", "dataset", "-w", LORA, "-s", "70b", "--seq-len", "4096"]
    assert work(found["checkpoint"]) == ["prepare", "checkpoint", "-w", LORA, "-s", "70b"]


def test_without_the_variable_no_gpu_is_requested(call: Callable[..., Result], tmp_path: Path) -> None:
    settings = "gpu_type: h100\nslurm: {account: own, partition: cpus, gpus_per_node: 8, gpu_request: gres}\n"
    (tmp_path / "install" / "cluster_config.yaml").write_text(settings)
    plain = scripts(call, LORA, "--skip-checkpoint")["dataset"]
    assert not {"gres", "gpus-per-node"} & set(flags(plain))
    assert (flags(plain)["account"], flags(plain)["partition"]) == ("own", "cpus")
    asked = scripts(call, LORA, "--skip-checkpoint", "--gpus-per-node", "1")["dataset"]
    assert flags(asked)["gres"] == "gpu:1"
    null = scripts(call, LORA, "--skip-checkpoint", SBATCH_GPUS_PER_NODE="null")["dataset"]
    assert not {"gres", "gpus-per-node"} & set(flags(null))


@pytest.mark.parametrize(("gpu_type", "seq_len"), [("gb200", "2048"), ("b200", "4096"), ("h100", "4096")])
def test_the_gpu_type_determines_the_sequence_length(gpu_type: str, seq_len: str, call: Callable[..., Result]) -> None:
    assert work(scripts(call, LORA, GPU_TYPE=gpu_type)["dataset"])[-2:] == ["--seq-len", seq_len]


def test_sources_are_passed_as_full_paths_and_mounted(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "install" / "cluster_config.yaml").write_text("container: {runtime: pyxis, image: llmb.sqsh}\n")
    options = ("--dataset-source", "/data/squad", "--checkpoint-source", "/data/model", "--tokenizer", "/data/tok")
    found = scripts(call, LORA, "-s", "70b", *options)
    assert work(found["dataset"])[-4:] == ["--source", "/data/squad", "--tokenizer", "/data/tok"]
    given = scripts(call, LORA, "-s", "tiny", "--checkpoint-source", "/data/model")["dataset"]
    assert work(given)[-2:] == ["--tokenizer", "/data/model"], "the tokenizer is where the model is"
    assert work(found["checkpoint"])[-2:] == ["--source", "/data/model"]
    assert "/data/squad:/data/squad,/data/tok:/data/tok" in found["dataset"]
    assert f"{tmp_path}/install:{tmp_path}/install,/data/model:/data/model" in found["checkpoint"]


def test_variables_of_runs_are_named_and_not_taken(call: Callable[..., Result]) -> None:
    runs = {"JOB_TOTAL_GPUS": "8", "GPUS_PER_NODE": "8", "DTYPE": "bogus", "LLMB_WORKLOAD": "/elsewhere"}
    result = call(LORA, "--dry-run", **runs)
    assert result.exception is None, result.exception
    for name in runs:
        assert f"note: {name} is not needed" in result.stderr
    assert "gpus-per-node" not in result.stdout
    assert "HF_HOME" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ((LORA, "--skip-dataset", "--skip-checkpoint"), {}, "both the dataset and the checkpoint are skipped"),
        (("pretrain_llama3.1_8b",), {}, "does not fine-tune"),
        ((LORA,), {"SKIP_DATASET_DOWNLOAD": "perhaps"}, "SKIP_DATASET_DOWNLOAD is 'perhaps'; it must be true or false"),
        ((LORA,), {"TIME_LIMIT": "later"}, "TIME_LIMIT is 'later'"),
        ((), {}, "the workload is not specified"),
        ((LORA, "--seq-len", "0"), {}, "--seq-len is 0; it must be at least 2"),
        ((LORA, "-s", "tiny"), {}, "the model of finetune_llama3 tiny is not on the hub"),
        ((LORA, "-s", "tiny", "--skip-checkpoint"), {}, "the model of finetune_llama3 tiny is not on the hub"),
    ],
)
def test_what_cannot_be_prepared_is_an_error(
    arguments: tuple[str, ...], environ: Mapping[str, str], words: str, call: Callable[..., Result]
) -> None:
    error = call(*arguments, **environ).exception
    assert isinstance(error, UsageError)
    assert words in error.what


def test_a_token_is_in_the_jobs_environment_and_nowhere_else(
    call: Callable[..., Result], program: Callable[[str, str], None], tmp_path: Path
) -> None:
    program("sbatch", f'env >>{tmp_path}/environment; echo "$@" >>{tmp_path}/command; date +%N')
    secrets = {"HF_TOKEN": f"{MARK}-token", "HTTPS_PROXY": f"http://user:{MARK}@proxy:3128"}
    result = call(LORA, "--yes", **secrets, DB_PWD=f"{MARK}-other")
    assert result.exception is None, result.exception
    seen = (tmp_path / "environment").read_text().splitlines()
    assert {line for line in seen if MARK in line} == {f"{name}={value}" for name, value in secrets.items()}
    assert MARK not in result.output
    assert MARK not in (tmp_path / "command").read_text()
    files = [path for path in (tmp_path / "install").rglob("*") if path.is_file()]
    assert {"task.json", "job_spec.json", "job.json", "jobs.sqlite"} <= {path.name for path in files}
    assert [str(path) for path in files if MARK.encode() in path.read_bytes()] == []


def test_a_proxy_without_a_password_reaches_the_job_like_any_variable(
    call: Callable[..., Result], program: Callable[[str, str], None], tmp_path: Path
) -> None:
    program("sbatch", f"env >>{tmp_path}/environment; date +%N")
    assert call(LORA, "--yes", "--skip-checkpoint", HTTPS_PROXY="http://proxy:3128").exception is None
    assert "HTTPS_PROXY=http://proxy:3128" in (tmp_path / "environment").read_text().splitlines()
