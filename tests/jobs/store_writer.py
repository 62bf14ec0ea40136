# SPDX-License-Identifier: Apache-2.0
"""Writes to a history from a process of its own: ``store_writer.py hammer|die DATABASE NAME``."""

import os
import signal
import sys
from pathlib import Path

from llmb.errors import LlmbError
from llmb.jobs.job import Change, Job
from llmb.jobs.store import KeyTaken, Store

ROUNDS = 40


def job(key: str, number: int = 0) -> Job:
    return Job(
        key=key,
        cluster="test",
        run_dir=f"/runs/x/x_{number}/x",
        experiment="x",
        workload="pretrain_llama3.1",
        size="tiny",
        dtype="fp32",
        gpu_type="cpu",
        scale=2,
        submitted_s=1000.0 + number,
    )


def hammer(path: Path, name: str) -> None:
    """Adds jobs of its own, competes for shared ones, and moves all of them on; prints the keys that it won."""
    won = []
    for number in range(ROUNDS):
        with Store(path) as store:
            store.add([job(f"{name}-{number}", number)])
            store.submitted({f"{name}-{number}": f"{name}{number}"})
            try:
                store.add([job(f"shared-{number}", number)])
                won.append(number)
            except KeyTaken:
                pass
            query = store.next_query()
            seen = {"state": "RUNNING", "status": "running", "reason": None, "checked_s": float(number)}
            store.apply((Change(key=one.key, **seen) for one in store.live()), query)
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
            " prepares, data, submitted_s, state, status, restarts, retries)"
            " VALUES (?, '', '', '', '', '', '', '', 1, '', '', '', 0, 'BROKEN', 'queued', 0, 0)",
            (f"broken-{number}",),
        )
    os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path) -> None:
    """Adds jobs until the disk is full; prints how many were taken, and what the error was."""
    taken = 0
    try:
        for number in range(100_000):
            with Store(path) as store:
                store.add([job(f"{number}-{'x' * 2000}", number)])
            taken += 1
    except LlmbError as error:
        print(taken, type(error).__name__, str(error).splitlines()[0], sep="|", flush=True)


if __name__ == "__main__":
    action, database, *names = sys.argv[1:]
    {"hammer": hammer, "die": die, "fill": fill}[action](Path(database), *names)
