# SPDX-License-Identifier: Apache-2.0
"""Every command line of the five reference documents, by document and line, and what llmb makes of it.

A launch script is ``llmb launch`` with the workload's name: variables before it and sbatch's options stay as they are.
Likewise ``download_ckpt_dataset.sh`` is ``llmb prepare submit``; ``parse_train_timing.sh`` is ``llmb parse``, and
``setup.sh`` is ``llmb install``. Of a template, such as ``DTYPE=<fp8,bf16>``, the first and the last values are tried.
Left out are lines for the shell alone (``cd``, ``conda``, ``python3 -m venv``, ``wget``), and grep, which
test_documented_paths.py runs.
"""

import csv
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import pytest
from documented_launch import launched
from typer.testing import CliRunner, Result

from llmb.base.errors import LlmbError
from llmb.cli.main import app
from llmb.launch.documents.variables import documented_variables
from llmb.readers.logs.step_line import format_step_line

SLURM = {"SBATCH_ACCOUNT": "account_name", "SBATCH_PARTITION": "batch"}
EVERY_JOB = {"ntasks-per-node", "output", "open-mode", "chdir", "exclusive", "mem", "no-requeue"}
"""Flags that do not depend on the command line."""
COMMANDS = {"parse_train_timing.sh": "parse"}


@dataclass(frozen=True)
class Document:
    """``shell`` holds what its export lines set, below the install root ``$ROOT``."""

    workload: str
    shell: Mapping[str, str]
    config: str = ""


LLAMA, NEMOTRON, OLD = "25.04 Llama 3.1", "25.04 Nemotron4", "24.11 Llama 3.1 405b"
MAVERICK, LORA = "25.07 Llama 4 Maverick", "25.12 Llama 3 LoRA"
INSTALLED = {"HF_TOKEN": "hf_token", "LLMB_INSTALL": "$ROOT", "LLMB_WORKLOAD": "$ROOT/workload", **SLURM}
PYXIS = "container: {runtime: pyxis, image: /images/llmb.sqsh}\n"
OLD_SHELL = {"SLURM_PARTITION": "batch", "SLURM_ACCOUNT": "account_name", "SLURM_GPUS_PER_NODE": "null"}
DOCUMENTS = {
    OLD: Document("pretrain_llama3.1", {"STAGE_PATH": "$ROOT", **OLD_SHELL, "HF_TOKEN": "hf_token"}),  # lines 91-99
    LLAMA: Document("pretrain_llama3.1", {"STAGE_PATH": "$ROOT", "HF_TOKEN": "hf_token", **SLURM}),  # 97-106
    NEMOTRON: Document("pretrain_nemotron4", {"STAGE_PATH": "$ROOT", **SLURM}),  # 112-123
    MAVERICK: Document("finetune_llama4-maverick", {**INSTALLED, "LLMB_REPO": "$ROOT"}, "gpu_type: h100\n"),  # 362-367
    LORA: Document("finetune_llama3", INSTALLED, f"gpu_type: b200\n{PYXIS}"),  # 365-370
}
SBATCH = "sbatch -A ${SLURM_ACCOUNT} -p ${SLURM_PARTITION}"
HOUR, HALF, QUARTER = "time=01:00:00", "time=00:30:00", "time=00:15:00"

# Document, line, command, name of the job, and the flags of sbatch besides those of every job.
REQUESTED = (
    (OLD, 116, f"DTYPE=fp8 MODEL_SIZE=405b {SBATCH} -N 72 ./launch.sh",
     "pretrain_llama3.1_405b_fp8_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100", f"nodes=72 {HOUR}"),
    (OLD, 116, f"DTYPE=bf16 MODEL_SIZE=405b {SBATCH} -N 4 ./launch.sh",
     "pretrain_llama3.1_405b_bf16_gpus32_tp8_pp1_cp2_vp1_ep1_mbs1_gbs126_h100_proxy7of126", f"nodes=4 {HOUR}"),
    (OLD, 116, f"DTYPE=bf16 MODEL_SIZE=405b {SBATCH} -N 24 ./launch.sh",
     "pretrain_llama3.1_405b_bf16_gpus192_tp8_pp3_cp2_vp7_ep1_mbs1_gbs252_h100_proxy42of126", f"nodes=24 {HOUR}"),
    (OLD, 122, "NUM_NODES=72 DTYPE=fp8 MODEL_SIZE=405b ./launch.sh",
     "pretrain_llama3.1_405b_fp8_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100", f"nodes=72 {HOUR}"),
    (OLD, 124, f"DTYPE=fp8 MODEL_SIZE=405b {SBATCH} --gres=gpu:8 -N 72 ./launch.sh",
     "pretrain_llama3.1_405b_fp8_gpus576_tp8_pp9_cp2_vp7_ep1_mbs1_gbs252_h100", f"gres=gpu:8 nodes=72 {HOUR}"),
    (OLD, 134, f"DTYPE=fp8 MODEL_SIZE=405b {SBATCH} -N 216 ./launch.sh",
     "pretrain_llama3.1_405b_fp8_gpus1728_tp8_pp9_cp2_vp7_ep1_mbs1_gbs756_h100", f"nodes=216 {HOUR}"),
    (LLAMA, 139, "DTYPE=fp8 MODEL_SIZE=8b JOB_TOTAL_GPUS=8 GPUS_PER_NODE=2 ./launch.sh",
     "pretrain_llama3.1_8b_fp8_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128_h100", f"gpus-per-node=2 nodes=4 {HALF}"),
    (LLAMA, 139, "DTYPE=fp8 MODEL_SIZE=70b JOB_TOTAL_GPUS=64 GPUS_PER_NODE=4 ./launch.sh",
     "pretrain_llama3.1_70b_fp8_gpus64_tp4_pp8_cp1_vp5_ep1_mbs1_gbs128_h100", f"gpus-per-node=4 nodes=16 {HALF}"),
    (LLAMA, 139, "DTYPE=bf16 MODEL_SIZE=405b JOB_TOTAL_GPUS=2048 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_405b_bf16_gpus2048_tp8_pp8_cp2_vp8_ep1_mbs1_gbs1024_h100", f"gpus-per-node=8 nodes=256 {HALF}"),
    (LLAMA, 151, "DTYPE=bf16 MODEL_SIZE=8b JOB_TOTAL_GPUS=8 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_8b_bf16_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128_h100", f"gpus-per-node=8 nodes=1 {HALF}"),
    (LLAMA, 161, "ENABLE_PROFILE=true DTYPE=fp8 MODEL_SIZE=70b JOB_TOTAL_GPUS=256 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_70b_fp8_gpus256_tp4_pp8_cp1_vp5_ep1_mbs1_gbs512_h100_nsys", f"gpus-per-node=8 nodes=32 {HALF}"),
    (LLAMA, 170, "ENABLE_NCCLTRACE=true DTYPE=fp8 MODEL_SIZE=8b JOB_TOTAL_GPUS=8 GPUS_PER_NODE=2 ./launch.sh",
     "pretrain_llama3.1_8b_fp8_gpus8_tp1_pp1_cp2_vp1_ep1_mbs1_gbs128_h100_nccltrace",
     f"gpus-per-node=2 nodes=4 {HALF}"),
    (LLAMA, 170, "ENABLE_NCCLTRACE=true DTYPE=bf16 MODEL_SIZE=405b JOB_TOTAL_GPUS=2048 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_405b_bf16_gpus2048_tp8_pp8_cp2_vp8_ep1_mbs1_gbs1024_h100_nccltrace",
     f"gpus-per-node=8 nodes=256 {HALF}"),
    (LLAMA, 174, "ENABLE_NCCLTRACE=true DTYPE=fp8 MODEL_SIZE=8b JOB_TOTAL_GPUS=16 ./launch.sh",
     "pretrain_llama3.1_8b_fp8_gpus16_tp1_pp1_cp2_vp1_ep1_mbs1_gbs256_h100_nccltrace",
     f"gpus-per-node=8 nodes=2 {HALF}"),
    (LLAMA, 189, "ENABLE_CHECKPOINT=true DTYPE=fp8 MODEL_SIZE=8b JOB_TOTAL_GPUS=16 GPUS_PER_NODE=2 ./launch.sh",
     "pretrain_llama3.1_8b_fp8_gpus16_tp1_pp1_cp2_vp1_ep1_mbs1_gbs256_h100", f"gpus-per-node=2 nodes=8 {HALF}"),
    (LLAMA, 189, "ENABLE_CHECKPOINT=true DTYPE=bf16 MODEL_SIZE=405b JOB_TOTAL_GPUS=2048 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_405b_bf16_gpus2048_tp8_pp8_cp2_vp8_ep1_mbs1_gbs1024_h100", f"gpus-per-node=8 nodes=256 {HALF}"),
    # The variable of line 209 is alone on its line, so that this command does not have it.
    (LLAMA, 210, "DTYPE=bf16 MODEL_SIZE=8b JOB_TOTAL_GPUS=16 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_llama3.1_8b_bf16_gpus16_tp1_pp1_cp2_vp1_ep1_mbs1_gbs256_h100", f"gpus-per-node=8 nodes=2 {HALF}"),
    (NEMOTRON, 198, "DTYPE=fp8 MODEL_SIZE=15b JOB_TOTAL_GPUS=16 GPUS_PER_NODE=2 ./launch.sh",
     "pretrain_nemotron4_15b_fp8_gpus16_tp2_pp1_cp1_vp1_ep1_mbs2_gbs64_h100", f"gpus-per-node=2 nodes=8 {HALF}"),
    (NEMOTRON, 198, "DTYPE=bf16 MODEL_SIZE=340b JOB_TOTAL_GPUS=2048 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_nemotron4_340b_bf16_gpus2048_tp8_pp8_cp1_vp12_ep1_mbs1_gbs512_h100",
     f"gpus-per-node=8 nodes=256 {HALF}"),
    (NEMOTRON, 207, "DTYPE=bf16 MODEL_SIZE=15b JOB_TOTAL_GPUS=16 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_nemotron4_15b_bf16_gpus16_tp2_pp1_cp1_vp1_ep1_mbs2_gbs64_h100", f"gpus-per-node=8 nodes=2 {HALF}"),
    (NEMOTRON, 228, "ENABLE_PROFILE=true DTYPE=bf16 MODEL_SIZE=15b JOB_TOTAL_GPUS=16 ./launch.sh",
     "pretrain_nemotron4_15b_bf16_gpus16_tp2_pp1_cp1_vp1_ep1_mbs2_gbs64_h100_nsys", f"gpus-per-node=8 nodes=2 {HALF}"),
    (NEMOTRON, 274, "ENABLE_CHECKPOINT=true DTYPE=fp8 MODEL_SIZE=15b JOB_TOTAL_GPUS=16 GPUS_PER_NODE=2 ./launch.sh",
     "pretrain_nemotron4_15b_fp8_gpus16_tp2_pp1_cp1_vp1_ep1_mbs2_gbs64_h100", f"gpus-per-node=2 nodes=8 {HALF}"),
    (NEMOTRON, 274, "ENABLE_CHECKPOINT=true DTYPE=bf16 MODEL_SIZE=340b JOB_TOTAL_GPUS=2048 GPUS_PER_NODE=8 ./launch.sh",
     "pretrain_nemotron4_340b_bf16_gpus2048_tp8_pp8_cp1_vp12_ep1_mbs1_gbs512_h100",
     f"gpus-per-node=8 nodes=256 {HALF}"),
    (MAVERICK, 145, "llmb-run single -w finetune_llama4-maverick -s 400b --dtype fp8 --scale 256",
     "sft_llama4-maverick_400b_fp8_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_h100",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 148, "llmb-run single -w finetune_llama4-maverick -s 400b --dtype bf16 --scale 256",
     "sft_llama4-maverick_400b_bf16_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_h100",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 164, "JOB_TOTAL_GPUS=256 GPU_TYPE=h100 ./launch.sh",
     "sft_llama4-maverick_400b_bf16_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_h100",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 164, "JOB_TOTAL_GPUS=256 GPU_TYPE=b200 DTYPE=fp8 MODEL_SIZE=400b ./launch.sh",
     "sft_llama4-maverick_400b_fp8_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_b200",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 186, "JOB_TOTAL_GPUS=256 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh",
     "sft_llama4-maverick_400b_bf16_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_b200",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 191, "JOB_TOTAL_GPUS=256 DTYPE=fp8 GPU_TYPE=b200 ./launch.sh",
     "sft_llama4-maverick_400b_fp8_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_b200",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 196, "JOB_TOTAL_GPUS=256 DTYPE=fp8 GPU_TYPE=h100 ./launch.sh",
     "sft_llama4-maverick_400b_fp8_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_h100",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 235, "ENABLE_PROFILE=true JOB_TOTAL_GPUS=256 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh",
     "sft_llama4-maverick_400b_bf16_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_b200_nsys",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (MAVERICK, 272, "ENABLE_NCCLTRACE=true JOB_TOTAL_GPUS=256 DTYPE=fp8 GPU_TYPE=b200 ./launch.sh",
     "sft_llama4-maverick_400b_fp8_gpus256_tp8_pp1_cp1_vp1_ep32_etp8_mbs1_gbs32_b200_nccltrace",
     f"gpus-per-node=8 nodes=32 {QUARTER}"),
    (LORA, 274, "ENABLE_PROFILE=true JOB_TOTAL_GPUS=8 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh",
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200_nsys",
     f"gpus-per-node=8 nodes=1 {QUARTER}"),
)  # fmt: skip

# What Slurm is asked for, of the engine and with --framework megatron_bridge.
LORA_LINES = (
    (163, "llmb-run submit -w finetune_llama3 -s 70b --dtype fp8 --scale 8",
     "lora_llama3_70b_fp8_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200", f"gpus-per-node=8 nodes=1 {QUARTER}"),
    (166, "llmb-run submit -w finetune_llama3 -s 70b --dtype bf16 --scale 8",
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200", f"gpus-per-node=8 nodes=1 {QUARTER}"),
    (182, "JOB_TOTAL_GPUS=8 GPU_TYPE=gb200 DTYPE=bf16 MODEL_SIZE=70b ADDITIONAL_SLURM_PARAMS='gres=gpu:4' ./launch.sh",
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs64_gb200", f"gres=gpu:4 nodes=2 segment=2 {QUARTER}"),
    (202, "JOB_TOTAL_GPUS=16 GPU_TYPE=b200 ADDITIONAL_SLURM_PARAMS='nodelist=node001,node002;constraint=gpu' "
     "./launch.sh",
     "lora_llama3_70b_bf16_gpus16_tp1_pp4_cp1_vp20_ep1_mbs1_gbs64_b200",
     f"constraint=gpu gpus-per-node=8 nodelist=node001,node002 nodes=2 {QUARTER}"),
    (208, "JOB_TOTAL_GPUS=8 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh",
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200", f"gpus-per-node=8 nodes=1 {QUARTER}"),
    (213, "JOB_TOTAL_GPUS=8 DTYPE=fp8 GPU_TYPE=b200 ./launch.sh",
     "lora_llama3_70b_fp8_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200", f"gpus-per-node=8 nodes=1 {QUARTER}"),
    (218, "JOB_TOTAL_GPUS=8 DTYPE=fp8 GPU_TYPE=h100 ./launch.sh",
     "lora_llama3_70b_fp8_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_h100", f"gpus-per-node=8 nodes=1 {QUARTER}"),
    (225, 'ADDITIONAL_SLURM_PARAMS="nodelist=node001,node002" JOB_TOTAL_GPUS=8 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh',
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200",
     f"gpus-per-node=8 nodelist=node001,node002 nodes=1 {QUARTER}"),
    (230, 'ADDITIONAL_SLURM_PARAMS="constraint=gpu&memory;exclusive" JOB_TOTAL_GPUS=8 DTYPE=fp8 GPU_TYPE=b200 '
     "./launch.sh",
     "lora_llama3_70b_fp8_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200",
     f"constraint=gpu&memory gpus-per-node=8 nodes=1 {QUARTER}"),
    (235, 'ADDITIONAL_SLURM_PARAMS="reservation=my_reservation" JOB_TOTAL_GPUS=8 DTYPE=fp8 GPU_TYPE=h100 ./launch.sh',
     "lora_llama3_70b_fp8_gpus8_tp2_pp4_cp1_vp20_ep1_mbs1_gbs32_h100",
     f"gpus-per-node=8 nodes=1 reservation=my_reservation {QUARTER}"),
    (274, "ENABLE_PROFILE=true JOB_TOTAL_GPUS=8 DTYPE=bf16 GPU_TYPE=b200 ./launch.sh",
     "lora_llama3_70b_bf16_gpus8_tp1_pp4_cp1_vp20_ep1_mbs1_gbs32_b200_nsys", f"gpus-per-node=8 nodes=1 {QUARTER}"),
)  # fmt: skip
INSTALLED = (
    (OLD, 102, "bash ./setup.sh"),
    (LLAMA, 131, "sbatch -A ${SBATCH_ACCOUNT} -p ${SBATCH_PARTITION} -N 1 ./setup.sh"),
    (NEMOTRON, 176, "sbatch -A ${SBATCH_ACCOUNT} -p ${SBATCH_PARTITION} -N 1 ./setup.sh"),
)
REFUSED = (
    (LLAMA, 207, "LOAD_CHECKPOINT_PATH=${STAGE_PATH}/experiments/x JOB_TOTAL_GPUS=256 MODEL_SIZE=70b ./launch.sh",
     "there is no such checkpoint"),
    (NEMOTRON, 306, "LOAD_CHECKPOINT_PATH=/none DTYPE=fp8 MODEL_SIZE=15b JOB_TOTAL_GPUS=64 GPUS_PER_NODE=8 ./launch.sh",
     "there is no such checkpoint"),
)  # fmt: skip
# What is prepared, after the export lines of the documents (362-369 and 365-372).
PREPARING = {"GPU_TYPE": "h100", "SBATCH_GPUS_PER_NODE": "1", "TIME_LIMIT": "01:30:00"}
PREPARED = (
    (MAVERICK, 376, "./download_ckpt_dataset.sh", ["dataset_400b", "checkpoint_400b"]),
    (MAVERICK, 379, "SKIP_IMPORT_CHECKPOINT=true ./download_ckpt_dataset.sh", ["dataset_400b"]),
    (MAVERICK, 382, "SKIP_DATASET_DOWNLOAD=true ./download_ckpt_dataset.sh", ["checkpoint_400b"]),
    (LORA, 379, "./download_ckpt_dataset.sh", ["dataset_70b", "checkpoint_70b"]),
    (LORA, 382, "SKIP_IMPORT_CHECKPOINT=true ./download_ckpt_dataset.sh", ["dataset_70b"]),
    (LORA, 385, "SKIP_DATASET_DOWNLOAD=true ./download_ckpt_dataset.sh", ["checkpoint_70b"]),
)
PARSED = (
    (MAVERICK, 31, "${LLMB_REPO}/common/parse_train_timing.sh"),
    (MAVERICK, 34, "${LLMB_REPO}/common/parse_train_timing.sh ${LLMB_INSTALL}/experiments"),
    (MAVERICK, 37, "${LLMB_REPO}/common/parse_train_timing.sh --format=csv"),
    (MAVERICK, 40, "${LLMB_REPO}/common/parse_train_timing.sh --format=json"),
    (MAVERICK, 43, "${LLMB_REPO}/common/parse_train_timing.sh --full-names"),
    (LORA, 43, "${LLMB_INSTALL}/llmb_repo/common/parse_train_timing.sh"),
    (LORA, 46, "${LLMB_INSTALL}/llmb_repo/common/parse_train_timing.sh ${LLMB_INSTALL}/experiments"),
    (LORA, 49, "${LLMB_INSTALL}/llmb_repo/common/parse_train_timing.sh --format=csv"),
    (LORA, 52, "${LLMB_INSTALL}/llmb_repo/common/parse_train_timing.sh --format=json"),
    (LORA, 55, "${LLMB_INSTALL}/llmb_repo/common/parse_train_timing.sh --full-names"),
)


def call(document: str, command: str, root: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Result:
    for variable in documented_variables():
        monkeypatch.delenv(variable.name, raising=False)
    (root / "cluster_config.yaml").write_text(DOCUMENTS[document].config)
    shell = {name: Template(value).substitute(ROOT=root) for name, value in DOCUMENTS[document].shell.items()}
    words, variables = shlex.split(Template(command).substitute(shell)), dict[str, str]()
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    monkeypatch.chdir(root)
    return CliRunner().invoke(app, [*words_of(document, words), *more], env={**shell, **variables})


def words_of(document: str, words: list[str]) -> list[str]:
    """llmb's words for the words of a command."""
    if words[0] == "llmb-run":
        return words[1:]
    script = next(word for word in words if word.endswith(".sh"))
    options = [word for word in words if word not in ("bash", "sbatch", script)]
    if script == "./download_ckpt_dataset.sh":
        return ["prepare", "submit", DOCUMENTS[document].workload, *options]
    if script == "./launch.sh":
        return ["launch", DOCUMENTS[document].workload, *options]
    if script == "./setup.sh":  # the options are those of sbatch, which it is not submitted with
        return ["install"]
    return [COMMANDS[Path(script).name], *options]


def flags_of(script: str) -> dict[str, str]:
    found = (line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if "#SBATCH --" in line)
    return {name: value.strip('"') for name, _, value in found if name not in EVERY_JOB}


def check_request(result: Result, name: str, slurm: str) -> None:
    assert result.exception is None, result.exception
    flags = flags_of(result.stdout)
    assert flags.pop("job-name") == name
    assert (flags.pop("account"), flags.pop("partition")) == ("account_name", "batch")
    assert " ".join(f"{flag}={value}" for flag, value in sorted(flags.items())) == slurm


@pytest.mark.parametrize(("document", "line", "command", "name", "slurm"), REQUESTED)
def test_a_line_requests_this_of_slurm(
    document: str, line: int, command: str, name: str, slurm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_request(call(document, command, tmp_path, monkeypatch, "--dry-run"), name, slurm)


@pytest.mark.parametrize(("line", "command", "name", "slurm"), LORA_LINES)
@pytest.mark.parametrize("program", [(), ("--framework", "megatron_bridge")])
def test_a_line_requests_this_of_either_program(
    program: tuple[str, ...],
    line: int,
    command: str,
    name: str,
    slurm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configuration, nsys = name.removesuffix("_nsys"), "_nsys" * name.endswith("_nsys")
    own = f"{configuration}_megatron_bridge_synthetic{nsys}" if program else name
    check_request(call(LORA, command, tmp_path, monkeypatch, *program, "--dry-run"), own, slurm)


@pytest.mark.parametrize(
    ("gpus", "listed", "said"),
    [
        (8, "node001,node002", "warning: --nodelist has 2 nodes, but the job has 1; Slurm will reject it"),  # line 225
        (8, "node[001-003]", "has 3 nodes"),
        (16, "node001,node002", None),
        (8, "node001,node001", None),
        (8, "/lustre/nodes", None),
        (8, "node[001", None),
    ],
)
def test_a_list_of_more_nodes_than_the_job_has_is_a_warning(
    gpus: int, listed: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"ADDITIONAL_SLURM_PARAMS='nodelist={listed}' JOB_TOTAL_GPUS={gpus} GPU_TYPE=b200 ./launch.sh"
    result = call(LORA, line, tmp_path, monkeypatch, "--dry-run")
    assert result.exception is None, result.exception
    assert (said in result.stderr) if said else ("--nodelist has" not in result.stderr)


@pytest.mark.parametrize(("document", "line", "command", "words"), REFUSED)
def test_what_llmb_does_not_have_is_an_error_that_says_so(
    document: str, line: int, command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = call(document, command, tmp_path, monkeypatch).exception
    assert isinstance(error, LlmbError), error
    assert words in str(error)


@pytest.mark.parametrize(("document", "line", "command"), INSTALLED)
def test_the_setup_script_is_the_installer(
    document: str, line: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below STAGE_PATH, where ``call`` has put the cluster's settings."""
    more = ("-w", DOCUMENTS[document].workload, "--gpu-type", "h100", "--gpus-per-node", "8", "--dry-run", "--json")
    result = call(document, command, tmp_path, monkeypatch, *more, "--keep-settings")
    assert result.exception is None, result.exception
    planned = json.loads(result.stdout)
    assert (planned["status"], planned["workloads"]) == ("planned", [DOCUMENTS[document].workload])
    assert planned["path"] == str(tmp_path)


@pytest.mark.parametrize(("document", "line", "command", "jobs"), PREPARED)
def test_the_download_script_is_jobs_of_one_node_and_one_gpu(
    document: str, line: int, command: str, jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = " ".join(f"{name}={value}" for name, value in PREPARING.items())
    result = call(document, f"{exported} {command}", tmp_path, monkeypatch, "--dry-run")
    assert result.exception is None, result.exception
    scripts = result.stdout.split("#!/bin/bash")[1:]
    assert [flags_of(script)["job-name"] for script in scripts] == [f"prepare_{job}" for job in jobs]
    for script in scripts:
        flags = flags_of(script)
        assert (flags["nodes"], flags["gpus-per-node"], flags["time"]) == ("1", "1", "01:30:00")
        assert (flags["account"], flags["partition"]) == ("account_name", "batch")
        assert "hf_token" not in script


@pytest.mark.parametrize(("document", "line", "command"), PARSED)
def test_logs_are_parsed_as_by_the_documents_script(
    document: str, line: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "log-account_name.lora_llama3_70b_bf16_2nodes_tp1_pp4_cp1_vp20_ep1_etpNone_mbs1_gbs64_933609_0.out"
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / name).write_text("".join(step_line(step) for step in range(50)))
    result = call(document, command, tmp_path, monkeypatch)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    if "json" in command:
        (run,) = json.loads(result.stdout)["results"]
        assert run["status"] == "success"
        assert "lora_llama3_70b_bf16_2nodes" in run["filename"]
    elif "csv" in command:
        (run,) = csv.DictReader(result.stdout.splitlines())
        assert run["filename"].startswith("lora_llama3_70b_bf16_2nodes")
        assert float(run["time_mean_seconds"]) == 4.07
    else:
        assert "lora_llama3 70b bf16" in result.stdout
        assert "4.07" in result.stdout
        assert (name in result.stdout) == ("--full-names" in command)


def step_line(step: int) -> str:
    return "0: " + format_step_line(
        step=step,
        steps=50,
        lr=1e-6,
        global_batch_size=64,
        peak_memory_bytes=2,
        memory_allocated_bytes=1,
        loss=2.0,
        step_time_s=4.07,
        tflops_per_gpu=610.0,
        consumed_samples=64 * (step + 1),
    ) + "\n"  # fmt: skip


@pytest.mark.parametrize(
    ("document", "line", "variables", "profiled"),
    [
        (LLAMA, 156, {"MODEL_SIZE": "70b", "JOB_TOTAL_GPUS": "256"}, (25, 20, 25)),
        (NEMOTRON, 222, {"MODEL_SIZE": "15b", "JOB_TOTAL_GPUS": "16"}, (25, 20, 25)),
        (NEMOTRON, 237, {"MODEL_SIZE": "15b", "JOB_TOTAL_GPUS": "16", "PROFILE_STOP_STEP": "22"}, (22, 20, 22)),
        (MAVERICK, 229, {"JOB_TOTAL_GPUS": "256", "GPU_TYPE": "b200"}, (50, 45, 50)),
        (MAVERICK, 241, {"JOB_TOTAL_GPUS": "256", "GPU_TYPE": "b200", "PROFILE_START_STEP": "40"}, (50, 40, 50)),
        (LORA, 268, {"JOB_TOTAL_GPUS": "8", "GPU_TYPE": "b200"}, (50, 45, 50)),
        (LORA, 280, {"JOB_TOTAL_GPUS": "8", "GPU_TYPE": "h100", "PROFILE_STOP_STEP": "48"}, (48, 45, 48)),
    ],
)
def test_nsight_systems_profiles_the_documents_steps_and_ranks(
    document: str, line: int, variables: dict[str, str], profiled: tuple[int, int, int], tmp_path: Path
) -> None:
    workload = DOCUMENTS[document].workload
    root = "STAGE_PATH" if "STAGE_PATH" in DOCUMENTS[document].shell else "LLMB_INSTALL"
    plan = launched(tmp_path, workload, {**variables, "ENABLE_PROFILE": "true"}, root).plan
    assert plan.profile
    assert (plan.steps, plan.profile.first_step, plan.profile.stop_step) == profiled
    assert (plan.profile.profiler, plan.profile.or_torch) == ("nsys", True)
    assert plan.profile.ranks == tuple(range(8))
