# SPDX-License-Identifier: Apache-2.0
"""What plausible mistakes draw: one style of message, which says what to do, and never a traceback."""

import json
import os
import sys
from pathlib import Path

import pytest
from terminal import COLUMNS, talk

from llmb.cli.main import app, as_spoken, exit_code_of

RECIPE = "-w pretrain_llama3.1 -s 8b"
TINY = "run -w pretrain_llama3.1 -s tiny --gpu-type cpu"
QUEUED = f"submit {RECIPE} --gpu-type h100 --dry-run"

MISTAKES = [
    # Commands.
    ("shw", 2, "unknown command 'shw'; did you mean 'show'?"),
    ("train", 2, "unknown command 'train'"),
    ("jobs lst", 2, "unknown command 'lst'; did you mean 'list'?"),
    ("jobs 4711", 2, "unknown command '4711'"),
    ("checkpoint save x", 2, "unknown command 'save'"),
    ("help rnu", 2, "unknown command 'rnu'; did you mean 'run'?"),
    # What is missing.
    ("run", 2, "the workload is not specified"),
    ("show -w pretrain_llama3.1", 2, "the size of pretrain_llama3.1 is not specified"),
    (f"metrics {RECIPE}", 2, "--step-time is not specified"),
    ("nccl", 2, "FILE is not specified"),
    ("jobs show", 2, "ID is not specified"),
    ("show -w", 2, "'-w' requires an argument"),
    # Options by other names.
    (f"run {RECIPE} --nodes 2", 2, "unknown option --nodes; did you mean --scale?"),
    (f"run {RECIPE} -N 2", 2, "unknown option -N; did you mean --scale?"),
    (f"submit {RECIPE} --num-gpus 8", 2, "unknown option --num-gpus; did you mean --scale?"),
    (f"run {RECIPE} --batch-size 8", 2, "unknown option --batch-size; did you mean --gbs?"),
    (f"run {RECIPE} --max-steps 8", 2, "unknown option --max-steps; did you mean --steps?"),
    (f"run {RECIPE} --fp8", 2, "unknown option --fp8; did you mean --dtype?"),
    (f"run {RECIPE} --precision fp8", 2, "unknown option --precision; did you mean --dtype?"),
    (f"run {RECIPE} --gpu h100", 2, "unknown option --gpu; did you mean --gpu-type?"),
    (f"run {RECIPE} --tensor-parallel-size 2", 2, "did you mean --tp?"),
    (f"run {RECIPE} --learning-rate 1", 2, "did you mean --lr?"),
    (f"run {RECIPE} --resume x", 2, "did you mean --load-checkpoint?"),
    (f"submit {RECIPE} --time 30", 2, "did you mean --time-limit?"),
    (f"submit {RECIPE} --mem 0", 2, "did you mean --slurm-arg?"),
    ("show --wrkload x", 2, "unknown option --wrkload; did you mean --workload?"),
    ("parse --csv", 2, "unknown option --csv; did you mean --format?"),
    # Values.
    ("show llama3.1 8b", 2, "unknown workload 'llama3.1'; did you mean 'pretrain_llama3.1'?"),
    ("show pretrain_llama3.1 7b", 2, "unknown size of pretrain_llama3.1 '7b'; did you mean '8b'?"),
    (f"show {RECIPE} --dtype bf61", 2, "unknown dtype 'bf61'; did you mean 'bf16'?"),
    (f"show {RECIPE} --dtype int8", 2, "unknown dtype 'int8'"),
    (f"show {RECIPE} --gpu-type a100", 2, "unknown GPU type 'a100'"),
    (f"show {RECIPE} --gpu-type cpu", 2, "size 8b does not run on a CPU"),
    (f"show {RECIPE} --release 24.12", 2, "unknown release '24.12'"),
    (f"show {RECIPE} --scale eight", 2, "--scale is 'eight'; it must be a whole number"),
    (f"show {RECIPE} --scale 12", 2, "has no layout for 12 GPUs"),
    (f"show {RECIPE} --tp 3", 2, "is not divisible by TP 3"),
    (f"metrics {RECIPE} --step-time fast", 2, "--step-time is 'fast'; it must be a number"),
    *((f"metrics {RECIPE} --step-time {text}", 2, "is invalid") for text in ("0", "-1", "nan", "inf", "1e-320")),
    (f"{TINY} --steps 0", 2, "--steps is 0; it must be at least 1"),
    (f"{TINY} --scale 3", 2, "GBS 8 is not divisible"),
    (f"{TINY} --scale 16", 2, "GBS 8 is below"),
    (f"{TINY} --recompute some", 2, "'some' is not one of 'none', 'selective', 'full'"),
    (f"{TINY} --window 45-35", 2, "'45-35' is not a window"),
    (f"{TINY} --fp8-recipe delayed", 2, "add --dtype fp8"),
    (f"{TINY} --load-checkpoint missing", 2, "missing"),
    ("run pretrain_llama3.1 tiny -s 8b", 2, "the size has two values"),
    ("show -w pretrain_llama3.1_8b -s 70b", 2, "--size"),
    ("list pretrain_qwen3 -w pretrain_nemotron4", 2, "the workload has two values"),
    ("list one two", 2, "unexpected extra argument"),
    ("jobs list --limit -1", 2, "--limit is '-1'; it must be at least 0"),
    ("jobs list --state broken", 2, "unknown state 'broken'"),
    ("jobs list --since yesterday", 2, "yesterday"),
    ("jobs show 4711", 2, "there is no job '4711'"),
    ("run -s tiny -s 8b", 2, "--size has two values: tiny and 8b"),
    ("run tiny --dtype bf16 --dtype=fp8", 2, "write --dtype bf16,fp8"),
    ("submit tiny -d bf16 --dtype fp8", 2, "--dtype has two values: bf16 and fp8"),
    ("judge latest --tolerance 1 --tolerance 2", 2, "--tolerance has two values: 1 and 2"),
    ("jobs list --limit 1 --limit 2", 2, "--limit has two values: 1 and 2"),
    ("show pretrain_llama3.1 8b --gpu-type a100", 2, "unknown GPU type 'a100'\n"),
    ("run pretrain_llama3.1 tiny --scale 0", 2, "--scale is 0; it must be at least 1"),
    ("result latest", 2, "there are no runs yet"),
    ("judge latest", 2, "there are no runs yet"),
    ("judge before", 2, "'llmb runs' shows the runs"),
    ("judge latest --tolerance inf", 2, "--tolerance inf is invalid"),
    ("compare a b --tolerance 0", 2, "--tolerance 0 is invalid"),
    ("run -w pretrain_llama3.1 -s tiny --new", 2, "--new has no effect without --label"),
    (f"{TINY} --rank 1", 2, "add --pretend-scale"),
    (f"{TINY} --pretend-scale 2 --rank 2", 2, "--rank is 2; the layout has ranks 0 to 1"),
    (f"{TINY} --pretend-scale 2 --rank -1", 2, "--rank is '-1'; it must be ranks such as 0 or 0,4-7"),
    (f"{TINY} --pretend-scale 2 --rank 0-999999999", 2, "the layout has ranks 0 to 1"),
    (f"{TINY} --pretend-scale 2 --scale 4", 2, "--scale is 4, and --pretend-scale 2"),
    (f"{TINY} --pretend-scale 0", 2, "--pretend-scale is '0'; it must be at least 1"),
    (f"run {RECIPE} --gpu-type h100 --pretend-scale 12", 2, "has no layout for 12 GPUs"),
    (f"{TINY} --pretend-scale 2 --save-checkpoint", 2, "a rank that pretends the others learns nothing"),
    (f"{TINY} --pretend-scale 2 --weights missing", 2, "others starts from random weights"),
    (f"{TINY} --pretend-scale 2 --profile --profile-ranks 0", 2, "a rank that pretends the others is the only one"),
    ("submit tiny --pretend-scale 8", 2, "--pretend-scale"),
    (f"{TINY} --label -x", 2, "beginning with a letter or a digit"),
    (f"{TINY} --label a..b", 2, "without '..'"),
    ("result missing/run", 2, "there is no folder"),
    ("parse missing", 2, "missing"),
    ("trace missing.json", 2, "missing.json"),
    ("nccl missing.log", 2, "missing.log"),
    ("checkpoint show missing", 2, "missing"),
    ("bulk missing.txt", 2, "missing.txt"),
    ("launch pretrain_llama3.1 -s 8b", 2, "the number of GPUs is not specified"),
    ("launch finetune_llama4-maverick -s 400b --scale 256", 2, "the GPU type of finetune_llama4-maverick is not spec"),
    (f"{QUEUED} --scale 12", 2, "has no layout for 12 GPUs"),
    (f"submit{TINY.removeprefix('run')} --dtype fp8 --fp8-recipe current --layers 2", 2, "nothing is in FP8"),
    (f"{QUEUED} --scale 8,16 --wait", 2, "--wait follows one job"),
    (f"{QUEUED} --scale 8 --env HF_TOKEN=hf_abc", 2, "looks like a secret"),
    # The machine.
    (f"run {RECIPE} --scale 8 --gpu-type h100", 3, "needs 8 GPUs; this machine has"),
    (f"run {RECIPE} --pretend-scale 8 --gpu-type h100", 3, "needs 1 GPU; this machine has"),
    ("list --output missing/list.txt", 3, "--output cannot be written"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "install"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(("line", "code", "said"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_told_with_what_to_do(line: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(app, as_spoken(line.split())) == code
    out, err = capsys.readouterr()
    assert said in err
    assert err.rpartition("llmb: error: ")[2].count("\n") >= 2, "neither valid values, nor a place, nor advice"
    assert "  do:    " in err or "  valid: " in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("line", ["run --nodes 2 --json", "show pretrain_llama3.1 7b --json", "shw --json"])
def test_an_error_is_a_document_where_the_result_is_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(app, line.split()) == 2
    out, err = capsys.readouterr()
    error = json.loads(err)["error"]
    assert set(error) == {"what", "where", "valid", "do", "exit_code"}
    assert "did you mean" in error["what"]
    assert (error["exit_code"], out) == (2, "")


def test_a_terminal_breaks_an_error_between_words_and_no_command(tmp_path: Path) -> None:
    code, shown = talk(
        [sys.executable, "-m", "llmb.cli.main", "compare", "nowhere", "nor-there"],
        {**os.environ, "LLMB_INSTALL": str(tmp_path), "TERM": "dumb"},
        (),
    )
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  valid: "))
    assert code == 2
    words = [line for line in lines if str(tmp_path) not in line]  # a folder, however long its name, is not broken
    assert lines[start + 1].startswith(" " * len("  valid: ")) and max(map(len, words)) <= COLUMNS
    assert lines[-1] == "  do:    'llmb runs' shows the runs, with their ids and labels"
