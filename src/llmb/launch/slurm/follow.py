# SPDX-License-Identifier: Apache-2.0
"""Follows a queued run to its end."""

import time
from collections.abc import Callable

from llmb.errors import InfrastructureError, RunFailed
from llmb.launch.local import StepFollower
from llmb.launch.slurm.client import job_state
from llmb.launch.slurm.finish import finish_job
from llmb.launch.slurm.job_state import UNKNOWN, JobState
from llmb.runs.finish import finish_from_outside, finished_result
from llmb.runs.folder import RunFolder
from llmb.runs.record import SubmittedJob, read_job_end, read_record
from llmb.runs.result import Result
from llmb.runs.steps import Step

LOOK_EVERY_S = 0.5
SHORTEST_ASK_S, LONGEST_ASK_S = 1.0, 15.0
"""Between two questions to the controller; longer the longer the job lasts."""
PATIENCE_S = 600.0
"""How long Slurm may know nothing of a job, or not answer, before that is the result."""
SETTLE_S = 10.0
KILLED = 137


def follow_job(
    folder: RunFolder, job: SubmittedJob, on_state: Callable[[JobState], None], on_step: Callable[[Step], None]
) -> Result:
    """The result of the run, once its job has ended; the run is concluded here where the job could not do so.

    Raises InfrastructureError where Slurm says nothing for ten minutes.
    """
    steps = StepFollower(folder.steps)
    asker = Asker(job.job_id)
    while not (state := asker.state()).ended:
        on_state(state)
        for step in steps.new():
            on_step(step)
        # Slurm may have forgotten the job, and accounts need not be kept.
        if state.state == UNKNOWN and read_job_end(folder):
            break
        time.sleep(LOOK_EVERY_S)
    for step in steps.new():
        on_step(step)
    on_state(state)
    await_result(folder)
    return conclude_job(folder, state)


def await_result(folder: RunFolder) -> None:
    """Returns when the job's own result is there, or will not come: nodes' files may be seen here a little later."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and read_record(folder).status == "running" and not read_job_end(folder):
        time.sleep(LOOK_EVERY_S)


def conclude_job(folder: RunFolder, state: JobState) -> Result:
    """The result that the job has written, else what its files and its state say."""
    record = read_record(folder)
    if record.status not in ("queued", "running"):
        return finished_result(folder, record)
    end = read_job_end(folder)
    if end and record.job and end.job_id != record.job.job_id:
        end = None  # of a second job, which was not let into the run
    if end and state.state in (UNKNOWN, "COMPLETED", "FAILED"):
        return finish_job(folder, end.exit_code, end.signal)
    cause = f"Slurm ({state.state}{f': {state.reason}' if state.reason else ''})"
    return finish_from_outside(folder, record, end.exit_code if end else state.exit_code or KILLED, cause)


class Asker:
    """Asks for a job's state now and then, and bears with a controller that is away for a while."""

    def __init__(self, job_id: str) -> None:
        self.last = JobState(job_id=job_id)
        self.began = self.asked = self.heard = time.monotonic()
        self.wait_s = 0.0

    def state(self) -> JobState:
        now = time.monotonic()
        if now - self.asked < self.wait_s:
            return self.last
        self.asked = now
        self.wait_s = min(max((now - self.began) / 20, SHORTEST_ASK_S), LONGEST_ASK_S)
        try:
            self.last = job_state(self.last.job_id)
        except InfrastructureError:
            if now - self.heard > PATIENCE_S:
                raise
            return self.last
        if self.last.state != UNKNOWN:
            self.heard = now
        elif now - self.heard > PATIENCE_S:
            raise RunFailed(f"Slurm knows nothing of job {self.last.job_id}, and it left no end marker")
        return self.last
