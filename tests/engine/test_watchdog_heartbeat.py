# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of the others' heartbeats, with a store and a clock of the test's own."""

from types import SimpleNamespace

import pytest

from llmb.engine import watchdog
from llmb.engine.watchdog import SHORTEST_PATIENCE_S, Heartbeats, has_turn

INTERVAL_S = 0.3


class Ended(Exception):
    """The thread that is tested has no end of its own."""


class Store:
    """Rank 1 has written its heartbeat once."""

    def check(self, keys: list[str]) -> bool:
        return keys == ["llmb/beat/1"]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [b"1" for _ in keys]


def silent_s(sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """How long rank 1 is thought to have been silent by a rank that sleeps so long between its looks."""
    now_s, left = 100.0, iter(sleeps)

    def sleep(wanted_s: float) -> None:
        nonlocal now_s
        assert wanted_s == INTERVAL_S
        try:
            now_s += next(left)
        except StopIteration:
            raise Ended from None

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    heartbeats = Heartbeats(rank=0, world_size=2, interval_s=INTERVAL_S)
    heartbeats.reading = True
    with pytest.raises(Ended):
        heartbeats._serve(Store())
    return heartbeats.heard[1].silent_s


def test_silence_is_counted_while_this_rank_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert silent_s([INTERVAL_S] * 10, monkeypatch) == pytest.approx(10 * INTERVAL_S)


def test_a_pause_of_this_rank_is_no_silence_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert silent_s([INTERVAL_S, 60.0, INTERVAL_S], monkeypatch) < SHORTEST_PATIENCE_S


def test_few_ranks_at_a_time_read_the_heartbeats_of_all() -> None:
    """If nobody judges, all come to it in the end."""
    ranks, patience_s = 2304, 8.0
    turns = [sum(has_turn(rank, over_s, patience_s) for rank in range(ranks)) for over_s in range(0, 97, 8)]
    assert turns[:6] == [1, 2, 4, 8, 16, 32]
    assert turns[-1] == ranks
