# SPDX-License-Identifier: Apache-2.0
"""What plausible mistakes draw: one style of message, which says what to do, and never a traceback."""

import os
import sys
from pathlib import Path

import pytest
from called_here import Run
from terminal import COLUMNS, talk

RECIPE = "-w pretrain_llama3.1 -s 8b"
TINY = "run -w pretrain_llama3.1 -s tiny --gpu-type cpu"
TOKEN = f"hf_{'aB3' * 12}"
PRETENDED = f"{TINY} --pretend-scale 2"

MISTAKES = [
    # Commands.
    ("shw", 2, "unknown command 'shw'; did you mean 'show'?"),
    ("jobs lst", 2, "  valid: list, show, log, wait, cancel, refresh, rebuild, nodes"),
    ("help rnu", 2, "unknown command 'rnu'; did you mean 'run'?"),
    ("bisect", 2, "unknown command 'bisect'\n"),
    # What is missing.
    ("run", 2, "the workload is not specified"),
    (f"metrics {RECIPE}", 2, "Missing option '--step-time'"),
    ("jobs show", 2, "Missing argument 'ID'"),
    ("show -w", 2, "'-w' requires an argument\n  where: llmb show\n  do:    see 'llmb show --help'"),
    ("list one two", 2, "unexpected extra argument"),
    # Options by other names.
    (f"run {RECIPE} --nodes 2", 2, "no such option: --nodes; did you mean --scale?"),
    ("parse --csv", 2, "no such option: --csv; did you mean --format?"),
    ("prepare submit finetune_llama3 --vboost 3", 2, "no such option: --vboost"),  # no effect on a preparation
    ("show --wrkload x", 2, "no such option: --wrkload; did you mean --workload?"),
    ("plan --model x", 2, "no such option: --model; did you mean --workload or --model-config?"),
    # Values.
    ("run 8b", 2, "'8b' is a size; the workload is missing"),
    ("show pretrain_grok1 314b", 2, "llmb has no recipe for grok"),
    (f"run {RECIPE} --gpu-type mi300x --dry-run", 2, "never been tested on AMD Instinct MI300X"),
    ("predict pretrain_llama3.1 8b --gpu-type mine.yaml", 2, "'memory' accept other types with --hardware FILE"),
    ("run my_sweep.yaml", 2, "to queue or start the runs that a file lists, use 'llmb bulk FILE'"),
    ("predict my/config.json", 2, "use --model-config FILE to show, predict, plan or run"),
    ("result lattest", 2, "valid: latest"),
    ("show llama3.2 8b", 2, "llmb has no recipe for llama3.2"),
    (f"show {RECIPE} --scale eight", 2, "--scale is 'eight'; it must be a whole number"),
    (f"metrics {RECIPE} --step-time 12,9", 2, "--step-time is '12,9'; it must be a number"),
    (f"show {RECIPE} --scale 12", 2, "has no layout for 12 GPUs"),
    (f"{TINY} --steps 0", 2, "--steps is 0; it must be at least 1"),
    (f"{TINY} --recompute some", 2, "--recompute is 'some'; it must be none or selective or full"),
    ("parse --format bad", 2, "--format is 'bad'; it must be one of 'table', 'csv', 'json'\n"),
    (f"{TINY} --label a..b", 2, "without '..'"),
    (f"metrics {RECIPE} --step-time nan", 2, "it must be above 1e-09"),
    ("jobs list --since yesterday", 2, "yesterday"),
    ("run pretrain_llama3.1 tiny -s 8b", 2, "the size has two values"),
    ("show llama3.1_8b -s 70b", 2, "'llama3.1_8b' has size 8b, but --size is 70b"),
    # Options that need others, or exclude them.
    (f"{TINY} --fp8-recipe delayed", 2, "add --dtype fp8"),
    (f"{TINY} --new", 2, "--new has no effect without --label"),
    (f"{TINY} --rank 1", 2, "add --pretend-scale"),
    (f"{PRETENDED} --save-checkpoint", 2, "a rank that runs alone learns nothing"),
    (f"{PRETENDED} --checkpoint-interval 2", 2, "--checkpoint-interval is set, but a rank that runs"),
    (f"{PRETENDED} --weights missing", 2, "a rank that runs alone starts from random weights"),
    # Files and the machine.
    ("parse missing", 2, "missing"),
    (f"list {TOKEN}", 2, "argument 2 looks like a secret"),
    ("result latest", 2, "there are no runs yet"),
    (f"run {RECIPE} --scale 8 --gpu-type h100", 3, "requires 8 visible GPUs, but this machine has"),
    ("list --output missing/list.txt", 3, "--output cannot be written"),
]


@pytest.mark.parametrize(("line", "code", "said"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_told_with_what_to_do(line: str, code: int, said: str, llmb: Run) -> None:
    done = llmb(*line.split(), code=code, CUDA_VISIBLE_DEVICES=" ")
    out, err = done.stdout, done.stderr
    assert said in err
    assert err.rpartition("llmb: error: ")[2].count("\n") >= 2, "neither valid values, nor a place, nor advice"
    assert "  do:    " in err or "  valid: " in err
    assert ("Traceback" in err, out) == (False, "")


@pytest.mark.parametrize("line", ["run --nodes 2 --json", "show pretrain_llama3.1 7b --json", "shw --json"])
def test_an_error_is_a_document_where_the_result_is_one(line: str, llmb: Run) -> None:
    done = llmb(*line.split(), code=2)
    error = done.document["error"]
    assert set(error) == {"what", "where", "valid", "do", "exit_code"}
    assert "did you mean" in error["what"].lower()
    assert (error["exit_code"], done.stdout) == (2, "")


def test_a_terminal_breaks_an_error_between_words_and_no_command(tmp_path: Path) -> None:
    settings = {**os.environ, "LLMB_INSTALL": str(tmp_path), "TERM": "dumb"}
    code, shown = talk([sys.executable, "-m", "llmb.cli.main", "compare", "nowhere", "nor-there"], settings, ())
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  valid: "))
    assert code == 2
    words = [line for line in lines if str(tmp_path) not in line]  # a folder, however long its name, is not broken
    assert lines[start + 1].startswith(" " * len("  valid: ")) and max(map(len, words)) <= COLUMNS
    assert lines[-1] == "  do:    run 'llmb runs' to list the runs with their ids and labels"
