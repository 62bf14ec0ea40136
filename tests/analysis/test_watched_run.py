# SPDX-License-Identifier: Apache-2.0
"""A run with a record, as it is watched. See ``tests/jobs/test_watch_on_slurm.py`` for jobs of a scheduler."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.analysis import watched_run
from llmb.analysis.watched_run import WatchedRun
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, read_record, write_record


def test_a_record_that_is_written_while_it_is_read_is_read_again(
    tmp_path: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a job begins while its watching does: it would seem to be starting until its record changes again."""
    folder = RunFolder(tmp_path)
    queued = new_record(tiny_plan(), ()).model_copy(update={"status": "queued"})
    write_record(folder, queued)

    def read_and_begin(folder: RunFolder) -> object:
        found = read_record(folder)
        write_record(folder, queued.model_copy(update={"status": "running"}))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(watched_run, "read_record", read_and_begin)
        run = WatchedRun(folder, None, lambda job: job)
    assert run.record.status == "queued"
    assert run.look(0.0).state == "running"
