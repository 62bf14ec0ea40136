# SPDX-License-Identifier: Apache-2.0
"""Simulated step times."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

START = 40
"""Steps before the first one, so that it is like the others."""


def step_noise(shape: tuple[int, ...], phi: float = 0.0, *, skewed: bool = False, seed: int = 0) -> NDArray[Any]:
    """Noise of mean 0 and standard deviation 1; along the last axis it is AR(1) with ``phi``."""
    rng = np.random.default_rng(seed)
    whole = (*shape[:-1], shape[-1] + START)
    noise = rng.exponential(size=whole) - 1 if skewed else rng.normal(size=whole)
    for step in range(1, whole[-1]):
        noise[..., step] += phi * noise[..., step - 1]
    settled: NDArray[Any] = noise[..., START:] * np.sqrt(1 - phi**2)
    return settled


def step_times(steps: int, seed: int, phi: float = 0.5, *, skewed: bool = False, cv: float = 0.005) -> NDArray[Any]:
    """Of a run of 10 s per step."""
    return 10 * (1 + cv * step_noise((steps,), phi, skewed=skewed, seed=seed))
