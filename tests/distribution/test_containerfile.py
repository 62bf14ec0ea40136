# SPDX-License-Identifier: Apache-2.0
"""What the Containerfile asks of a base that has torch, without building it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONTAINERFILE = Path(__file__).resolve().parents[2] / "Containerfile"


@pytest.mark.parametrize(
    ("version", "kept"), [("2.10.0a0+b4e4ee81d3", False), ("2.11.0a0", True), ("2.12.0a0+1.nv26", True), ("3.0", True)]
)
def test_a_torch_of_the_base_that_is_too_old_ends_the_build(tmp_path: Path, version: str, kept: bool) -> None:
    (check,) = re.findall(r'python -c "([^"]*torch\.__version__[^"]*)"', CONTAINERFILE.read_text())
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) is kept
    assert kept or version in done.stderr
