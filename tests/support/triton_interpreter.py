"""Runs kernels written in Triton on a CPU, in Triton's interpreter, with the numbers of a GPU.

The interpreter must be chosen before Triton is imported, so tests that use it run in a process of their own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch


def run_interpreted(tests: Path) -> None:
    """Runs a file of tests in which kernels are interpreted; fails with its output."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(autouse=True)
def numbers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Casts between floating-point formats to the nearest value; the interpreter's own truncate. No warnings of NaN.

    To be imported by a file of tests that are run by ``run_interpreted``.
    """
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    with np.errstate(all="ignore"):
        yield


def convert(values, source, target, rounding_mode):
    """``values`` hold the bits of ``source``'s format; returns those of ``target``'s."""
    bits = torch.from_numpy(values.copy()).view(torch_dtype(source)).to(torch_dtype(target))
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[bits.element_size()]
    return bits.view(unsigned).numpy()


def torch_dtype(dtype) -> torch.dtype:
    names = {
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
    return names[dtype.name]
