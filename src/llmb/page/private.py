# SPDX-License-Identifier: Apache-2.0
"""What a page that is sent to others does not tell: secrets, home folders, names of users and of hosts."""

import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from getpass import getuser
from pathlib import Path

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.secrets import redacted
from llmb.shown_text import printable_lines

_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[^/\s:;,'\"]+|(?<![\w./])/root(?=[/\s:;,'\"]|$)")
SYSTEM_USERS = ("root", "daemon")
"""Accounts of a system, whose names say nothing of a person."""
NO_HOST = ("localhost",)


def public_text(runs: Iterable[AnalyzedRun], root: Path) -> Callable[[str], str]:
    """A function that returns a text as a page shows it without ``--full``."""
    hosts = dict.fromkeys(name for run in runs for name in _hosts(run))
    hosts |= dict.fromkeys((socket.gethostname(), socket.getfqdn()))
    named = {name: f"host-{number}" for number, name in enumerate((h for h in hosts if h not in NO_HOST), start=1)}
    user = _user()
    if user and user not in SYSTEM_USERS:
        named[user] = "user"
    folders = {str(root): "$LLMB_INSTALL", str(root.resolve()): "$LLMB_INSTALL", str(Path.home()): "~"}
    return partial(_hidden, folders, _names(named), named)


def full_text(text: str) -> str:
    """With names and folders; secrets are left out, and nothing that a terminal would obey is kept."""
    return printable_lines(redacted(text))


def _hosts(run: AnalyzedRun) -> Iterator[str]:
    yield from run.nodes
    if run.record and run.record.job:
        yield run.record.job.nodes


def _user() -> str | None:
    try:
        return getuser()
    except (KeyError, OSError):
        return None


def _names(named: Mapping[str, str]) -> re.Pattern[str]:
    """Finds any of the names as a word, the longest first."""
    ordered = sorted(named, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, ordered))})(?![\w-])" if ordered else r"(?!)")


def _hidden(folders: Mapping[str, str], names: re.Pattern[str], named: Mapping[str, str], text: str) -> str:
    text = full_text(text)
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            text = re.sub(rf"{re.escape(folder)}(?![\w-])", lambda _: folders[folder], text)  # noqa: B023
    text = _HOME.sub("~", text)
    return names.sub(lambda found: named[found[0]], text)
