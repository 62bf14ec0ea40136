# SPDX-License-Identifier: Apache-2.0
"""Commands that do not train never load torch, and the quick ones nothing that they have no use for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.jobs.history import open_history

PROBE = """
import os, runpy, sys
def leave(code):
    watched = {"torch", "numpy", "scipy", "transformers", "safetensors", *os.environ.get("WATCHED", "").split()}
    heavy = sorted(set(sys.modules) & watched)
    sys.stderr.write("loaded:" + ",".join(heavy) + f" code:{code}")
    sys.stderr.flush()
    os.kill(os.getpid(), 9)
os._exit = leave
runpy.run_module("llmb.cli.main", run_name="__main__", alter_sys=True)
"""


CATALOGUE = ("yaml", "llmb.catalogue.schema", "llmb.catalogue.load", "llmb.catalogue.variables")
RUNS = ("llmb.runs.plan", "llmb.runs.record", "llmb.runs.result", "llmb.jobs.refresh", "llmb.schedulers.slurm.client")


def loaded(*arguments: str, watched: tuple[str, ...] = (), install: Path | None = None) -> str:
    """Heavy and watched modules that a command loaded, and its exit code, taken the moment it leaves."""
    command = [sys.executable, "-c", PROBE, *arguments]
    variables = os.environ | {"WATCHED": " ".join(watched)} | ({"LLMB_INSTALL": str(install)} if install else {})
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    return found.stderr.rpartition("loaded:")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("list",),
        ("list", "--json"),
        ("checkpoint", "--help"),
        ("checkpoint", "export", "--help"),
        ("show", "-w", "pretrain_llama3.1", "-s", "8b"),
        ("metrics", "-w", "pretrain_llama3.1", "-s", "8b", "--step-time", "12.27"),
    ],
)
def test_quick_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert loaded(*arguments) == " code:0"


@pytest.mark.parametrize(
    "arguments",
    [("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--dry-run"), ("run", "--help")],
)
def test_even_a_run_is_planned_without_torch(arguments: tuple[str, ...]) -> None:
    modules, _, code = loaded(*arguments).partition(" code:")
    assert "torch" not in modules
    assert code == "0"


@pytest.mark.parametrize("arguments", [("list",), ("show", "-w", "pretrain_llama3.1", "-s", "8b")])
def test_the_catalogue_is_shown_without_what_terminals_jobs_and_runs_need(arguments: tuple[str, ...]) -> None:
    watched = ("rich.console", "rich.table", "sqlite3", "llmb.catalogue.variables", *RUNS)
    assert loaded(*arguments, watched=watched) == " code:0"


@pytest.mark.parametrize("command", [("jobs", "list"), ("runs",)])
def test_a_history_without_live_jobs_is_listed_without_the_catalogue_and_slurm(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "cluster_config.yaml").touch()
    open_history(tmp_path, print).close()
    watched = ("rich.console", "rich.table", *CATALOGUE, *RUNS)
    assert loaded(*command, watched=watched, install=tmp_path) == " code:0"


def test_the_probe_sees_what_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML is loaded the first time; then the content of the data files is in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    catalogue = "llmb.catalogue.load,llmb.catalogue.schema"
    assert loaded("list", watched=CATALOGUE) == f"{catalogue},yaml code:0"
    assert loaded("list", watched=CATALOGUE) == f"{catalogue} code:0"


def test_the_probe_sees_torch_when_it_is_there() -> None:
    probe = PROBE.replace("import os, runpy, sys", "import os, runpy, sys, torch", 1)
    found = subprocess.run([sys.executable, "-c", probe, "--help"], capture_output=True, text=True, check=False)
    assert "torch" in found.stderr.rpartition("loaded:")[2]


def closed(streams: str, *words: str) -> "subprocess.CompletedProcess[str]":
    script = f'exec "$@" {streams}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "llmb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_closed_standard_output_is_an_error(tmp_path: Path) -> None:
    done = closed(">&-", "list")
    assert (done.returncode, "standard output is closed" in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr
    assert closed(">&- 2>&-", "list").returncode == 3


def test_messages_to_a_closed_stream_are_lost_alone(tmp_path: Path) -> None:
    done = closed("<&- 2>&-", "list")
    assert done.returncode == 0
    assert "pretrain_llama3.1" in done.stdout
    assert closed("2>&-", "list", "--nonsense").returncode == 2
