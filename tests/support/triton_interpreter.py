# SPDX-License-Identifier: Apache-2.0
"""Runs tests of kernels written in Triton: on a CPU in Triton's interpreter, or on a GPU.

The interpreter must be chosen before Triton is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = "TRITON_INTERPRET"


def run_cases(*tests: Path, interpreted: bool) -> None:
    """Runs files of tests, which have the fixture ``device``, in one process; fails with its output."""
    options = ["-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
    command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {INTERPRETED, "PYTEST_ADDOPTS"} and not name.startswith("PYTEST_XDIST_")
    }
    environment["OMP_NUM_THREADS"] = "1"  # threads on cores that other tests use wait for each other
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    if interpreted:
        environment[INTERPRETED] = "1"
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the tensors given to kernels."""
    return torch.device("cpu" if os.environ.get(INTERPRETED) else "cuda")


@pytest.fixture(scope="session", autouse=True)
def interpreted_language(device: torch.device) -> None:
    """Triton's language is made that of the interpreter once; each call of a function would search it all again."""
    if device.type == "cpu":
        from triton import language
        from triton.runtime import interpreter

        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        interpreter._patch_lang = lambda _function: interpreter._LangPatchScope()


@pytest.fixture(autouse=True)
def as_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounds casts between floating-point formats to the nearest value; the interpreter itself truncates them."""
    if device.type == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "_convert_float", convert)
    with np.errstate(all="ignore"):
        yield


def convert(values: Any, source: Any, target: Any, _rounding: object) -> Any:
    """``values`` hold the bits of numbers in the format ``source``; returns those of ``target``."""
    found = torch.from_numpy(values.copy()).view(FORMATS[source.name]).to(FORMATS[target.name])
    return found.view(UNSIGNED[found.element_size()]).numpy()


FORMATS = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""By Triton's name."""
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""By the size in bytes."""
