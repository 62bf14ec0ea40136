# SPDX-License-Identifier: Apache-2.0
"""Long work with bytes says how fast it is and how long it takes, also without a terminal."""

import time
from collections.abc import Iterator

import pytest

from llmb.cli.progress import ByteProgress

GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Its only item is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def test_rate_and_remaining_time_count_from_what_was_done_before(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ByteProgress("preparing") as progress:
        progress.bytes(40 * GB, 100 * GB)
        clock[0] += 10
        progress.bytes(60 * GB, 100 * GB)
        clock[0] += 1
        progress.bytes(61 * GB, 100 * GB)
        clock[0] += 20
        progress.bytes(100 * GB, 100 * GB)
    assert capsys.readouterr().err.splitlines() == [
        "preparing: 60 of 100 GB, 2 GB/s, 20 s left",
        "preparing: 100 of 100 GB",
    ]


def test_another_total_begins_new_work(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("preparing") as progress:
        progress.bytes(10 * GB, 10 * GB)
        clock[0] += 100
        progress.bytes(0, 20 * GB)
        clock[0] += 10
        progress.bytes(5 * GB, 20 * GB)
    assert capsys.readouterr().err.splitlines() == [
        "preparing: 10 of 10 GB",
        "preparing: 0 of 20 GB",
        "preparing: 5 of 20 GB, 0.5 GB/s, 30 s left",
    ]
