# SPDX-License-Identifier: Apache-2.0
"""``llmb accept`` on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.cli.main import app, exit_code_of


def call(*words: str) -> int:
    return exit_code_of(app, list(words))


def test_a_dry_run_names_the_commands_and_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("accept", "--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in document["parts"]][:3] == ["checks", "devices", "memory"]
    assert all(part["command"].startswith("llmb ") and part["seconds"] > 0 for part in document["parts"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "batch", "-A", "a"], "--partition and --account cannot be used without --nodes"),
        (["--set", "h100", "--dtype", "fp8"], "--set selects its own recipes"),
        (["--set", "h100"], "acceptance set h100 is for h100, but the GPU type is cpu"),
        (["--dtype", "fp8"], "a recipe requires a workload and a size"),
        (["--set", "h10"], "unknown acceptance set 'h10'"),
        (["--checks", "kernl"], "unknown area or check 'kernl'"),
        (["--junit", "nowhere/cases.xml"], "the folder of --junit does not exist"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("accept", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_is_accepted_after_a_kill(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "llmb.cli.main", "accept", "--checks", "kernel", "--minutes", "0"]
    words += ["-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--json", "--junit", str(tmp_path / "j.xml")]
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("acceptance/*/checks.json")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = subprocess.run(words, env=environ, capture_output=True, text=True)
    document = json.loads(again.stdout)
    assert (again.returncode, document["verdict"]) == (6, "inconclusive"), again.stderr
    assert "which has the results of 1 part;" in again.stderr
    assert [part["name"] for part in document["parts"]] == ["checks", "devices", "memory", "all-reduce", "runs"]
    assert document["sentence"].endswith("the next 'llmb accept' will be compared with this one")
    assert all(Path(document[name]).is_file() for name in ("page", "archive"))
    assert "<h2>Acceptance</h2>" in Path(document["page"]).read_text()
    assert (tmp_path / "j.xml").read_text().count("<testcase") == len(document["parts"])
