# SPDX-License-Identifier: Apache-2.0
"""Commands of llmb: ``llmb`` and ``call_llmb`` call them in the process of the tests, ``llmb_program`` as programs."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from llmb.cli.main import app, as_spoken, exit_code_of

STARTED_IN = Path.cwd()
MODULE = ("-m", "llmb.cli.main")
WITHIN_S = 600


class Done(subprocess.CompletedProcess[str]):
    """The end of a command, and what it wrote."""

    @property
    def document(self) -> dict[str, Any]:
        """Written to standard output, or to standard error by a command that failed."""
        found: dict[str, Any] = json.loads(self.stdout or self.stderr)
        return found


Run = Callable[..., Done]


def call_llmb(*words: object) -> Done:
    """Calls ``llmb`` in the environment and the folder of this process."""
    out, err = (TextIOWrapper(BytesIO(), encoding="utf-8", errors="surrogateescape", newline="") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code_of(app, as_spoken([*map(str, words)]))
    written = []
    for stream in (out, err):
        stream.flush()
        written.append(stream.buffer.getvalue().decode("utf-8", "backslashreplace"))  # type: ignore[attr-defined]
    return Done(words, code, *written)


def runner(home: Path, install: Path, outside: Mapping[str, str]) -> Run:
    """Calls ``llmb`` with given variables and those that differ from ``outside``; an empty one is unset.

    If there is a ``code``, it has to be the command's.
    """

    def run(*words: object, code: int | None = None, **variables: str) -> Done:
        own = {name: value for name, value in os.environ.items() if outside.get(name) != value}
        usual = {"PATH": os.environ["PATH"], "HOME": str(home), "LLMB_INSTALL": str(install)}
        given = {**usual, **own, **variables}
        with pytest.MonkeyPatch.context() as patch:
            for name in set(os.environ) - set(given):
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value) if value else patch.delenv(name, raising=False)
            if Path.cwd() == STARTED_IN:
                patch.chdir(home)
            done = call_llmb(*words)
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    return run


def program_runner(python: str) -> Run:
    """Calls ``llmb`` as a program, for an install root, with more variables; asserts its exit code."""

    def run(install: Path, *words: object, code: int = 0, **variables: str) -> Done:
        command, environ = [python, *MODULE, *map(str, words)], environ_of(install, **variables)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return Done(command, code, done.stdout, done.stderr)

    return run


def environ_of(install: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "LLMB_INSTALL": str(install), **variables}
