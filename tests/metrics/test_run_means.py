# SPDX-License-Identifier: Apache-2.0
"""Statistics of several runs."""

import pytest

from llmb.analysis.judge_run import describe_runs


def test_the_interval_of_run_means_is_students_t() -> None:
    found = describe_runs([12.0, 12.1, 12.2])
    assert (found.count, found.median, found.effective_count) == (3, 12.1, None)
    assert found.std == pytest.approx(0.1)
    assert found.ci95 == pytest.approx((12.1 - 0.248414, 12.1 + 0.248414), abs=1e-6)  # 4.302653 x 0.1 / sqrt(3)


def test_a_single_run_has_no_interval_of_runs() -> None:
    assert describe_runs([12.0]).ci95 is None
