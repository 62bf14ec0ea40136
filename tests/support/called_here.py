# SPDX-License-Identifier: Apache-2.0
"""Commands of llmb in the process of the tests, with an environment of their own."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.cli.main import app, exit_code_of

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def runner(home: Path, install: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls ``llmb`` with arguments and variables; an empty variable is unset."""

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        given = {"PATH": os.environ["PATH"], "HOME": str(home), "LLMB_INSTALL": str(install), **variables}
        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(given):
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value) if value else patch.delenv(name, raising=False)
            patch.chdir(home)
            capsys.readouterr()
            code = exit_code_of(app, list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run
