# SPDX-License-Identifier: Apache-2.0
"""How far the mean of a series of steps may be from its mean in the long run, if neighboring steps are alike.

The variance of the mean is estimated from the slowest movements of the series, its first cosine coefficients (the EWC
estimator of Lazarus, Lewis, Stock and Watson, "HAR Inference: Recommendations for Practice", Journal of Business &
Economic Statistics 36, 2018), which autocorrelation changes as it changes the mean, and Student's t with as many
degrees of freedom as coefficients. They recommend 0.4 n^(2/3) coefficients; here it is n^(2/3) / 3, but 2 from 8 steps
on, because steps of real runs remember longer than an AR(1) series.

Of a short series even the slowest movement is fast, so that the estimate is too low. It is corrected by the factor that
is exact for an AR(1) series with ``PRIOR_AUTOCORRELATION``: 10 steps cannot tell how autocorrelated they are.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

PRIOR_AUTOCORRELATION = 0.55
MOST_BLOCKS = 512
"""A longer series is first averaged in blocks of equal size, so that the effort is linear."""
QUANTILES = (
    *(12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146),
    *(2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274),
    *(2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776),
    *(2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864),
    *(2.0796138447276795,),
)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom: up to as many as ``MOST_BLOCKS`` have coefficients.
SciPy, which has them, takes longer to load than most commands take to run."""


def half_width(deviations: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean of a series of at least 2 steps, in step order.

    ``deviations`` are the steps' differences from that mean.
    """
    blocks, size = block_means(deviations)
    rows = cosines(len(blocks))
    squares = (math.fsum(weight * value for weight, value in zip(row, blocks, strict=True)) ** 2 for row in rows)
    correction = _correction(len(blocks)) if size == 1 else 1.0
    variance = correction * size * math.fsum(squares) / len(rows)
    return QUANTILES[len(rows) - 1] * math.sqrt(variance / len(deviations))


def block_means(values: Sequence[float]) -> tuple[Sequence[float], int]:
    """``values`` as means of complete blocks, and the size of a block: 1 for up to ``MOST_BLOCKS`` values."""
    size = -(-len(values) // MOST_BLOCKS)
    if size == 1:
        return values, 1
    import numpy as np

    whole = np.asarray(values, float)[: len(values) // size * size]
    means: list[float] = whole.reshape(-1, size).mean(axis=1).tolist()
    return means, size


@lru_cache(maxsize=16)
def cosines(count: int, more: int = 0) -> tuple[tuple[float, ...], ...]:
    """Orthogonal weights of the slowest movements of ``count`` steps, and of ``more``: each of length 1, of sum 0."""
    scale = math.sqrt(2 / count)
    terms = max(min(2, count // 4), round(count ** (2 / 3) / 3)) + more
    return tuple(
        tuple(scale * math.cos(math.pi * term * (step + 0.5) / count) for step in range(count))
        for term in range(1, terms + 1)
    )


def ar1_variance(weights: Sequence[float]) -> float:
    """Variance of the weighted sum of an AR(1) series with ``PRIOR_AUTOCORRELATION`` whose values have variance 1."""
    total, carried = 0.0, 0.0
    for weight in weights:
        total += weight * (weight + 2 * carried)
        carried = PRIOR_AUTOCORRELATION * (carried + weight)
    return total


@lru_cache(maxsize=16)
def _correction(count: int) -> float:
    """Variance of the mean over the expected estimate, of an AR(1) series with ``PRIOR_AUTOCORRELATION``."""
    rows = cosines(count)
    return ar1_variance((1 / math.sqrt(count),) * count) * len(rows) / math.fsum(map(ar1_variance, rows))
