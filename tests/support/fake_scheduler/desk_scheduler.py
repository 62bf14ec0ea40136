# SPDX-License-Identifier: Apache-2.0
"""A scheduler that implements only what it must, and asks one question: each job is a shell that runs at once."""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from llmb.base.options import Option
from llmb.catalogue.records import Record
from llmb.launch.jobspec.spec import JobSpec, Word, filled
from llmb.launch.local import started
from llmb.launch.ranks import words
from llmb.launch.scheduler_port import Choice, JobAnswers, JobHandle, JobState, Scheduler, SchedulerQuestion, Submission
from llmb.runs.folder import RunFolder
from llmb.runs.record import BegunJob, SubmittedJob, now


class DeskSettings(Record):
    room: str | None = None


class DeskAnswers(Record):
    room: Annotated[str | None, Option(help="Room of the desk.", panel="Cluster")] = None


class Room(SchedulerQuestion):
    name, text = "room", "Room of the desk"

    def choices(self) -> list[Choice]:
        return [Choice("attic"), Choice("cellar", "it is cool")]


class DeskScheduler(Scheduler):
    name, title = "desk", "the desk"
    settings, answers, questions = DeskSettings, DeskAnswers, (Room,)

    def section(self, answers: Any, gpus_per_node: int | None) -> dict[str, Any]:
        return {"room": answers.room}

    def script(self, spec: JobSpec, folder: RunFolder) -> str:
        def line(command: Sequence[Word]) -> str:
            return shlex.join(filled(word, str(folder.path), spec.python) for word in command)

        ranks = (spec.python, *words(1, spec.placement.processes), *spec.work)
        work = f"{line(ranks)} >{shlex.quote(str(folder.log))} 2>&1; code=$?"
        return f"export DESK_JOB=$$\n{line(spec.begin)} || exit\n{work}\n{line(spec.finish)} $code ''\nexit $code\n"

    def submit(self, job: Submission) -> SubmittedJob:
        with job.folder.batch_output.open("w") as output:
            process = subprocess.Popen(
                ["sh", job.folder.batch_script], env=job.environ, stdout=output, stderr=output, start_new_session=True
            )
        return SubmittedJob(scheduler=self.name, job_id=str(process.pid), submitted_at=now())

    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        return JobAnswers({job.key: _state(str(job.job_id)) for job in jobs if job.live})

    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(int(str(job.job_id)), signal.SIGTERM)

    def current_job(self, environ: Mapping[str, str]) -> BegunJob:
        return BegunJob(scheduler=self.name, job_id=environ["DESK_JOB"], nodes="desk")


def _state(job_id: str) -> JobState:
    """It does not know how a job ended: what the job wrote tells."""
    if started(int(job_id)):
        return JobState(job_id=job_id, state="SITTING", phase="running", nodes="desk")
    return JobState(job_id=job_id, state="GONE", phase="cancelled", nodes="desk")
