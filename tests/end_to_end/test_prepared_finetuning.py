# SPDX-License-Identifier: Apache-2.0
"""From samples and weights to the result table of a fine-tuning, by the commands of the pages of documentation."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.slow

LORA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"
WITHIN_S = 600
HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = {LORA: "fine-tune-llama3-with-lora.md", MAVERICK: "fine-tune-llama4-maverick.md"}


class Installation(NamedTuple):
    folder: Path
    python: str

    @property
    def environ(self) -> dict[str, str]:
        """Without a hub: nothing here may need one. Threads of ranks that share cores would wait for each other."""
        return {**os.environ, "LLMB_INSTALL": str(self.folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

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
    """A workload's ``tiny`` model, prepared and trained as its page says; each once."""

    @functools.cache
    def train(workload: str) -> Trained:
        where = Installation(tmp_path_factory.mktemp("small") / "install", forked_python)
        named = ("-w", workload, "-s", "tiny")
        refusal = where.llmb("run", *named, "--scale", "2", code=2)
        for part in ("dataset", "checkpoint"):
            assert f"llmb prepare {part} -w {workload} -s tiny" in refusal
        commands = page_commands(HOW_TO / PAGES[workload])
        assert [command[:2] for command in commands[:4]] == [
            ["prepare", part] for part in ("sample", "checkpoint", "dataset", "verify")
        ]
        for command in commands:
            if not any(map(str.isupper, command)):
                where.llmb(*command)
        assert json.loads(where.llmb("prepare", "verify", *named, "--checksums", "--json"))["complete"]
        return Trained(where, where.llmb("result", "latest", "-v"), where.result())

    return train


@pytest.mark.parametrize("workload", [LORA, pytest.param(MAVERICK, marks=pytest.mark.measured)])
def test_the_commands_of_a_page_lead_to_its_result(workload: str, trained: Callable[[str], Trained]) -> None:
    _, table, result = trained(workload)
    assert (result["status"], result["steps"]) == ("success", 50)
    shown = re.search(r"^loss +([\d.]+) -> ([\d.]+)", (HOW_TO / PAGES[workload]).read_text(), re.MULTILINE)
    assert shown
    first, last = (float(text) for text in shown.groups())
    assert result["loss"]["first"] == pytest.approx(first, rel=0.001)
    assert result["loss"]["last"] == pytest.approx(last, rel=0.05)
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
    command = [where.python, "-m", "llmb.cli.main", *train, "--steps", "2000", "--checkpoint-interval", "4"]
    run = subprocess.Popen(command, env=where.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved: list[Path] = []
    end = time.monotonic() + WITHIN_S
    while not saved:
        assert run.poll() is None, "it has ended by itself"
        assert time.monotonic() < end
        time.sleep(0.1)
        # Not the folder that a checkpoint has, with a dot, until it is complete.
        saved = list(where.folder.rglob("experiments/*/*/*/checkpoints/step=4-*/checkpoint.json"))
    run.send_signal(signal.SIGKILL)
    run.wait()
    killed = losses(where.newest("metrics.jsonl"))
    where.llmb(*train, "--load-checkpoint", str(saved[0].parent), "--steps", "4")
    resumed, whole = losses(where.newest("metrics.jsonl")), losses(Path(result["run_dir"]) / "metrics.jsonl")
    assert list(resumed) == [4, 5, 6, 7]
    assert {step: whole[step] for step in range(4)} == {step: killed[step] for step in range(4)}
    assert resumed == {step: whole[step] for step in resumed}


def page_commands(page: Path) -> list[list[str]]:
    """The commands of a page's first part, which is for this machine."""
    text = page.read_text().split("\n## On a cluster\n")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("llmb ")]
