# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmb import __version__
from llmb.cli import install

Install = Callable[..., Any]


@pytest.fixture
def small_python(tmp_path: Path) -> Path:
    """Stands for an interpreter that has llmb and torch, without the seconds that torch takes to load."""
    path = tmp_path / "python"
    told = json.dumps({"python": "3.12.1", "llmb": __version__, "torch": "2.11.0", "cuda": None})
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``llmb install`` without a terminal; raises what the command raises."""
    for name in ("LLMB_INSTALL", "STAGE_PATH"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(install.app, [str(item) for item in arguments], catch_exceptions=False)

    return run


@pytest.fixture
def here(call: Install, small_python: Path, tmp_path: Path) -> Install:
    """The same of an installation on this machine, in ``tmp_path``/root."""
    fixed = ("--scheduler", "local", "--gpu-type", "cpu", "--environment", "existing", "--python", small_python)
    return lambda *arguments: call(tmp_path / "root", *fixed, *arguments)
