# SPDX-License-Identifier: Apache-2.0
"""Jobs of an installation that forbid to move or remove it."""

from collections.abc import Callable
from pathlib import Path

from llmb.errors import UsageError
from llmb.jobs.history import database_path, read_history
from llmb.jobs.job import LIVE
from llmb.jobs.store import Filter

MOST_NAMED = 5


def check_no_live_jobs(root: Path, done: str, say: Callable[[str], None]) -> None:
    """Raises UsageError if jobs are queued or running, as far as is known without asking the scheduler."""
    if not database_path(root).exists():
        return
    with read_history(root, say) as store:
        live = [str(job.job_id or job.key) for job in store.jobs(Filter(states=LIVE))]
    if live:
        names = ", ".join(live[:MOST_NAMED]) + (", ..." if len(live) > MOST_NAMED else "")
        do = "wait for them ('llmb jobs wait'), or cancel them; 'llmb jobs refresh' asks the scheduler"
        raise UsageError(f"jobs are queued or running: {names}; nothing was {done}", where=str(root), do=do)
