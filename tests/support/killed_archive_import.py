# SPDX-License-Identifier: Apache-2.0
"""Imports an archive in processes that are killed before changes of files and of the history, and then again.

Arguments: the archive, a folder, and after how many changes each next process is killed. Prints one JSON document: how
many changes one import makes, and by the number of the change before which it was killed, what is there then and after
the second import.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from killed_installer import in_a_process

from llmb.base import scratch
from llmb.jobs.find_runs import find_all_runs
from llmb.jobs.history import open_history
from llmb.jobs.imported import import_archive
from llmb.jobs.job import Job
from llmb.jobs.store import Store


def main() -> None:
    os.fsync = lambda descriptor: None  # a kill loses nothing that the kernel holds
    scratch.NEW_S = 0.0  # else what a killed process left is taken for new for a minute
    archive, folder, distance = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    restore = Store.restore

    def counted(store: Store, jobs: Iterable[Job]) -> int:
        sys.audit("os.rename")  # a change that Python tells nobody of
        return restore(store, jobs)

    Store.restore = counted  # type: ignore[method-assign]
    _, changes = in_a_process(lambda root: work(archive, root), fresh(folder), None)
    wanted, found = state(folder / "root"), {}
    for number in range(0, changes, distance):
        root = fresh(folder)
        killed, _ = in_a_process(lambda root: work(archive, root), root, number)
        assert killed, f"it ended before change {number}"
        between = len(find_all_runs((str(root),), root, print).runs) if runs_below(root) else 0
        import_archive(archive, root, lambda text: None)
        found[number] = {"between": between, "after": state(root)}
    json.dump({"changes": changes, "wanted": wanted, "found": found}, sys.stdout)


def work(archive: Path, root: Path) -> None:
    import_archive(archive, root, lambda text: None)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder / "root", ignore_errors=True)
    (folder / "root" / "workloads").mkdir(parents=True)
    return folder / "root"


def runs_below(root: Path) -> list[Path]:
    return sorted(root.glob("workloads/pretrain_*/experiments/*/*/*/run.json"))


def state(root: Path) -> dict[str, Any]:
    """The ids of the runs as they are found, those of the history, and what hidden names there are."""
    with open_history(root, print) as store:
        listed = sorted(job.run_id or "" for job in store.jobs())
    ids = sorted(json.loads(path.read_text())["run_id"] for path in runs_below(root))
    hidden = sorted(path.name for path in (root / "workloads").glob(".*"))
    return {"ids": ids, "listed": listed, "hidden": hidden}


if __name__ == "__main__":
    main()
