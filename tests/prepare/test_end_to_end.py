# SPDX-License-Identifier: Apache-2.0
"""From questions and a model that transformers made to the result table of a fine-tuning, by llmb's commands alone."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small_finetuning import write_small_finetuning

pytestmark = pytest.mark.slow

LORA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"
# At the start the loss is near ln(1024) = 6.93, because the weights are random. In 50 steps it falls to 5.5 with
# adapters of the fused projection beside frozen random weights, and to 1.2 where all weights are trained.
LEAST_FALL = {LORA: 1.0, MAVERICK: 4.0}
WITHIN_S = 600
HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = ("fine-tune-llama3-with-lora.md", "fine-tune-llama4-maverick.md")


class Installation(NamedTuple):
    folder: Path
    python: str

    @property
    def environ(self) -> dict[str, str]:
        """Without a hub: nothing here may need one."""
        return {**os.environ, "LLMB_INSTALL": str(self.folder), "HF_HUB_OFFLINE": "1"}

    def llmb(self, *arguments: str, code: int = 0) -> str:
        """Calls llmb, and returns what it printed; its messages if it fails."""
        command, own = [self.python, "-m", "llmb.cli.main", *arguments], self.folder.parent
        done = subprocess.run(command, env=self.environ, cwd=own, capture_output=True, text=True, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def newest(self, name: str) -> Path:
        return max(self.folder.rglob(name), key=lambda path: path.stat().st_mtime)

    def result(self) -> dict[str, Any]:
        """Of the newest run."""
        found: dict[str, Any] = json.loads(self.llmb("result", str(self.newest("run.json").parent), "--json"))
        return found


class Trained(NamedTuple):
    where: Installation
    table: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Callable[[str], Trained]:
    """A workload's ``tiny`` model, prepared from files that llmb did not make, and trained; each once."""

    @functools.cache
    def train(workload: str) -> Trained:
        folder = tmp_path_factory.mktemp("small")
        where = Installation(folder / "install", forked_python)
        samples, model = write_small_finetuning(folder, workload)
        named = ("-w", workload, "-s", "tiny")
        refusal = where.llmb("run", *named, "--scale", "2", code=2)
        for part in ("dataset", "checkpoint"):
            assert f"llmb prepare {part} -w {workload} -s tiny" in refusal
        where.llmb("prepare", "checkpoint", *named, "--source", str(model))
        where.llmb("prepare", "dataset", *named, "--source", str(samples))
        assert json.loads(where.llmb("prepare", "verify", *named, "--checksums", "--json"))["complete"]
        table = where.llmb("run", *named, "--scale", "2")
        return Trained(where, table, where.result())

    return train


@pytest.mark.parametrize("workload", [LORA, pytest.param(MAVERICK, marks=pytest.mark.measured)])
def test_small_data_and_weights_become_a_result(workload: str, trained: Callable[[str], Trained]) -> None:
    _, table, result = trained(workload)
    assert (result["status"], result["steps"]) == ("success", 50)
    first, last = result["loss"]["first"], result["loss"]["last"]
    assert 6.5 < first < 7.5, "random weights guess"
    assert first - last > LEAST_FALL[workload]
    assert [result["origin"][part]["kind"] for part in ("weights", "data")] == ["checkpoint", "dataset"]
    assert re.search(r"^weights .* checkpoint llmb/", table, re.MULTILINE)
    assert re.search(r"^data .* packed 128, from /.*squad.jsonl", table, re.MULTILINE)
    assert re.search(r"^dataset .* template squad-1", table, re.MULTILINE)
    for row in (
        "tokens/s, padded",
        "tokens/s, real",
        "TFLOPS per GPU, full attention",
        "TFLOPS per GPU, packed documents",
    ):
        assert re.search(f"^{re.escape(row)} +[\\d.,]+", table, re.MULTILINE), row
    assert 0 < result["real_tokens_per_s"] < result["tokens_per_s"]
    assert 0 < result["tflops_per_gpu"]["packed"] < result["tflops_per_gpu"]["full"]
    total, trainable = result["parameters"]["total"], result["parameters"]["trainable"]
    assert trainable < total / 20 if workload == LORA else trainable == total


def losses(metrics: Path) -> dict[int, float]:
    lines = metrics.read_text().splitlines(keepends=True)
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return {step["step"]: step["loss"] for step in steps}


def test_a_run_that_was_killed_resumes_with_the_next_document(trained: Callable[[str], Trained]) -> None:
    where, _, result = trained(LORA)
    train = ("run", "-w", LORA, "-s", "tiny", "--scale", "2")
    # So many steps that the run is still at work whenever this process looks.
    command = [sys.executable, "-m", "llmb.cli.main", *train, "--steps", "2000", "--checkpoint-interval", "10"]
    run = subprocess.Popen(command, env=where.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved: list[Path] = []
    end = time.monotonic() + WITHIN_S
    while not saved:
        assert run.poll() is None, "it has ended by itself"
        assert time.monotonic() < end
        time.sleep(0.1)
        # Not the folder that a checkpoint has, with a dot, until it is complete.
        saved = list(where.folder.rglob("experiments/*/*/*/checkpoints/step=10-*/checkpoint.json"))
    run.send_signal(signal.SIGKILL)
    run.wait()
    killed = losses(where.newest("metrics.jsonl"))
    where.llmb(*train, "--load-checkpoint", str(saved[0].parent), "--steps", "5")
    resumed, whole = losses(where.newest("metrics.jsonl")), losses(Path(result["run_dir"]) / "metrics.jsonl")
    assert list(resumed) == [10, 11, 12, 13, 14]
    assert {step: whole[step] for step in range(10)} == {step: killed[step] for step in range(10)}
    assert resumed == {step: whole[step] for step in resumed}


def page_commands(page: Path) -> list[list[str]]:
    """The commands of a page's first part, which is for this machine."""
    text = page.read_text().split("\n## On a cluster\n")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("llmb ")]


@pytest.mark.parametrize("page", [PAGES[0], pytest.param(PAGES[1], marks=pytest.mark.measured)])
def test_the_commands_of_a_page_lead_to_the_result(page: str, tmp_path: Path, forked_python: str) -> None:
    where = Installation(tmp_path / "install", forked_python)
    commands = page_commands(HOW_TO / page)
    assert [command[:2] for command in commands[:4]] == [
        ["prepare", part] for part in ("sample", "checkpoint", "dataset", "verify")
    ]
    for command in commands:
        if not any(word.isupper() for word in command):
            where.llmb(*command)
    result = where.result()
    assert result["status"] == "success"
    shown = re.search(r"^loss +([\d.]+) -> ([\d.]+)", (HOW_TO / page).read_text(), re.MULTILINE)
    assert shown
    first, last = (float(text) for text in shown.groups())
    assert result["loss"]["first"] == pytest.approx(first, rel=0.001)
    assert result["loss"]["last"] == pytest.approx(last, rel=0.05)
