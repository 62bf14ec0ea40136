# SPDX-License-Identifier: Apache-2.0
"""Whichever Triton module is deleted, a GPU computes by the torch code beside it."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import llmb
from llmb.engine.kernels import fp8_cast

HERE, SUPPORT = Path(__file__).parent, Path(__file__).parents[2] / "support"
PACKAGE = Path(llmb.__file__).parent
FOLDER = Path(fp8_cast.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*_triton.py"))


# What rotation computes is cast, so that without the casts its module is not used either.
@pytest.mark.parametrize(
    "deleted",
    [pytest.param(name, marks=[pytest.mark.measured] * (name != "fp8_cast_triton")) for name in MODULES],
)
@pytest.mark.slow
def test_a_gpu_computes_without_a_deleted_module(deleted: str, tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("triton", importlib.util.find_spec("triton") is not None, "Triton is not installed")
    shutil.copytree(PACKAGE, tmp_path / "llmb", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / FOLDER.relative_to(PACKAGE.parent) / f"{deleted}.py").unlink()
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, SUPPORT))), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "without_kernel.py"), deleted]
    ran = subprocess.run(
        command, env=os.environ | paths | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_missing_triton_is_an_error_and_no_slower_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llmb.engine.kernels.fp8_cast_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match="triton"):
        fp8_cast.is_there("fp8_cast_triton")


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
    return []


def test_no_module_needs_a_kernel_when_it_is_imported() -> None:
    """Only functions import Triton modules, once they know that the module is there."""
    for path in FOLDER.parent.rglob("*.py"):
        if path.stem not in MODULES:
            names = [name for node in ast.parse(path.read_text()).body for name in imports(node)]
            assert not [name for name in names if name.rpartition(".")[2] in MODULES], path
