# SPDX-License-Identifier: Apache-2.0
"""The results of all kernels, in Triton's interpreter."""

from pathlib import Path

import pytest
from triton_interpreter import run_cases


@pytest.mark.slow
def test_kernels_compute_what_torch_does(triton: None) -> None:
    folder = Path(__file__).parent
    run_cases(*sorted(folder.glob("interpreted_*.py")), interpreted=True)
