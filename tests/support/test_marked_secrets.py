# SPDX-License-Identifier: Apache-2.0
"""A session that writes a marked secret fails, and names the file; one that writes none passes."""

import os
import subprocess
import sys
from pathlib import Path

import marked_secrets

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


def test_the_environment_is_marked_here() -> None:
    assert os.environ["HF_TOKEN"].startswith("hf_")
    assert len(os.environ["WANDB_API_KEY"]) == 40
    assert os.environ["NGC_API_KEY"].startswith("nvapi-")
