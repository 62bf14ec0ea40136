# SPDX-License-Identifier: Apache-2.0
"""Marks the secrets of a whole test session, and fails the session if one is found in what was written.

A plugin of pytest. The markers are in the environment of every test and of all that tests start, where a test sets no
value of its own. The command lines of this user's processes are sampled. At the end all files below the session's
temporary folder are searched, which holds install roots, histories and the state of test clusters. SLURM_JWT is not
set, as Slurm's own commands would use it.

Not searched: what a test itself removed, the middle of files above ``LARGEST_BYTES``, and ``IS_KNOWN``.
"""

import gzip
import hashlib
import os
import re
import secrets
import sqlite3
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

FORMS = {"HF_TOKEN": ("hf_", 34), "WANDB_API_KEY": ("", 40), "NGC_API_KEY": ("nvapi-", 64)}
"""How each issuer's tokens begin, and how many characters follow."""
IS_KNOWN = re.compile(r"/state/hash\.\d/job\.\d+/environment$")
"""Slurm's controller keeps the environment that sbatch passes to a job, in StateSaveLocation, until it forgets the job.
Preparations are passed HF_TOKEN in this way, and no run is: the tests of ``launch/slurm`` look there."""
LARGEST_BYTES = 256 << 20
SAMPLED_BYTES = 32 << 20
EVERY_S = 2.0
PROCESSES = Path("/proc")


def markers(salt: str) -> dict[str, str]:
    """A value for each variable that no other session has, of the form that its issuer gives it."""
    found = {}
    for name, (start, length) in FORMS.items():
        found[name] = start + hashlib.sha512(f"{salt} {name}".encode()).hexdigest()[:length]
    return found


def names_in(content: bytes, marked: Mapping[str, str]) -> list[str]:
    return [name for name, value in marked.items() if value.encode() in content]


def marked_files(folder: Path, marked: Mapping[str, str]) -> list[str]:
    """Each file below ``folder`` that holds a marker, with the names of the variables."""
    found = {path: names_in(_content(path), marked) for path in [*_plain(folder, marked), *_large(folder)]}
    for path in _found(folder, "(", "-name", "*.sqlite", "-o", "-name", "*.gz", ")"):
        found.setdefault(path, names_in(_unpacked(path), marked))
    listed = sorted((str(path), names) for path, names in found.items() if names)
    return [f"{path}: {', '.join(names)}" for path, names in listed if not IS_KNOWN.search(path)]


def _plain(folder: Path, marked: Mapping[str, str]) -> list[Path]:
    """By grep, which reads a gigabyte in a second. The markers are no argument: other processes see these."""
    script = 'find "$0" -type f -size -"$1"c -print0 | xargs -0 -r grep -lFZ -f "$2"'
    with tempfile.NamedTemporaryFile("w", prefix="markers") as file:
        file.write("\n".join(marked.values()))
        file.flush()
        command = ["sh", "-c", script, str(folder), str(LARGEST_BYTES), file.name]
        return _paths(command)


def _large(folder: Path) -> list[Path]:
    return _found(folder, "-size", f"+{LARGEST_BYTES - 1}c")


def _found(folder: Path, *conditions: str) -> list[Path]:
    return _paths(["find", str(folder), "-type", "f", *conditions, "-print0"])


def _paths(command: Sequence[str]) -> list[Path]:
    """Those that a command prints; it complains about files that were removed in the meantime."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _content(path: Path) -> bytes:
    """All of a file, or the beginning and the end of a large one."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < LARGEST_BYTES:
                return file.read()
            beginning = file.read(SAMPLED_BYTES)
            file.seek(-SAMPLED_BYTES, os.SEEK_END)
            return beginning + file.read()
    except OSError:
        return b""


def _unpacked(path: Path) -> bytes:
    """What a database or a compressed file says; nothing if it is damaged, as some are on purpose."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(_content(path))
        with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as history:
            history.text_factory = bytes
            tables = [name.decode() for (name,) in history.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            return b"\n".join(
                repr(row).encode() for table in tables for row in history.execute(f'SELECT * FROM "{table}"')
            )
    except (sqlite3.Error, UnicodeDecodeError, OSError, EOFError, zlib.error):
        return b""


@dataclass
class CommandLines:
    """Samples the command lines of this user's processes, and keeps those with a marker."""

    marked: Mapping[str, str]
    found: dict[str, None] = field(default_factory=dict)
    every_s: float = EVERY_S
    ended: Event = field(default_factory=Event)
    thread: Thread | None = None

    def start(self) -> None:
        self.thread = Thread(target=self._sample, name="command lines", daemon=True)
        self.thread.start()

    def stop(self) -> list[str]:
        self.ended.set()
        if self.thread:
            self.thread.join()
        self.look()
        return list(self.found)

    def _sample(self) -> None:
        while not self.ended.wait(self.every_s):
            self.look()

    def look(self) -> None:
        """All each time: a process that was seen may have become another program since."""
        for line in _command_lines():
            if names := names_in(line, self.marked):
                shown = line.split(b"\0")[0].decode(errors="replace")
                self.found[f"the command line of a process, {shown}: {', '.join(names)}"] = None


def _command_lines() -> Iterator[bytes]:
    for entry in os.scandir(PROCESSES):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.geteuid():
                    yield (PROCESSES / entry.name / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended


@dataclass
class Session:
    """The markers of this session, what was in their place before, and what was found."""

    salt: str
    before: dict[str, str | None]
    lines: CommandLines
    found: list[str] = field(default_factory=list)


KEY = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    """Processes of pytest-xdist have the markers of the one that started them."""
    worker: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    salt = str(worker["marked_salt"]) if worker else secrets.token_hex(16)
    marked = markers(salt)
    before = {name: os.environ.get(name) for name in marked}
    os.environ.update(marked)
    config.stash[KEY] = Session(salt, before, CommandLines(marked))
    if worker is None:
        config.stash[KEY].lines.start()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["marked_salt"] = node.config.stash[KEY].salt


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    kept = session.config.stash[KEY]
    folders: Any = session.config
    kept.found = kept.lines.stop() + marked_files(folders._tmp_path_factory.getbasetemp(), markers(kept.salt))
    if kept.found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash[KEY].found:
        terminalreporter.section("secrets that were written", red=True)
        for line in found:
            terminalreporter.write_line(f"FAILED {line}")


def pytest_unconfigure(config: pytest.Config) -> None:
    for name, value in config.stash[KEY].before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
