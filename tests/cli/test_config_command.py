# SPDX-License-Identifier: Apache-2.0
"""``llmb config``: what holds and where it comes from, changes of single values, and one root for every command."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from called_here import Run
from small_suite import small_suite

SITE = """\
# third floor
gpu_type: h100
fabric: infiniband
environment: {NCCL_IB_HCA: mlx5}
slurm:
  account: research   # ask Anna
  partition: hopper
  partitions:
    blackwell: {gpu_type: b200, gpu_request: gres}
workloads:
  pretrain_llama3.1:
    environment: {NCCL_DEBUG: WARN}
"""
TOKEN = "hf_0123456789abcdefghijABCDEFGHIJ0123"


@pytest.fixture
def install(tmp_path: Path) -> Path:
    folder = tmp_path / "install"
    folder.mkdir()
    (folder / "cluster_config.yaml").write_text(SITE)
    return folder


def shown(done: "subprocess.CompletedProcess[str]") -> dict[str, tuple[Any, str, str]]:
    """Value, source and place by setting and variable."""
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    settings = [document["install_root"], *document["settings"], *document["variables"]]
    return {item["key"]: (item["value"], item["source"], item["place"]) for item in settings}


def test_every_value_has_its_source(llmb: Run, install: Path, tmp_path: Path) -> None:
    assert llmb("config", "set", "--user", "slurm.account", "physics").returncode == 0
    assert llmb("config", "set", "--user", "slurm.retries", "2").returncode == 0
    mine = tmp_path / ".config" / "llmb" / "config.yaml"
    line = mine.read_text().splitlines().index("  account: physics") + 1
    shell = {"SBATCH_QOS": "high", "NCCL_NVLS_ENABLE": "1", "ADDITIONAL_SLURM_PARAMS": "exclusive", "HF_TOKEN": TOKEN}
    done = llmb("config", "show", "-w", "pretrain_llama3.1", "-s", "8b", "--json", **shell)
    found = shown(done)
    assert TOKEN not in done.stdout + done.stderr
    assert found["install_root"] == (str(install), "shell", "LLMB_INSTALL")
    assert found["gpu_type"] == ("h100", "cluster", "cluster_config.yaml:2")
    assert found["slurm.account"] == ("physics", "user", f"{mine}:{line}")
    assert found["slurm.retries"][:2] == (2, "user")
    assert found["slurm.partition"] == ("hopper", "cluster", "cluster_config.yaml:7")
    assert found["slurm.flags.qos"] == ("high", "shell", "SBATCH_QOS")
    assert found["slurm.flags.exclusive"] == (True, "shell", "ADDITIONAL_SLURM_PARAMS")
    assert found["slurm.gpus_per_node"] == (8, "catalogue", "GPU type h100")
    assert found["slurm.start"] == ("torchrun", "llmb", "default")
    assert found["slurm.flags.time"][:2] == ("30 minutes", "catalogue")
    assert found["NCCL_NET"][:2] == ("IB", "catalogue")
    assert found["NCCL_NET"][2].startswith("fabric infiniband: ")
    assert found["NCCL_NVLS_ENABLE"] == ("1", "shell", "NCCL_NVLS_ENABLE")
    assert found["NCCL_IB_HCA"] == ("mlx5", "cluster", "cluster_config.yaml:4")
    assert found["NCCL_DEBUG"] == ("WARN", "cluster", "cluster_config.yaml:12")


def test_a_partition_shows_what_its_jobs_get(llmb: Run) -> None:
    found = shown(llmb("config", "show", "-p", "blackwell", "--json"))
    assert found["slurm.partition"] == ("blackwell", "option", "--partition")
    assert found["gpu_type"] == ("b200", "cluster", "cluster_config.yaml:9")
    assert found["slurm.gpu_request"] == ("gres", "cluster", "cluster_config.yaml:9")
    found = shown(llmb("config", "show", "-w", "pretrain_llama3.1", "--json", TIME_LIMIT="1:00:00"))
    assert found["slurm.flags.time"] == ("1:00:00", "shell", "TIME_LIMIT")
    found = shown(llmb("config", "show", "--json", SBATCH_PARTITION="blackwell", SBATCH_GPUS_PER_NODE="null"))
    assert found["slurm.gpu_request"] == ("none", "shell", "SBATCH_GPUS_PER_NODE")
    assert found["gpu_type"][0] == "b200"


def test_a_job_gets_what_is_shown(llmb: Run) -> None:
    """The user's defaults are above the cluster's, and below the shell's variables."""
    llmb("config", "set", "--user", "slurm.account", "physics")
    llmb("config", "set", "--user", "slurm.flags.qos", "long")
    command = ("submit", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "16", "--dry-run")
    script = llmb(*command).stdout
    assert "#SBATCH --account=physics\n" in script
    assert "#SBATCH --partition=hopper\n" in script
    assert "#SBATCH --qos=long\n" in script
    assert "#SBATCH --account=mine\n" in llmb(*command, SBATCH_ACCOUNT="mine").stdout


def test_a_user_may_have_a_root_of_installation(llmb: Run, tmp_path: Path) -> None:
    llmb("config", "set", "--user", "install_root", str(tmp_path / "elsewhere"))
    found = shown(llmb("config", "show", "--json", LLMB_INSTALL=""))
    assert found["install_root"][:2] == (str(tmp_path / "elsewhere"), "user")
    done = llmb("runs", "--json", LLMB_INSTALL="")
    assert f"install root: {tmp_path / 'elsewhere'}" in done.stderr
    assert shown(llmb("config", "show", "--json"))["install_root"][1] == "shell"


def test_what_is_set_and_unset_leaves_the_rest(llmb: Run, install: Path) -> None:
    path = install / "cluster_config.yaml"
    assert llmb("config", "set", "slurm.partition", "batch").returncode == 0
    assert path.read_text() == SITE.replace("partition: hopper", "partition: batch")
    assert llmb("config", "set", "workloads.pretrain_llama3.1.environment.NCCL_DEBUG", "INFO").returncode == 0
    assert path.read_text() == SITE.replace("partition: hopper", "partition: batch").replace("WARN", "INFO")
    assert llmb("config", "unset", "slurm.account").returncode == 0
    assert "ask Anna" not in path.read_text()
    assert "# third floor" in path.read_text()
    assert llmb("config", "set", "slurm.account", "0123").returncode == 0
    assert shown(llmb("config", "show", "--json"))["slurm.account"][0] == "0123"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "slurm.acount", "x"), "did you mean 'slurm.account'?"),
        (("set", "vboost", "9"), "vboost cannot be '9'"),
        (("set", "environment.HF_TOKEN", TOKEN), "looks like a secret"),
        (("set", "environment.X", TOKEN), "looks like a secret"),
        (("set", "--user", "environment.X", "y"), "environment.X is a setting of the cluster"),
        (("set", "install_root", "/x"), "add --user"),
        (("set", "slurm.qos", "high"), "use slurm.flags.qos or slurm.srun_flags.qos, which accepts"),
        (("unset", "slurm.flags.qos"), "slurm.flags.qos is not set in this file"),
        (("set", "container.runtime", "pyxis"), "llmb config set container '{runtime: pyxis, image: IMAGE}'"),
    ],
)
def test_what_cannot_be_written_is_refused(llmb: Run, install: Path, arguments: tuple[str, ...], words: str) -> None:
    done = llmb("config", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert TOKEN not in done.stderr
    assert (install / "cluster_config.yaml").read_text() == SITE


@pytest.mark.parametrize(
    ("content", "commands", "words"),
    [
        (
            b"gpu_type: h100\nslurm: [\n",
            ("show", "set gpu_type b200", "migrate"),
            "cluster_config.yaml cannot be used:\n  {path}:3: not valid YAML",
        ),
        # YAML would take the second block alone, and jobs would lose their account.
        (
            b"slurm:\n  account: a\nslurm:\n  partition: b\n",
            ("show", "set slurm.partition c"),
            "cluster_config.yaml:3: duplicate key 'slurm'",
        ),
        ("gpu_type: h100\n".encode("utf-16"), ("set slurm.account a",), "it is not UTF-8"),
        # And not: the account cannot be 'a'.
        (b"vboost: 99\n", ("set slurm.account a",), "cluster_config.yaml cannot be used:"),
        (
            b"environment: &all {A: b}\nworkloads:\n  w:\n    environment: *all\n",
            ("set workloads.w.environment.A c",),
            "workloads.w.environment.A is written in this file in a form that llmb cannot edit",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_with_its_place_and_stays(
    llmb: Run, install: Path, content: bytes, commands: tuple[str, ...], words: str
) -> None:
    path = install / "cluster_config.yaml"
    path.write_bytes(content)
    for command in commands:
        done = llmb("config", *command.split())
        assert done.returncode == 2
        assert words.format(path=path) in done.stderr
        assert "slurm.account" not in done.stderr
    assert path.read_bytes() == content


def test_a_cpu_has_the_variables_of_what_it_can_run(llmb: Run) -> None:
    assert llmb("config", "set", "gpu_type", "cpu").returncode == 0
    assert llmb("config", "show", "-w", "pretrain_llama3.1").returncode == 0


def test_a_file_of_the_reference_suite_is_shown_and_not_edited(llmb: Run, install: Path) -> None:
    text = f"schema_version: 2\ngpu_type: b200\nenvironment: {{HF_TOKEN: {TOKEN}}}\nslurm: {{account: a}}\n"
    (install / "cluster_config.yaml").write_text(text)
    done = llmb("config", "show", "--json")
    assert shown(done)["slurm.account"] == ("a", "cluster", "cluster_config.yaml (schema_version 2)")
    assert json.loads(done.stdout)["files"][0]["reference_form"] == "schema_version 2"
    assert "HF_TOKEN" in llmb("config", "show").stderr
    assert TOKEN not in done.stdout + done.stderr
    refused = llmb("config", "set", "slurm.account", "b")
    assert refused.returncode == 2
    assert "llmb config migrate" in refused.stderr
    assert (install / "cluster_config.yaml").read_text() == text


def test_an_invalid_default_of_the_user_is_reported_with_its_line(llmb: Run, tmp_path: Path) -> None:
    path = tmp_path / ".config" / "llmb" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("slurm:\n  acount: x\n")
    done = llmb("config", "show")
    assert done.returncode == 2
    assert f"{path}:2: slurm.acount: unknown key" in done.stderr


@pytest.mark.parametrize("text", ["10:00:00", "1:30", "3.10", "010", "1_000"])
def test_a_value_stays_as_it_is_written(llmb: Run, install: Path, text: str) -> None:
    """YAML 1.1 reads 10:00:00 as 36000, which Slurm takes for minutes."""
    flag = "time" if ":" in text else "comment"
    assert llmb("config", "set", f"slurm.flags.{flag}", text).returncode == 0
    with (install / "cluster_config.yaml").open("a") as stream:
        stream.write(f"vboost: 1\nbinding: {{cpu: 4}}\ncluster_name: {text}\n")
    done = llmb("config", "show", "--json")
    found = shown(done)
    assert (found[f"slurm.flags.{flag}"][0], found["cluster_name"][0]) == (text, text)
    assert (found["vboost"][0], found["binding.cpu"][0]) == (1, 4)


def test_the_ends_of_lines_stay(llmb: Run, install: Path) -> None:
    file = install / "cluster_config.yaml"
    file.write_bytes(b"gpu_type: h100\r\nslurm:\r\n  account: a # x\r\n")
    assert llmb("config", "set", "slurm.partition", "batch").returncode == 0
    assert file.read_bytes() == b"gpu_type: h100\r\nslurm:\r\n  account: a # x\r\n  partition: batch\r\n"
    assert llmb("config", "unset", "slurm.account").returncode == 0
    assert file.read_bytes() == b"gpu_type: h100\r\nslurm:\r\n  partition: batch\r\n"


@pytest.mark.parametrize("key", ["gpu_type", "slurm.partitions.blackwell.gpu_type"])
@pytest.mark.parametrize(("value", "hint"), [("b20", "; did you mean 'b200'?"), ("zz", "")])
def test_a_misspelled_gpu_type_is_named_with_its_key(llmb: Run, key: str, value: str, hint: str) -> None:
    """Jobs for b200 went to the default partition where the other one was said to have b20."""
    assert llmb("config", "set", key, value).returncode == 0
    done = llmb("submit", "-w", "pretrain_llama3.1", "-s", "405b", "--scale", "512", "--gpu-type", "h100", "--dry-run")
    assert done.returncode == 2
    assert f"unknown GPU type '{value}'{hint}\n" in done.stderr
    assert f"run 'llmb config set {key} TYPE', with --user if" in done.stderr


def test_variables_of_an_unknown_workload_are_reported(llmb: Run) -> None:
    assert llmb("config", "set", "workloads.pretrain_lama3.1.environment.A", "1").returncode == 0
    done = llmb("submit", "-w", "pretrain_llama3.1", "-s", "405b", "--scale", "512", "--dry-run")
    what = "workloads.pretrain_lama3.1: there is no such workload; did you mean 'pretrain_llama3.1'?"
    assert (done.returncode, what in done.stderr) == (0, True)


def test_a_root_that_depends_on_the_folder_is_refused(llmb: Run, tmp_path: Path) -> None:
    assert llmb("config", "set", "--user", "install_root", "bench").returncode == 2
    assert llmb("config", "set", "--user", "install_root", "~/bench").returncode == 0
    (tmp_path / ".config" / "llmb" / "config.yaml").write_text("install_root: bench\n")
    assert llmb("config", "show", LLMB_INSTALL="").returncode == 2


def test_a_checkout_of_the_reference_suite_is_checked_file_by_file(llmb: Run, tmp_path: Path) -> None:
    suite = small_suite(tmp_path / "s", tmp_path / "r", ("finetune_llama3", "70b", "25.12"), "", programs=False)
    check = ("config", "check", "--suite", str(suite.checkout))
    done = llmb(*check, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["tag"], found["as_released"]) == (6, "v25.12", False)
    launch = next(item for item in found["files"] if item["file"] == "llama3/finetune/launch.sh")
    assert (launch["state"], "FP8_RECIPE is no longer read (line 81)" in launch["differs"]) == ("modified", True)
    assert "line 41 was 'export FW_VERSION=25.09.00' and is now 'nothing'" in llmb(*check).stdout
    unknown = llmb(*check, "--release", "25.13")
    assert (unknown.returncode, "24.11, 25.04, 25.07, 25.12" in unknown.stderr) == (2, True)
    (suite.checkout / launch["file"]).unlink()
    os.mkfifo(suite.checkout / launch["file"])
    piped = json.loads(llmb(*check, "--json").stdout)["files"]
    assert [item["state"] for item in piped if item["file"] == launch["file"]] == ["missing"]
    other = llmb("config", "check", "--suite", str(tmp_path))
    assert (other.returncode, "this is not a checkout of the reference suite" in other.stderr) == (2, True)


TINY = ("-w", "pretrain_llama3.1", "-s", "tiny")
COMMANDS = [
    ("run", (*TINY, "--dry-run")),
    ("submit", (*TINY, "--scale", "1", "--dry-run")),
    ("submit", (*TINY, "--scale", "1,2", "--dry-run")),
    ("launch", ("pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--dry-run")),
    ("bulk", ("JOBS", "--dry-run")),
    ("result", ("4711",)),
    ("parse", ()),
    *(("jobs", (name, *more)) for name, more in (
        ("list", ()), ("show", ("4711",)), ("log", ("4711",)), ("wait", ("4711",)), ("cancel", ("4711",)),
        ("refresh", ()), ("rebuild", ()), ("nodes", ()),
    )),
]  # fmt: skip
NAMES = [f"{command} {' '.join(words[:1])}" for command, words in COMMANDS]


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=NAMES)
def test_each_command_prints_the_same_root(
    command: str, words: tuple[str, ...], llmb: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = tmp_path / "stage"
    (stage / "workloads").mkdir(parents=True)
    (stage / "cluster_config.yaml").write_text("gpu_type: cpu\n")
    told = f"llmb: install root: {stage} (STAGE_PATH)\n"
    (tmp_path / "jobs.txt").write_text("pretrain_llama3.1 tiny fp32 1\n")
    arguments = [str(tmp_path / "jobs.txt") if word == "JOBS" else word for word in words]
    call = partial(llmb, command, *arguments, HOME=str(tmp_path / "home"))
    done = call(LLMB_INSTALL="", STAGE_PATH=str(stage))
    assert done.stderr.count("install root") == done.stderr.count(told) == 1
    assert "--chdir=" not in done.stdout or f"--chdir={stage}/" in done.stdout
    by_default = call(LLMB_INSTALL="")
    assert "install root" not in by_default.stderr
    monkeypatch.chdir(stage)
    assert f"{stage} (cluster_config.yaml)" in call(LLMB_INSTALL="").stderr
    both = call(STAGE_PATH=str(stage), LLMB_INSTALL="/elsewhere", code=2)
    assert f"LLMB_INSTALL is '/elsewhere', but STAGE_PATH is '{stage}'" in both.stderr
