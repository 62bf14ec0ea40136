# SPDX-License-Identifier: Apache-2.0
"""The git commit of the running llmb: from its checkout, or recorded when llmb was built or installed."""

import json
from pathlib import Path
from typing import NamedTuple

import llmb
from llmb.base.tools import ask_program

PACKAGE = Path(llmb.__file__).resolve().parent
COMMIT_FILE = "commit.txt"
PATIENCE_S = 5.0
"""Time limit of git, in seconds."""
NOT_GIT = "llmb was installed from a package, which does not record its commit"
NO_COMMIT = "git reports no commit for the checkout of llmb here"
NOT_COMPARED = "git did not compare the source with the commit"


class SourceVersion(NamedTuple):
    """The version of llmb's source. Unknown values are None, with the ``reason``."""

    commit: str | None
    modified: bool | None
    reason: str | None

    def text(self) -> str:
        """Describe the version for display."""
        if self.commit is None:
            return f"commit unknown: {self.reason}"
        changes = {True: ", modified", False: "", None: ", perhaps modified"}[self.modified]
        return f"commit {self.commit[:12]}{changes}"


def source_version(package: Path = PACKAGE) -> SourceVersion:
    """Return the version from git if ``package`` is in a checkout, or else from its build or installation."""
    checkout = next((folder for folder in package.parents[:2] if (folder / ".git").exists()), None)
    if checkout is None:
        return _built(package) or _installed()
    commit = _git(checkout, "rev-parse", "HEAD")
    if not commit:
        return SourceVersion(None, None, NO_COMMIT)
    changes = _git(checkout, "status", "--porcelain", "--", str(package))
    return SourceVersion(commit, None, NOT_COMPARED) if changes is None else SourceVersion(commit, bool(changes), None)


def _git(checkout: Path, *words: str) -> str | None:
    output = ask_program(["git", "--no-optional-locks", "-C", str(checkout), *words], PATIENCE_S)
    return None if output.problem else output.text.strip()


def installed_version(text: str | None) -> SourceVersion:
    """Parse ``direct_url.json``, which pip writes for packages that do not come from an index. Pure."""
    try:
        commit = json.loads(text or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError, TypeError):
        return SourceVersion(None, None, NOT_GIT)
    return SourceVersion(str(commit), False, None)


def _built(package: Path) -> SourceVersion | None:
    try:
        commit, _, modified = (package / COMMIT_FILE).read_text().strip().partition("-")
    except OSError:
        return None
    return SourceVersion(commit, bool(modified), None)


def _installed() -> SourceVersion:
    from importlib.metadata import PackageNotFoundError, distribution  # slow to load, and seldom needed

    try:
        return installed_version(distribution("llmb").read_text("direct_url.json"))
    except (PackageNotFoundError, OSError):
        return installed_version(None)
