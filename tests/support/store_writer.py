# SPDX-License-Identifier: Apache-2.0
"""Writes to a history from a process of its own: ``store_writer.py hammer|die DATABASE NAME``."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from job_rows import job_row

from llmb.base.errors import LlmbError
from llmb.jobs.store import KeyExists, Store

ROUNDS = 40


def hammer(path: Path, name: str) -> None:
    """Adds jobs of its own, competes for shared ones, and moves all of them on; prints the keys that it won."""
    won = []
    for number in range(ROUNDS):
        with Store(path) as store:
            store.add([job_row(f"{name}-{number}")])
            store.submitted({f"{name}-{number}": f"{name}{number}"})
            try:
                store.add([job_row(f"shared-{number}")])
                won.append(number)
            except KeyExists:
                pass
            query = store.next_query()
            seen = {"state": "RUNNING", "status": "running", "checked_s": float(number)}
            store.apply([replace(one, **seen) for one in store.live()], query)
    print(*won)


def die(path: Path) -> None:
    """Is killed in the middle of a transaction, when part of it has been written to the file."""
    store = Store(path)
    store.db.execute("PRAGMA cache_size = 5")
    store.db.execute("BEGIN IMMEDIATE")
    store.db.execute("UPDATE jobs SET state = 'BROKEN'")
    for number in range(5000):
        store.db.execute(
            "INSERT INTO jobs (key, scheduler, run_dir, experiment, workload, size, dtype, gpu_type, scale, proxy,"
            " kind, subject, data, submitted_s, state, status, restarts, retries)"
            " VALUES (?, '', '', '', '', '', '', '', 1, '', 'run', '', '', 0, 'BROKEN', 'queued', 0, 0)",
            (f"broken-{number}",),
        )
    os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path) -> None:
    """Adds jobs until the disk is full; prints how many were taken, and what the error was."""
    taken = 0
    try:
        for number in range(100_000):
            with Store(path) as store:
                store.add([job_row(f"{number}-{'x' * 2000}")])
            taken += 1
    except LlmbError as error:
        print(taken, type(error).__name__, str(error).splitlines()[0], sep="|", flush=True)


if __name__ == "__main__":
    action, database, *names = sys.argv[1:]
    {"hammer": hammer, "die": die, "fill": fill}[action](Path(database), *names)
