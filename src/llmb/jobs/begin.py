# SPDX-License-Identifier: Apache-2.0
"""The program that a job calls before its workers start: ``python -m llmb.jobs.begin RUN_FOLDER``."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from llmb.base.errors import InfrastructureError, LlmbError, UsageError
from llmb.launch.documents.documented_paths import link_as_documented
from llmb.launch.jobspec.spec import read_spec
from llmb.launch.programs.port import find_program
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.folder import RunFolder
from llmb.runs.record import BegunJob, RunRecord, begin_attempt, now, read_record, source_fields, write_record


def begin(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Record that the run starts or restarts, with its job and nodes, and link its files under any documented names.

    Raise UsageError if ``check_single`` does, BrokenRecord or OSError if a file is unusable. If no restart is left,
    record that the run failed, and raise InfrastructureError.
    """
    spec = read_spec(folder)
    job = find_scheduler(spec.scheduler).current_job(environ)
    record = read_record(folder)
    check_single(folder, record, job)
    started = find_program(record.program).started(record.plan)
    record = record.model_copy(update={"plan": started, **source_fields()})
    try:
        begun = begin_attempt(folder, record, job)
    except InfrastructureError as error:
        over = {"status": "failed", "reason": error.what, "exit_code": error.exit_code, "ended_at": now()}
        write_record(folder, record.model_copy(update=over))
        raise
    link_as_documented(folder, spec, begun)


def check_single(folder: RunFolder, record: RunRecord, job: BegunJob) -> None:
    """Raise UsageError if another job started the run and the run has not been submitted again since.

    A requeued job keeps its id; submitting the run in a new job sets its status back to queued.
    """
    if record.job is None or record.job.job_id == job.job_id or record.status == "queued":
        return
    raise UsageError(
        f"job {record.job.job_id} already started this run, and job {job.job_id} would write to the same files; the "
        f"run's status is {record.status}",
        where=str(folder.path),
        do="submit the recipe again with 'llmb submit': each job needs its own run folder",
    )


def main() -> None:
    try:
        begin(RunFolder(Path(sys.argv[1])), os.environ)
    except LlmbError as error:
        sys.stderr.write(f"llmb: error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
