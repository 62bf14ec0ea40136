# SPDX-License-Identifier: Apache-2.0
"""Kernels are tried with other sizes than the engine's; how fast they are is for a GPU."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks import kernel_variants
from benchmarks.fused_kernels import SETS, Case, kernels_of
from benchmarks.kernel_variants import VARIANTS, Measured, header, lines, measure

from llmb.engine.kernels import elementwise

COMMAND = [sys.executable, "-m", "benchmarks.kernel_variants"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def triton(needs: Callable[[str, bool, str], None]) -> None:
    needs("triton", importlib.util.find_spec("triton") is not None, "Triton is not installed")


class Kernels(ModuleType):
    """Whose result is wrong with tiles of 2, and which does not run with tiles of 3."""

    TILE = 4

    def function(self, one: torch.Tensor) -> torch.Tensor:
        from triton.runtime.errors import OutOfResources

        if self.TILE == 3:
            raise OutOfResources(2, 1, "shared memory")
        return one * self.TILE if self.TILE == 2 else one


def test_sizes_are_of_the_modules_of_kernels(triton: None) -> None:
    for module in map(kernels_of, ("cast_both_ways", "cast_rotated_gradient")):
        own, *_ = variants = VARIANTS[module.__name__.rpartition(".")[2]]
        assert all(each.keys() == own.keys() for each in variants)
        assert all(type(getattr(module, name)) is int for name in own)


def test_what_is_wrong_or_does_not_run_has_no_time(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_variants, "VARIANTS", {"kernels": [{"TILE": tile} for tile in (2, 3, 4, 5)]})
    module, case = Kernels("llmb.kernels"), Case("cast", elementwise, "function", (torch.ones(4),))
    found = measure("8b", case, module, lambda _calls: 1.0 * SETS * module.TILE)
    assert list(found) == [
        Measured("8b", "cast", {"TILE": 4}, own=True, time_s=4.0, problem=None),
        Measured("8b", "cast", {"TILE": 2}, own=False, time_s=None, problem="another result"),
        Measured("8b", "cast", {"TILE": 3}, own=False, time_s=None, problem="OutOfResources"),
        Measured("8b", "cast", {"TILE": 5}, own=False, time_s=5.0, problem=None),
    ]
    assert module.TILE == 4


def test_the_table_fits_80_columns_and_marks_the_fastest() -> None:
    sizes = [max(each, key=lambda one: len(str(one))) for each in VARIANTS.values()]
    found = [
        Measured("405b", "squared-relu backward, cast", size, size is sizes[0], 0.002 / (1 + number), None)
        for number, size in enumerate(sizes)
    ]
    found.append(Measured("405b", "squared-relu backward, cast", sizes[0], False, None, "OutOfResources"))
    shown = [*header("NVIDIA H200").splitlines(), *lines(found)]
    assert max(map(len, shown)) <= 80
    assert [line.split()[-1] for line in shown[2:]] == ["cast", "1.00", "*", "OutOfResources"]


@pytest.mark.gpu
def test_every_kernel_has_variants_that_run(needs: Callable[[str, bool, str], None]) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    done = subprocess.run([*COMMAND, "--rows", "512", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len({one["kernel"] for one in found}) == 4
    assert all(one["time_s"] > 0 for one in found if one["own"])
    assert not [one for one in found if one["problem"] == "another result"]
