# SPDX-License-Identifier: Apache-2.0
"""The one filter for secrets."""

import pytest

from llmb.runs.secrets import holds_secret, without_secrets
from llmb.schedulers.slurm.client import submitting_environment

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE3MDAwMDAwMDB9.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JWT", "MY_JWT", "HF_TOKEN", "AWS_SESSION_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "WANDB_API_KEY", "NGC_API_KEY", "ngc_api_key", "REGISTRY_AUTH", "HTTP_AUTHORIZATION", "GITLAB_PAT",
        "MYSQL_PWD", "MYPASSWORD", "PGPASSWORD", "SSH_PRIVATE_KEY", "SSH_KEY_PASSPHRASE", "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ],
)  # fmt: skip
def test_a_name_tells_a_secret(name: str) -> None:
    assert holds_secret(name, "x")


@pytest.mark.parametrize(
    "value",
    [
        TOKEN,
        f"Authorization: Bearer {TOKEN}",
        "bearer 0123456789abcdef0123",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "nvapi-abcdefghijklmnopqrst",
        "https://user:password@registry.example/v2",
        "http://:password@proxy:3128",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA",
    ],
)
def test_a_value_tells_a_secret_whatever_its_name(value: str) -> None:
    assert holds_secret("HARMLESS", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("PWD", "/home/someone"),
        ("OLDPWD", "/"),
        ("PATH", "/usr/bin"),
        ("NCCL_IB_PKEY", "0x8001"),
        ("MONKEYS", "1"),
        ("KEYBOARD", "us"),
        ("AUTHOR", "someone"),
        ("PROXY", "http://proxy:3128"),
        ("REPOSITORY", "git@example.com:group/project.git"),
        ("IMAGE", "docker://registry.example:5000/group/image:1.0"),
    ],
)
def test_settings_are_no_secrets(name: str, value: str) -> None:
    assert without_secrets({name: value}) == {name: value}


def test_sbatch_alone_gets_the_token_by_which_slurm_knows_the_user() -> None:
    environ = {"SLURM_JWT": TOKEN, "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "7", "HF_TOKEN": "x", "HOME": "/h"}
    kept = {"SLURM_JWT": TOKEN, "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert submitting_environment(environ) == kept
