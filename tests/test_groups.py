# SPDX-License-Identifier: Apache-2.0
"""The tests themselves."""

import pytest


def test_what_shares_a_fixture_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts a cluster of its own, and nothing says so."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("all tests run in one process")
    assert request.node.nodeid.endswith("@tests/test_groups.py")
