# SPDX-License-Identifier: Apache-2.0
"""Reports that are opened in a browser: of recorded runs, on GPUs and several nodes, and of some trained here."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_steps import steps_of
from recorded_runs import gpu_record, times_around, write_run
from slowed_runs import Slow, slowed

from llmb.cli.main import app, exit_code_of
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.runs.folder import RunFolder
from llmb.runs.steps import step_to_json

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Without these the browser itself asks the network for things."""
LONG = "a-label-without-a-place-to-break-it-" * 6
RUN = ("-m", "llmb.cli.main", "run", "-s", "tiny", "--gpu-type", "cpu", "--synthetic", "-q")
SMALL = ("--gbs", "4", "--seq-len", "64", "--steps", "8", "--window", "2-7")


@pytest.fixture(scope="session")
def browser(needs: Callable[[str, bool, str], None]) -> Iterator[Any]:
    program = shutil.which("chromium")
    present = bool(program and find_spec("playwright") and find_spec("axe_core_python"))
    needs("browser", present, "apt-get install chromium; pip install -e '.[test]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=["recorded"])
def pages(request: pytest.FixtureRequest) -> Path:
    """An install root with its reports: of all runs, and of those after a change against those before it."""
    root: Path = request.getfixturevalue(request.param)
    return root


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: repeats, scales, a slow one, failed ones, a long label."""
    root = tmp_path_factory.mktemp("recorded")
    below = root / "workloads" / "w" / "experiments" / "e"
    for repeat in range(3):
        write_run(below, labeled("before"), times_around(12.0 + repeat / 50))
        write_run(below, labeled("after"), times_around(13.0 + repeat / 50))
    for scale in (16, 32):
        write_run(below, gpu_record(scale=scale, nodes=("node1", "node2")), times_around(12.5))
    write_run(below, gpu_record(dtype="fp8"), times_around(9.0)[:7], exit_code=1)
    write_run(below, gpu_record("pretrain_nemotron4", "15b", 64, nodes=[f"n{place}" for place in range(8)]), [])
    not_finite(below)
    write_run(below, labeled(LONG, "70b", 64), times_around(5.0))
    write_run(below, gpu_record(dtype="fp8", scale=16, nodes=("node1", "node2")), times_around(9.0, 2.0))
    write_run(below, gpu_record(size="tiny", dtype="fp32"), times_around(0.5))
    make_reports(root, compared=("after", "--against", "before"))
    return root


def labeled(label: str, size: str = "8b", scale: int = 8) -> Any:
    return gpu_record(size=size, scale=scale).model_copy(update={"label": label})


def not_finite(below: Path) -> None:
    path = write_run(below, gpu_record(dtype="bf16", steps=20), times_around(12.0, steps=20))
    folder = RunFolder(path)
    record = gpu_record(steps=20).model_validate_json(folder.record.read_text())
    steps = steps_of(times_around(12.0, steps=5), record.plan)
    spoiled = steps_of(times_around(12.0, steps=6), record.plan, loss=float("nan"))[-1]
    folder.steps.write_text("".join(f"{step_to_json(step)}\n" for step in [*steps, spoiled]))
    finish_run(folder, record.model_copy(update={"status": "running", "result": None}), End(1))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Path:
    """What only training records: the load of experts, packed documents, a profile, and a slow rank."""
    root = tmp_path_factory.mktemp("trained")

    def train(*options: str, slow: tuple[Slow, ...] = ()) -> None:
        environ = {**os.environ, "LLMB_INSTALL": str(root), "OMP_NUM_THREADS": "1", **slowed(*slow)}
        words = [forked_python, *RUN, *SMALL, *options]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    train("-w", "pretrain_mixtral", "--scale", "1")
    train("-w", "finetune_llama3", "--scale", "1")
    train("-w", "pretrain_llama3.1", "--scale", "1", "--profile")
    train("-w", "pretrain_llama3.1", "--scale", "4", slow=(Slow("compute", ms=100, rank=3),))
    make_reports(root)
    return root


def make_reports(root: Path, **compared: tuple[str, ...]) -> None:
    """That of all runs, and others by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMB_INSTALL", str(root))
        for name, words in {"all": (), **compared}.items():
            assert exit_code_of(app, ["report", *words, "-q", "-o", str(root / f"{name}.html")]) == 0
