# SPDX-License-Identifier: Apache-2.0
"""Records the commit in what is built from a checkout; everything else is in pyproject.toml."""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
COMMIT_FILE = Path("src", "llmb", "commit.txt")
"""In an sdist; in a wheel and in what is installed it is llmb/commit.txt. A checkout has none."""


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str | None:
    """LLMB_COMMIT where the build has no .git, as in a container; with ``-modified`` if files differ from it."""
    if (HERE / COMMIT_FILE).exists():
        return (HERE / COMMIT_FILE).read_text().strip()
    head = _git("rev-parse", "HEAD") if (HERE / ".git").exists() else None
    if head is None:
        return os.environ.get("LLMB_COMMIT")
    return f"{head}-modified" if _git("status", "--porcelain", "--", "src") else head


def _record(path: Path) -> None:
    commit = _commit()
    if commit:
        path.write_text(f"{commit}\n")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _record(Path(self.build_lib, "llmb", "commit.txt"))


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _record(Path(base_dir, COMMIT_FILE))


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
