# SPDX-License-Identifier: Apache-2.0
"""The one filter for secrets."""

import pytest
from hypothesis import given, strategies

from llmb.base import secrets
from llmb.base.errors import UsageError
from llmb.base.secrets import has_secret_in_log, holds_secret, without_secrets
from llmb.launch.slurm.client import submitting_environment

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE3MDAwMDAwMDB9.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JWT", "MY_JWT", "HF_TOKEN", "AWS_SESSION_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "WANDB_API_KEY", "NGC_API_KEY", "ngc_api_key", "REGISTRY_AUTH", "HTTP_AUTHORIZATION", "GITLAB_PAT",
        "MYSQL_PWD", "MYPASSWORD", "PGPASSWORD", "SSH_PRIVATE_KEY", "SSH_KEY_PASSPHRASE", "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS", "NVIDIA_AUTH", "DB_PWD", "DBPWD", "HF_TOKEN_2", "dbPassword", "api-key",
        "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN", "hf.token", "HF_TOKENS",
    ],
)  # fmt: skip
def test_a_name_tells_a_secret(name: str) -> None:
    assert holds_secret(name, "x")


@pytest.mark.parametrize(
    "value",
    [
        TOKEN, f"Authorization: Bearer {TOKEN}", "bearer 0123456789abcdef0123", "hf_abcdefghijklmnopqrstuvwxyz",
        "nvapi-abcdefghijklmnopqrst", "https://user:password@registry.example/v2", "http://:password@proxy:3128",
        "https://0123456789abcdef0123@sentry.example/1", "https://bucket.example/o?X-Amz-Signature=0123abcd",
        "host=db user=me password=hunter2", "-Djavax.net.ssl.keyStorePassword=changeit", "glpat-abcdefghijklmnop",
        "sk-proj-abcdefghijklmnopqrst", "sk-ant-api03-abcdefghijklmnopqrst", "glrt-abcdefghijklmnop",
        "Basic abcdefghijkl1234", "npm_abcdefghijklmnopqrstuv", "Basic dXNlcjpwYXNzd29yZA==",
        "x_hf_abcdefghijklmnopqrstuvwxyz", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA",
    ],
)  # fmt: skip
def test_a_value_tells_a_secret_whatever_its_name(value: str) -> None:
    assert holds_secret("HARMLESS", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("PWD", "/home/someone"),
        ("OLDPWD", "/"),
        ("PATH", "/usr/bin"),
        ("PATH", "/data/global-batch-experiments/bin:/opt/glibc-langpack-and-locales/bin"),
        ("MOUNTS", "/data/hf_checkpoints_of_llama3_8b:/models"),
        ("NCCL_IB_PKEY", "0x8001"),
        ("MONKEYS", "1"),
        ("KEYBOARD", "us"),
        ("AUTHOR", "someone"),
        ("PROXY", "http://proxy:3128"),
        ("REPOSITORY", "git@example.com:group/project.git"),
        ("MAX_TOKENS", "1000"),
        ("comment", "basic benchmark of the cluster"),
        ("comment", "a basic configuration of the cluster"),
        ("BASH_FUNC_module%%", '() {  eval $(key=$1 lmod bash token=abcdef "$@") }'),
        ("PROXY", "http://me@proxy.example:3128"),
        ("SLURM_JOB_NODELIST", "node[001-128]"),
        ("IMAGE", "docker://registry.example:5000/group/image:1.0"),
    ],
)
def test_settings_are_no_secrets(name: str, value: str) -> None:
    assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize(
    "line",
    [
        "password='hunter2'", 'PASSWORD="hunter2"', "password: hunter2", "Password : 'hunter2'", "db_pwd = x1",
        '{"api_key": "x1", "user": "me"}', "{'hf.token': 'abcd'}",
        '\\"secret\\": \\"abcd\\"', '  "wandb_api_key": "x",',
        "curl --api-key x https://host", "run --hf-token abcd -n 2", "run --password 'a b'", "tool -token=abcd",
        "X-Api-Key: abcd", "Authorization: token abcd", "Cookie: session=abcd", "Private-Token: abcd",
        "> Proxy-Authorization: Digest abcd", "password: 12345678", "env HF_TOKEN=abcd python train.py",
        "headers={'x-api-key': b'abcd'}", "key=abcd1234", f"got {TOKEN}",
    ],
)  # fmt: skip
def test_a_line_of_a_log_tells_a_secret(line: str) -> None:
    assert has_secret_in_log(line)


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 2.1, 'mean_token_accuracy': 0.6312, 'num_input_tokens_seen': 8192, 'epoch': 0.1}",
        "step 5, tokens: 1.2M, tokens_per_s: 12345.6, token_rate: 3.1k/s", "eos_token_id: 128001, max_tokens=4096",
        "bos_token: <s>, pad_token='[PAD]', eos_token=\"</s>\"", '"hub_token": null, "push_to_hub_token": None',
        "forward pass: 12.1 ms", "Missing key: model.layers.0", "sig=9", "--max-tokens 4096 --pad-token '<pad>'",
        "node7:4001:4123 [3] NCCL INFO Using network IB", "tokenizer: meta-llama/Llama-3.1-8B", "password: $PASSWORD",
        " iteration 10/ 50 | elapsed time per iteration (ms): 2010.0 | lm loss: 1.1E+01 |", "token: *****",
    ],
)  # fmt: skip
def test_a_line_of_a_log_that_counts_tokens_tells_none(line: str) -> None:
    assert not has_secret_in_log(line)


@given(strategies.from_regex(secrets._BY_VALUE))
def test_what_is_looked_for_first_is_in_every_secret(text: str) -> None:
    assert secrets.has_secret(text, settings=False)


@given(strategies.from_regex(secrets._BY_NAME))
def test_what_is_looked_for_first_is_in_every_name(name: str) -> None:
    assert any(part in name.casefold() for part in secrets._PARTS_OF_NAMES)


def test_sbatch_alone_gets_the_token_by_which_slurm_knows_the_user() -> None:
    environ = {"SLURM_JWT": TOKEN, "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "7", "HF_TOKEN": "x", "HOME": "/h"}
    kept = {"SLURM_JWT": TOKEN, "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert submitting_environment(environ) == kept


def test_messages_do_not_repeat_a_secret() -> None:
    where, do = f"https://me:{TOKEN}@host", "unset nvapi-abcdefghijklmnopqrst"
    error = UsageError(f"unknown key '{TOKEN}'", where=where, do=do)
    assert str(error) == "unknown key '[secret]'\n  where: https://[secret]@host\n  do:    unset [secret]"


@pytest.mark.parametrize(
    "part",
    [
        "a=", "A", "a-", "x.", "eyJ-", "://", "https://a", "bearer ", "hf_", "basic AAAA", "SG.-", "-", "--a ", 'a: "',
        "key: ", "token='",
    ],
)  # fmt: skip
def test_a_long_text_takes_no_longer_than_its_length(part: str) -> None:
    """Of anything that grew with the square, this test would see minutes."""
    text = part * 20_000
    holds_secret("X", text)
    has_secret_in_log(text)
    assert len(UsageError(text).what) >= len("[secret]")
