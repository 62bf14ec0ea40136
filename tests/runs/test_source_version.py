# SPDX-License-Identifier: Apache-2.0
"""The commit of llmb is read from git's files, or from what pip recorded."""

import subprocess
from pathlib import Path

import pytest

from llmb.runs.source_version import NO_COMMIT, NO_GIT, NOT_GIT, installed_version, source_version

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


def test_a_worktree_packed_references_and_a_detached_head(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    worktree = tmp_path / "worktree"
    git(checkout, "worktree", "add", "-q", "-b", "topic/one", str(worktree))
    assert source_version(package_of(worktree)) == (first, False, None)
    git(checkout, "pack-refs", "--all")
    assert source_version(package_of(worktree)) == (first, False, None)
    assert source_version(package_of(checkout)).commit == first
    git(worktree, "checkout", "-q", "--detach")
    assert source_version(package_of(worktree)).commit == first


def test_without_git_the_commit_is_known_and_a_change_is_not(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert source_version(package_of(checkout)) == (commit, None, NO_GIT)


def test_a_repository_without_a_commit_is_unknown(tmp_path: Path) -> None:
    package = package_of(tmp_path)
    package.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    assert source_version(package) == (None, None, NO_COMMIT)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert source_version(package) == (None, None, NO_COMMIT)


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
