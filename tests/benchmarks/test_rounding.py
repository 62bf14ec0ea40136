# SPDX-License-Identifier: Apache-2.0
"""Simulated sums round where the hardware does, and the page has what they come to."""

import subprocess
import sys

import pytest
import torch
from benchmarks.rounding import (
    BEGINNING,
    DEPTHS,
    PAGE,
    RANKS,
    WAYS,
    distances,
    hopper_sums,
    independent,
    product_distance,
    ring,
    tree,
    truncated,
)

TERMS = 4 * 128


def test_a_ring_loses_small_values_that_a_tree_adds_first() -> None:
    """In bf16, 256 + 1 is 256, but 256 + 16 is 272: one value of 256 on the first of 32 ranks, 1 on all others."""
    values = torch.ones(32, 1, dtype=torch.bfloat16)
    values[0] = 256
    assert ring(values).item() == 256
    assert tree(values).item() == 256 + 24, "the seven others of the first node are lost"


def test_accumulators_have_fourteen_bits() -> None:
    exact = torch.tensor([1 + 2**-13, -1 - 2**-13, 1 + 2**-14, -3 - 2**-12])
    assert truncated(exact).tolist() == [1 + 2**-13, -1 - 2**-13, 1, -3 - 2**-12]


def test_a_promoted_sum_loses_small_terms_of_its_own_part_alone() -> None:
    """A first product of 2**14 hides those of 1 that follow one per instruction, until it is promoted."""
    left, right = torch.zeros(1, TERMS), torch.ones(TERMS, 1)
    left[0, ::32] = 1
    left[0, 0] = 2**14
    assert hopper_sums(left, right, promotes=False).item() == 2**14
    assert hopper_sums(left, right, promotes=True).item() == 2**14 + 12
    padded = hopper_sums(left[:, :40], right[:40], promotes=True)
    assert padded.item() == 2**14


def rows(first: object) -> list[list[str]]:
    """The cells of the page's rows that begin with this."""
    text = PAGE.read_text().partition(BEGINNING)[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [cells[1:] for cells in lines if cells[0] == str(first)]


def test_the_page_has_these_errors() -> None:
    values = independent(max(RANKS))
    found = [[str(ranks), *(f"{each:.2g}" for each in distances(values[:ranks]))] for ranks in RANKS]
    assert rows("independent") == found
    for depth in DEPTHS:
        assert rows(depth) == [[f"{product_distance(depth, promotes=way):.2g}" for way in (True, False)]]


def test_losses_hardly_depend_on_partial_sums() -> None:
    for way in WAYS:
        ((_, of_bf16, _, of_fp8),) = rows(way)
        assert float(of_bf16) < 0.003, "as FP8 with exact sums, see test_model_numerics.py"
        assert float(of_fp8) < 0.003
    assert [len(rows(f"tiny, step {step}")) for step in (0, 200)] == [len(RANKS)] * 2


@pytest.mark.measured
def test_both_parts_are_measured_again() -> None:
    command = [sys.executable, "-m", "benchmarks.rounding", "--quick"]
    printed = subprocess.run(command, cwd=PAGE.parents[2], capture_output=True, text=True, check=True).stdout
    assert all(f"\n| {name} | " in printed for name in ("tiny, step 0", "tiny, step 1", "independent", *WAYS, *DEPTHS))
