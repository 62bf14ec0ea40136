# SPDX-License-Identifier: Apache-2.0
"""No secret reaches a file, a job or a message: everything that a run and a submission write is searched for a mark."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmb.base.errors import UsageError
from llmb.cli.main import app
from llmb.launch.local import run_workers
from llmb.runs.folder import RunFolder

MARK = "M4RK"
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJ{MARK}IjoxNzAwMDAwMDAwfQ.c2lnbmF0dXJl"
SHELL = {
    "HF_TOKEN": f"{MARK}-of-an-unknown-form",
    "NVIDIA_AUTH": MARK,
    "DB_PWD": MARK,
    "SLURM_JWT": JWT,
    # Innocent names, of which the first ones are in every record of a run's environment.
    "NCCL_IB_HCA": f"hf_{MARK}abcdefghijklmnopqrst",
    "NCCL_NET_PLUGIN": f"https://user:{MARK}@registry.example/plugin.so",
    "CUDA_CACHE_PATH": f"/cache?api_key={MARK}0123",
    "SLURM_JOB_COMMENT": f"weekly, password={MARK}0123",
    "OMP_TOOL": f"sk-proj-{MARK}abcdefghijklmnop",
    "TORCH_LOGS_FORMAT": f"nvapi-{MARK}abcdefghijklmnopqrst",
    "LLMB_NOTE": f"Bearer {MARK}abcdefghijklmnop",
    # Set by the recipes of NVIDIA's GPUs, unless the shell sets it.
    "NCCL_DEBUG": f"glpat-{MARK}abcdefghijklm",
    "NVTE_FLASH_ATTN": f"AKIA{MARK}ABCDEFGHIJKL"[:20],
    "TORCH_NCCL_AVOID_RECORD_STREAMS": f"ghp_{MARK}abcdefghijklmnopqrst",
}
RECIPE = ("-w", "pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--dtype", "bf16")


def written(folder: Path) -> list[str]:
    """Names of all files below ``folder`` with the mark."""
    assert list(folder.rglob("run.json")), "something was written"
    return [str(path) for path in folder.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]


def call(command: str, install: Path, *arguments: str, **more: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments], env={**SHELL, "LLMB_INSTALL": str(install), **more})


@pytest.fixture
def install(tmp_path: Path) -> Path:
    folder = tmp_path / "install"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("submit", (*RECIPE, "--scale", "8", "--yes")),
        ("submit", (*RECIPE, "--scale", "8,16", "--yes")),
        ("launch", ("pretrain_llama3.1", "-s", "8b", "--gpu-type", "h100", "--scale", "8", "--yes")),
        ("submit", ("-w", "finetune_llama3", "-s", "70b", "--dtype", "fp8", "--scale", "8", "--gpu-type", "b200",
                  "--framework", "megatron_bridge", "--yes")),
    ],
    ids=["submit", "campaign", "launch", "megatron_bridge"],
)  # fmt: skip
def test_a_submission_writes_none(
    command: object, arguments: tuple[str, ...], install: Path, program: Callable[[str, str], None], tmp_path: Path
) -> None:
    program("sbatch", f'env >>{tmp_path}/environment; echo "$@" >>{tmp_path}/command; date +%N')
    (install / "cluster_config.yaml").write_text("container: {runtime: pyxis, image: registry.example/llmb:1}\n")
    done = call(command, install, *arguments)
    assert done.exception is None, done.output
    assert written(install) == []
    assert MARK not in done.output
    seen = (tmp_path / "environment").read_text().splitlines()
    assert {line for line in seen if MARK in line} == {f"SLURM_JWT={JWT}"}, "by which Slurm knows the user"
    assert "--export=ALL,SLURM_JWT= " in (tmp_path / "command").read_text()


SECRETS = [
    f"hf_{MARK}abcdefghijklmnopqrst",
    f"sk-{MARK}abcdefghijklmnopqrst",
    f"nvapi-{MARK}abcdefghijklmnopqrst",
    JWT,
    f"https://user:{MARK}@host/path",
    f"password={MARK}0123",
]
GIVEN = [
    *[("--env", f"NCCL_NOTE={secret}") for secret in SECRETS],
    *[("--slurm-arg", f"comment={secret}") for secret in SECRETS],
    ("--env", f"DB_PWD={MARK}"),
    ("--env", f"hf_{MARK}abcdefghijklmnopqrst"),
    ("--slurm-arg", f"auth-token={MARK}"),
    ("--account", f"hf_{MARK}abcdefghijklmnopqrst"),
    ("--framework-arg", f"hf_token={MARK}"),
    ("--framework-arg", f"note=hf_{MARK}abcdefghijklmnopqrst"),
    ("--image", f"docker://user:{MARK}@registry.example/llmb:1"),
]


@pytest.mark.parametrize(("option", "value"), GIVEN)
def test_what_is_given_as_an_option_is_refused_and_not_repeated(
    option: str, value: str, install: Path, program: Callable[[str, str], None]
) -> None:
    program("sbatch", "echo 4711")
    done = call("submit", install, *RECIPE, "--scale", "8", "--yes", option, value)
    assert isinstance(done.exception, UsageError)
    assert MARK not in str(done.exception)
    assert list(install.rglob("*")) == []


@pytest.mark.parametrize(
    "settings",
    [
        f"environment: {{NCCL_NOTE: {SECRETS[0]}}}",
        f"environment: {{DB_PWD: {MARK}}}",
        f"slurm: {{flags: {{comment: '{SECRETS[1]}'}}}}",
        f"slurm: {{srun_flags: {{export-token: '{MARK}'}}}}",
        f"container: {{runtime: pyxis, image: 'docker://user:{MARK}@registry.example/llmb:1'}}",
        f"python: '{SECRETS[2]}'",
    ],
)
def test_settings_of_a_cluster_hold_none(settings: str, install: Path) -> None:
    (install / "cluster_config.yaml").write_text(f"{settings}\n")
    done = call("submit", install, *RECIPE, "--scale", "8", "--yes")
    assert isinstance(done.exception, UsageError)
    assert MARK not in str(done.exception)
    assert [path.name for path in install.iterdir()] == ["cluster_config.yaml"]


def test_files_of_campaigns_and_the_shells_flags_hold_none(install: Path, tmp_path: Path) -> None:
    file = tmp_path / "jobs.txt"
    file.write_text(f"pretrain_llama3.1 8b bf16 8 gpu_type=h100 env.NCCL_NOTE={SECRETS[0]}\n")
    calls = [
        call("bulk", install, str(file), "--yes"),
        call("submit", install, *RECIPE, "--scale", "8", "--yes", ADDITIONAL_SLURM_PARAMS=f"comment={SECRETS[0]}"),
        call("submit", install, *RECIPE, "--scale", "8", "--yes", SBATCH_RESERVATION=SECRETS[1]),
    ]
    for done in calls:
        assert isinstance(done.exception, UsageError)
        assert MARK not in str(done.exception)
    assert list(install.rglob("*")) == []


def test_workers_on_this_machine_get_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries print their environment, such as NCCL with NCCL_DEBUG, and profilers record it."""
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    folder = RunFolder(tmp_path)
    assert run_workers(["env"], {"LLMB_KEPT": "1"}, folder, lambda: None) == 0
    log = folder.log.read_text()
    assert "LLMB_KEPT=1" in log
    assert MARK not in log


@pytest.mark.slow
def test_a_run_on_this_machine_writes_none(install: Path, forked_python: str) -> None:
    options = ["-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1", "--steps", "2"]
    done = subprocess.run(
        [forked_python, "-m", "llmb.cli.main", "run", *options],
        env={**os.environ, **SHELL, "LLMB_INSTALL": str(install)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert written(install) == []
    assert MARK not in done.stdout + done.stderr
