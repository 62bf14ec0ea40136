# SPDX-License-Identifier: Apache-2.0
"""Real runs that are slow in one way each: the cause is ranked first. How often, the benchmark tells."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from benchmarks.explain_causes import INJECTIONS, Injection, measure, run

from llmb.analysis.records import AnalyzedRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Callable[[tuple[str, ...]], AnalyzedRun]:
    return cache(lambda options: run(tmp_path_factory.mktemp("baseline"), options, (), forked_python))


@pytest.mark.parametrize("item", INJECTIONS, ids=lambda item: item.cause)
def test_the_cause_that_was_injected_is_ranked_first(
    tmp_path: Path, forked_python: str, baseline: Callable[[tuple[str, ...]], AnalyzedRun], item: Injection
) -> None:
    found = measure(item, tmp_path, baseline(item.baseline), forked_python)
    assert found.against[:1] == (item.cause,)
    assert found.alone is None or found.alone[:1] == (item.cause,)
