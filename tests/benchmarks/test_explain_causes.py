# SPDX-License-Identifier: Apache-2.0
"""Real runs that are slow in one way each: the cause is ranked first. How often, the benchmark tells."""

from pathlib import Path

import pytest
from benchmarks.explain_causes import INJECTIONS, Injection, measure, run

pytestmark = pytest.mark.measured
ATTEMPTS = 3
"""Another program may slow one of two compared runs. The benchmark counts how often the first attempt tells."""


@pytest.mark.parametrize("item", INJECTIONS, ids=lambda item: item.cause)
def test_the_cause_that_was_injected_is_ranked_first(tmp_path: Path, forked_python: str, item: Injection) -> None:
    found = []
    for attempt in range(ATTEMPTS):
        baseline = run(tmp_path / f"baseline-{attempt}", item.baseline, (), forked_python)
        found.append(measure(item, tmp_path / f"slow-{attempt}", baseline, forked_python))
        if all(order[:1] == (item.cause,) for order in (found[-1].alone, found[-1].against) if order is not None):
            return
    pytest.fail(f"{item.cause} was not ranked first: {found}")
