# SPDX-License-Identifier: Apache-2.0
"""A rank that waits until another one has removed a checkpoint that could not be saved."""

import errno
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmb.checkpoints.checkpoint import partial_path
from llmb.engine.checkpoint import save
from llmb.engine.checkpoint.save import await_discarded, discard


def test_it_waits_for_the_rank_that_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "step=10"
    partial_path(path).mkdir()
    looked = threading.Event()

    def remove() -> None:
        looked.wait()
        discard(path)

    thread = threading.Thread(target=remove)
    thread.start()
    assert partial_path(path).exists()
    looked.set()
    await_discarded(path)
    assert not partial_path(path).exists()
    thread.join()


def test_it_waits_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all for a folder that cannot be looked at, by a clock that only sleep moves on."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(save, "time", clock)
    partial_path(tmp_path / "step=10").mkdir()
    await_discarded(tmp_path / "step=10")
    assert sum(slept) >= save.DISCARDED_WITHIN_S
    slept.clear()

    def stale(_: Path, **_options: bool) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stale)
    await_discarded(tmp_path / "step=10")
    assert slept == []
