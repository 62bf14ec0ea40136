# SPDX-License-Identifier: Apache-2.0
"""Submits jobs again that failed through no fault of their own, without the nodes that did.

The run keeps its folder: the new job goes on from the last checkpoint, if there is one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

from llmb.errors import EnvironmentProblem, LlmbError, UsageError
from llmb.jobs.faults import read_faults, worth_a_retry
from llmb.jobs.job import Job
from llmb.jobs.store import KeyTaken, Store
from llmb.jobs.submit import hand_over, submission_lock
from llmb.launch.slurm.submission import Prepared
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record, write_record

LONGEST_AGO_S = 86400.0
"""A job that failed longer ago is nobody's concern any more."""
_EXCLUDE = re.compile(r'^#SBATCH --exclude="?([^"\n]*)"?$', re.MULTILINE)
_NUMBER = re.compile(r"(.*)#(\d+)")


def retry_failed(store: Store, install: Path, environ: Mapping[str, str], now_s: float) -> Iterator[str]:
    """Submits jobs again that may be; yields what people should know.

    Of several clients one does it. A job that Slurm refuses is left as it is, and tried at the next refresh.
    """
    table = read_faults()
    for job in store.failed_with_retries(now_s - LONGEST_AGO_S):
        if job.retries - job.restarts < 1 or not worth_a_retry(table, job.fault):
            continue
        try:
            again, nodes = _submit_again(store, install, job, environ, now_s)
        except KeyTaken:
            continue
        except (LlmbError, OSError, ValueError) as error:
            what = error.what if isinstance(error, LlmbError) else error
            yield f"job {job.job_id} failed ({job.fault}) and could not be submitted again: {what}"
            continue
        without = f", without {nodes}" if nodes else ""
        yield f"job {job.job_id} failed ({job.fault}); it was submitted again as {again}{without}"


def repeated(job: Job, now_s: float) -> Job:
    """The next try of ``job``, which used up a retry each time that it was started again. Pure."""
    found = _NUMBER.fullmatch(job.key)
    fresh = {item.name: item.default for item in fields(Job) if item.default is not MISSING}
    kept = {"cluster": job.cluster, "campaign": job.campaign, "retries": job.retries - job.restarts - 1}
    key = f"{found[1]}#{int(found[2]) + 1}" if found else f"{job.key}#2"
    return replace(job, **{**fresh, **kept, "key": key, "retry_of": job.key, "submitted_s": now_s})


def excluded(script: str, *bad_nodes: str | None) -> str:
    """Nodes to leave out: those that the batch script leaves out, and all that were at fault. Pure."""
    asked = _EXCLUDE.search(script)
    return ",".join(dict.fromkeys(filter(None, [asked[1] if asked else None, *bad_nodes])))


def _submit_again(store: Store, install: Path, job: Job, environ: Mapping[str, str], now_s: float) -> tuple[str, str]:
    """Id of the new job, and the nodes that it leaves out."""
    folder, index = RunFolder(Path(job.run_dir)), _array_index(job)
    base = folder if index is None else _array_base(folder, index)
    nodes = excluded(base.batch_script.read_text(), *(tried.bad_nodes for tried in _tries(store, job)))
    arguments = [f"--exclude={nodes}"] if nodes else []
    arguments += [f"--array={index}"] if index is not None else []
    with submission_lock(install) as descriptor:
        new = repeated(job, now_s)
        store.add([new])
        record = read_record(folder)
        write_record(folder, record.model_copy(update={"status": "queued", "reason": None, "ended_at": None}))
        try:
            (run,) = hand_over(store, Prepared(base, {index: folder}), {folder: new}, environ, descriptor, arguments)
        except (UsageError, EnvironmentProblem):
            write_record(folder, record)
            raise
        return run.job.job_id, nodes


def _tries(store: Store, job: Job) -> Iterator[Job]:
    """The job, and those that it repeats."""
    tried: Job | None = job
    while tried:
        yield tried
        tried = store.by_key(tried.retry_of) if tried.retry_of else None


def _array_index(job: Job) -> int | None:
    _, _, index = (job.job_id or "").partition("_")
    return int(index) if index else None


def _array_base(folder: RunFolder, index: int) -> RunFolder:
    """The folder of the array's batch script."""
    above = folder.path.parent
    return RunFolder(above.with_name(above.name.removesuffix(f".{index}")) / folder.name)
