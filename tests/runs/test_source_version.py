# SPDX-License-Identifier: Apache-2.0
"""The commit of llmb is what git says, or what pip recorded."""

import subprocess
from pathlib import Path

import pytest

from llmb.runs.source_version import NO_COMMIT, NOT_GIT, installed_version, source_version

COMMIT = "1" * 40
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *AUTHOR, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With one commit of a package."""
    root = tmp_path / "checkout"
    package = root / "src" / "llmb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (root / "notes.txt").write_text("")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "First")
    return root


def package_of(root: Path) -> Path:
    return root / "src" / "llmb"


def test_only_what_was_changed_in_the_package_is_a_modification(checkout: Path) -> None:
    package = package_of(checkout)
    assert source_version(package) == (git(checkout, "rev-parse", "HEAD"), False, None)
    (checkout / "notes.txt").write_text("not part of the package")
    assert source_version(package).modified is False
    (package / "new.py").write_text("")
    assert source_version(package).modified is True
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "Second")
    assert source_version(package).modified is False
    (package / "new.py").write_text("x = 1")
    assert source_version(package).modified is True


def test_a_worktree_has_its_own_commit(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    git(checkout, "worktree", "add", "-q", "-b", "topic/one", str(tmp_path / "worktree"))
    git(checkout, "commit", "-qm", "Second", "--allow-empty")
    assert source_version(package_of(tmp_path / "worktree")) == (first, False, None)
    assert source_version(package_of(checkout)).commit != first


def test_without_git_or_a_commit_it_is_unknown(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(checkout, "checkout", "-q", "--orphan", "empty")
    assert source_version(package_of(checkout)) == (None, None, NO_COMMIT)
    git(checkout, "checkout", "-q", "main")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert source_version(package_of(checkout)) == (None, None, NO_COMMIT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f'{{"url": "https://x/llmb.git", "vcs_info": {{"vcs": "git", "commit_id": "{COMMIT}"}}}}',
            (COMMIT, False, None),
        ),
        ('{"url": "file:///home/me/llmb", "dir_info": {}}', (None, None, NOT_GIT)),
        ("no JSON", (None, None, NOT_GIT)),
        ("[]", (None, None, NOT_GIT)),
        (None, (None, None, NOT_GIT)),
    ],
)
def test_what_pip_recorded(text: str | None, expected: tuple[str | None, bool | None, str | None]) -> None:
    assert installed_version(text) == expected
