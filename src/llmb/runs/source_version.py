# SPDX-License-Identifier: Apache-2.0
"""The git commit of the llmb that runs: of its checkout, or as it was recorded when llmb was built or installed."""

import json
from pathlib import Path
from typing import NamedTuple

import llmb
from llmb.tools import ask_program

PACKAGE = Path(llmb.__file__).resolve().parent
COMMIT_FILE = "commit.txt"
PATIENCE_S = 5.0
"""How long git may take to compare the source with the commit; on a slow file system the answer is then unknown."""
MOST_LINKS = 5
NOT_GIT = "llmb was installed from a package, which does not record its commit"
NO_COMMIT = "the checkout of llmb has no commit that can be read"
NO_GIT = "git, which compares the source with the commit, cannot be run here"


class SourceVersion(NamedTuple):
    """None is unknown, for ``reason``."""

    commit: str | None
    modified: bool | None
    reason: str | None

    def text(self) -> str:
        """For people."""
        if self.commit is None:
            return f"commit unknown: {self.reason}"
        changes = {True: ", modified", False: "", None: ", perhaps modified"}[self.modified]
        return f"commit {self.commit[:12]}{changes}"


def source_version(package: Path = PACKAGE) -> SourceVersion:
    """Reads git's files, and runs git only to see whether the source of ``package`` was modified."""
    checkout = next((folder for folder in package.parents[:2] if (folder / ".git").exists()), None)
    if checkout is None:
        return _built(package) or _installed()
    commit = _head(checkout / ".git")
    if commit is None:
        return SourceVersion(None, None, NO_COMMIT)
    modified = _is_modified(checkout, package)
    return SourceVersion(commit, modified, NO_GIT if modified is None else None)


def installed_version(text: str | None) -> SourceVersion:
    """By the text of ``direct_url.json``, which pip writes for what it installs from elsewhere than an index. Pure."""
    try:
        commit = json.loads(text or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError, TypeError):
        return SourceVersion(None, None, NOT_GIT)
    return SourceVersion(str(commit), False, None)


def _built(package: Path) -> SourceVersion | None:
    """As setup.py recorded it; None where it was built without one."""
    try:
        commit, _, modified = (package / COMMIT_FILE).read_text().strip().partition("-")
    except OSError:
        return None
    return SourceVersion(commit, bool(modified), None)


def _installed() -> SourceVersion:
    from importlib.metadata import PackageNotFoundError, distribution  # slow to load, and seldom asked

    try:
        return installed_version(distribution("llmb").read_text("direct_url.json"))
    except (PackageNotFoundError, OSError):
        return installed_version(None)


def _head(git: Path) -> str | None:
    """The commit that is checked out, by the files of a repository or of one of its worktrees."""
    try:
        if git.is_file():  # of a worktree, which names its folder
            git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        shared = git / "commondir"
        common = (git / shared.read_text().strip()).resolve() if shared.exists() else git
        text = (git / "HEAD").read_text().strip()
        for _ in range(MOST_LINKS):
            if not text.startswith("ref:"):
                return text or None
            text = _reference(git, common, text.removeprefix("ref:").strip())
    except (OSError, ValueError):
        pass
    return None


def _reference(git: Path, common: Path, name: str) -> str:
    for folder in (git, common):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return ""


def _is_modified(checkout: Path, package: Path) -> bool | None:
    """Whether a file of the package differs from the commit, or is not in it; None if git does not tell."""
    command = ["git", "--no-optional-locks", "-C", str(checkout), "status", "--porcelain", "--", str(package)]
    said = ask_program(command, PATIENCE_S)
    return None if said.problem else bool(said.text.strip())
