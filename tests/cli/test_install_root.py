# SPDX-License-Identifier: Apache-2.0
"""Every command keeps and finds everything below the same root of installation, and prints it."""

from functools import partial
from pathlib import Path

import pytest
from called_here import Run

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
    told = f"llmb: root of installation: {stage} (STAGE_PATH)\n"
    (tmp_path / "jobs.txt").write_text("pretrain_llama3.1 tiny fp32 1\n")
    arguments = [str(tmp_path / "jobs.txt") if word == "JOBS" else word for word in words]
    call = partial(llmb, command, *arguments, HOME=str(tmp_path / "home"))
    done = call(LLMB_INSTALL="", STAGE_PATH=str(stage))
    assert done.stderr.count("root of installation") == done.stderr.count(told) == 1
    assert "--chdir=" not in done.stdout or f"--chdir={stage}/" in done.stdout
    by_default = call(LLMB_INSTALL="")
    assert "root of installation" not in by_default.stderr
    monkeypatch.chdir(stage)
    assert f"{stage} (cluster_config.yaml)" in call(LLMB_INSTALL="").stderr
    both = call(STAGE_PATH=str(stage), LLMB_INSTALL="/elsewhere", code=2)
    assert f"LLMB_INSTALL is '/elsewhere', but STAGE_PATH is '{stage}'" in both.stderr
