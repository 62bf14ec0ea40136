# SPDX-License-Identifier: Apache-2.0
"""The tests themselves."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "src" / "llmb").glob("*/__init__.py"))


def test_what_shares_a_fixture_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts a cluster of its own, and nothing says so."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("all tests run in one process")
    assert request.node.nodeid.endswith("@tests/test_tests.py")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_test_has_the_name_of_what_it_tests(package: Path) -> None:
    """One of its modules or packages, and maybe an aspect; ``end_to_end`` has the tests of several packages."""
    parts = {path.stem for path in package.rglob("*.py")} | {
        path.parent.name for path in package.rglob("*/__init__.py")
    }
    tests = (ROOT / "tests" / package.name).rglob("test_*.py")
    unknown = [test.name for test in tests if not any(f"{test.stem}_".startswith(f"test_{part}") for part in parts)]
    assert not unknown
