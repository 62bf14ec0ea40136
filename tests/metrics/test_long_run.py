# SPDX-License-Identifier: Apache-2.0
"""The quantiles that are written down, against SciPy's."""

from scipy.special import stdtrit

from llmb.metrics.long_run import MOST_BLOCKS, QUANTILES, cosines


def test_quantiles_are_those_of_students_t_for_all_degrees_of_freedom_that_occur() -> None:
    degrees = range(1, len(cosines(MOST_BLOCKS)) + 1)
    assert [float(stdtrit(count, 0.975)) for count in degrees] == list(QUANTILES)
