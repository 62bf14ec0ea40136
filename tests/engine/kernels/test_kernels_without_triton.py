# SPDX-License-Identifier: Apache-2.0
"""A machine without a GPU need not have Triton."""

import ast
from pathlib import Path

from llmb.engine.kernels import elementwise

FOLDER = Path(elementwise.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*_triton.py"))


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
    return []


def test_no_module_needs_a_kernel_when_it_is_imported() -> None:
    """Only functions import Triton modules, once they know that there is a GPU."""
    for path in FOLDER.parent.rglob("*.py"):
        if path.stem not in MODULES:
            names = [name for node in ast.parse(path.read_text()).body for name in imports(node)]
            assert not [name for name in names if name.rpartition(".")[2] in MODULES], path
