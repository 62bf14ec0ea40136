# SPDX-License-Identifier: Apache-2.0
"""A session that writes a marked secret fails, and names the file; one that writes none passes."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import marked_secrets
import pytest
from marked_secrets import CommandLines, marked_files, markers

SUPPORT = Path(marked_secrets.__file__).parent
CLEAN = "def test_it(tmp_path):\n    (tmp_path / 'a').write_text('nothing')\n"
IMPORTS = "import gzip, os, subprocess, time, marked_secrets\n"
# The process lasts until it was seen, or in a process beside the one that looks, for several looks.
WRITES = """
def test_it(tmp_path, request):
    lines = request.config.stash[marked_secrets.KEY].lines
    (tmp_path / 'notes').write_text('token ' + os.environ['HF_TOKEN'])
    (tmp_path / 'trace.json.gz').write_bytes(gzip.compress(os.environ['NGC_API_KEY'].encode()))
    with subprocess.Popen(['sh', '-c', 'read line', os.environ['WANDB_API_KEY']], stdin=subprocess.PIPE):
        end = time.monotonic() + (60 if lines.thread else 20)
        while not lines.found and time.monotonic() < end:
            time.sleep(0.1)
"""
FINDINGS = (
    "the command line of a process, sh: WANDB_API_KEY",
    "test_it0/notes: HF_TOKEN",
    "test_it0/trace.json.gz: NGC_API_KEY",
)


def session(folder: Path, test: str, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text("pytest_plugins = ['marked_secrets']\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    (folder / "test_one.py").write_text(f"{IMPORTS}{test}")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/base", *options],
        env={**own, "PYTHONPATH": str(SUPPORT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_session_that_writes_markers_fails_and_says_where(tmp_path: Path) -> None:
    code, output = session(tmp_path, WRITES)
    assert code == 1, output
    assert "1 passed" in output
    assert [finding for finding in FINDINGS if finding not in output] == [], output


def test_a_session_that_writes_none_passes(tmp_path: Path) -> None:
    code, output = session(tmp_path, CLEAN)
    assert code == 0, output
    assert "secrets that were written" not in output


@pytest.mark.slow
def test_what_one_of_several_processes_writes_is_found(tmp_path: Path) -> None:
    code, output = session(tmp_path, WRITES, "-n", "2")
    assert code == 1, output
    assert [finding for finding in FINDINGS if finding not in output] == [], output


def test_a_value_of_a_database_is_found_across_its_pages(tmp_path: Path) -> None:
    marked = markers("four")
    secret = marked["WANDB_API_KEY"]
    file = tmp_path / "jobs.sqlite"
    for size in range(0, 8192, len(secret) // 2):
        text = f"{'x' * size}{secret}{'y' * (8192 - size)}"
        file.unlink(missing_ok=True)
        with closing(sqlite3.connect(file)) as history, history:
            history.execute("PRAGMA synchronous = OFF")
            history.execute("CREATE TABLE jobs (text TEXT)")
            history.execute("INSERT INTO jobs VALUES (?)", (text,))
        if secret.encode() not in file.read_bytes():
            break
    else:
        pytest.fail("the value is in one place of the file whatever is before it")
    assert marked_files(tmp_path, marked) == [f"{file}: WANDB_API_KEY"]


def test_one_of_many_files_is_found(tmp_path: Path) -> None:
    """More than fit into one command line."""
    marked = markers("five")
    for number in range(1500):
        (tmp_path / f"{'long' * 30}-{number}").touch()
    for number in (0, 700, 1499):
        (tmp_path / f"{'long' * 30}-{number}").write_text(marked["HF_TOKEN"])
    assert len(marked_files(tmp_path, marked)) == 3


def test_the_environment_is_marked_here() -> None:
    assert os.environ["HF_TOKEN"].startswith("hf_")
    assert len(os.environ["WANDB_API_KEY"]) == 40
    assert os.environ["NGC_API_KEY"].startswith("nvapi-")


def test_what_slurm_keeps_of_a_job_is_known_and_no_other_file_beside_it(tmp_path: Path) -> None:
    marked = markers("one")
    job = tmp_path / "slurm0" / "state" / "hash.3" / "job.17"
    job.mkdir(parents=True)
    (job / "environment").write_text(f"HF_TOKEN={marked['HF_TOKEN']}")
    assert marked_files(tmp_path, marked) == []
    (job / "script").write_text(f"export HF_TOKEN={marked['HF_TOKEN']}")
    assert marked_files(tmp_path, marked) == [f"{job}/script: HF_TOKEN"]


def test_the_ends_of_a_large_file_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked_secrets, "LARGEST_BYTES", 1 << 16)
    monkeypatch.setattr(marked_secrets, "SAMPLED_BYTES", 1 << 10)
    marked = markers("two")
    (tmp_path / "weights").write_bytes(bytes(1 << 17) + marked["NGC_API_KEY"].encode())
    (tmp_path / "limit").write_bytes(bytes((1 << 16) - 64 - len("nvapi-")) + marked["NGC_API_KEY"].encode())
    assert marked_files(tmp_path, marked) == [f"{tmp_path}/limit: NGC_API_KEY", f"{tmp_path}/weights: NGC_API_KEY"]


def test_a_command_line_is_seen() -> None:
    lines = CommandLines(markers("three"))
    command = ["sh", "-c", "echo up; read line", lines.marked["NGC_API_KEY"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # The system shows no command line for a moment after the process began.
        assert lines.stop() == ["the command line of a process, sh: NGC_API_KEY"]
