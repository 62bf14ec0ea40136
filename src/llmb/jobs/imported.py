# SPDX-License-Identifier: Apache-2.0
"""Adds the runs of an archive to an install root and its history, and records their origin."""

import atexit
import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from llmb.base.scratch import scratch_folder
from llmb.base.trust import WORKLOADS, check_links
from llmb.catalogue.records import Record
from llmb.jobs.archive import Manifest, unpack_archive
from llmb.jobs.history import open_history, run_folders_below
from llmb.jobs.job import Job, row_of_record
from llmb.jobs.locks import file_lock
from llmb.jobs.states import COMPLETED, FAILED, read_figures
from llmb.jobs.store import Filter, Store
from llmb.runs.folder import RunFolder, new_numbered, read_stored, write_atomically, writing
from llmb.runs.record import LOCAL, RunRecord, SubmittedJob, Time, now, read_job, read_record, seconds_of

PATIENCE_S = 600.0
STAGING = ".import-"
"""Prefix of the folders into which archives are unpacked, on the same disk as the runs."""
STATES = {"success": COMPLETED, "cancelled": "CANCELLED"}
"""States of imported jobs by the status of the run; the state for other statuses is FAILED."""


class ImportOrigin(Record):
    """The content of ``imported.json``: the origin of an imported run."""

    archive: str
    """File name of the archive."""
    archive_sha256: str
    created_at: Time
    imported_at: Time
    llmb_version: str
    """Version of llmb that wrote the archive."""
    scheduler: str | None
    job_id: str | None
    """The id of the run's job in its original root, if it had one."""


@dataclass(frozen=True, slots=True)
class Import:
    """The result of an import: folders of runs that were added, and of runs that already existed."""

    added: tuple[Path, ...]
    present: tuple[Path, ...]


def import_archive(path: Path, install: Path, say: Callable[[str], None]) -> Import:
    """Add the runs of an archive that the install root lacks; change no existing run.

    All files are checked before the first run is added. Raise UsageError if the archive is rejected or another user's
    link is in the path, EnvironmentProblem if it cannot be unpacked, or a file cannot be written or locked.
    """
    place = install / WORKLOADS
    check_links(place / "any")
    added, present = [], []
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    with writing(place), scratch_folder(STAGING, place) as staging:
        manifest = _unpack(path, staging)
        # The lock includes the listing of existing runs, so that two concurrent imports do not add a run twice.
        with file_lock(place / ".import.lock", PATIENCE_S, "importing"), open_history(install, say) as store:
            there = _runs_there(install, store)
            for run in manifest.runs:
                if run.run_id in there:
                    present.append(there[run.run_id])
                else:
                    source = RunFolder(staging / run.folder)
                    record, submitted = read_record(source), read_job(source)
                    assert submitted is not None, "it was written when the archive was unpacked"
                    group = install / Path(run.folder).parent
                    check_links(group)
                    group.mkdir(parents=True, exist_ok=True)
                    exists = os.path.lexists(group / source.name)
                    target = (new_numbered(group.parent, group.name, Path.mkdir) if exists else group) / source.name
                    source.path.rename(target)
                    store.restore([_row(record, submitted, target)])
                    there[run.run_id] = target
                    added.append(there[run.run_id])
    return Import(tuple(added), tuple(present))


def _runs_there(install: Path, store: Store) -> dict[str | None, Path]:
    """Return the run folders by run id; add the imported runs that a killed import did not add to the history."""
    listed = {Path(job.run_dir): job.run_id for job in store.jobs(Filter(runs_only=True))}
    there = {run_id: path for path, run_id in listed.items() if RunFolder(path).record.exists()}
    for path in run_folders_below(install) - listed.keys():
        try:
            record, submitted = read_record(RunFolder(path)), read_job(RunFolder(path))
        except (OSError, ValueError):
            continue
        there.setdefault(record.run_id, path)
        if submitted and RunFolder(path).imported.exists():
            store.restore([_row(record, submitted, path)])
    return there


def _unpack(path: Path, into: Path) -> Manifest:
    """Unpack the runs, and write a job and the origin of each.

    The jobs are local, so that another cluster's jobs are neither looked up nor retried here.
    """
    manifest = unpack_archive(path, into)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    for run in manifest.runs:
        folder = RunFolder(into / run.folder)
        job = SubmittedJob(
            scheduler=LOCAL,
            job_id=f"imported-{run.run_id[:8]}",
            submitted_at=read_record(folder).started_at or manifest.created_at,
            key=f"imported-{run.run_id}",
            campaign=run.campaign,
        )
        origin = ImportOrigin(
            archive=path.name,
            archive_sha256=checksum,
            created_at=manifest.created_at,
            imported_at=now(),
            llmb_version=manifest.llmb_version,
            scheduler=run.scheduler,
            job_id=run.job_id,
        )
        write_atomically(folder.job, job.model_dump_json(indent=2) + "\n")
        write_atomically(folder.imported, origin.model_dump_json(indent=2) + "\n")
    return manifest


def _row(record: RunRecord, submitted: SubmittedJob, target: Path) -> Job:
    """Return the row of an imported run, without its faulty nodes, which belong to another cluster."""
    figures = read_figures(str(target)) | {"bad_nodes": None} if record.status == "success" else {}
    return Job(
        **row_of_record(record),
        key=submitted.key,
        scheduler=submitted.scheduler,
        job_id=submitted.job_id,
        campaign=submitted.campaign,
        run_dir=str(target),
        experiment=target.name,
        submitted_s=datetime.fromisoformat(submitted.submitted_at).timestamp(),
        started_s=seconds_of(record.started_at),
        ended_s=seconds_of(record.ended_at),
        state=STATES.get(record.status, FAILED),
        status=record.status,
        reason=record.reason,
        exit_code=record.exit_code,
        nodes=record.job.nodes if record.job else None,
        **figures,
    )


def read_origin(folder: RunFolder) -> ImportOrigin | None:
    """Return the origin of an imported run; None if the run was made in this root."""
    return read_stored(folder.imported, ImportOrigin) if folder.imported.exists() else None


def unpacked(path: Path) -> Path:
    """Unpack an archive into a folder for as long as this process runs; raise UsageError or EnvironmentProblem."""
    status = path.stat()
    return _unpacked(path, status.st_mtime_ns, status.st_size)


@cache
def _unpacked(path: Path, _changed_ns: int, _size: int) -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(scratch_folder("llmb-archive-"))
    with writing(folder):
        _unpack(path, folder)
    return folder
