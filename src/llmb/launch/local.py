# SPDX-License-Identifier: Apache-2.0
"""This machine as a scheduler: a job is the process of ``llmb run``, which starts immediately and runs the workers."""

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.base.processes import end_stalled, started_program, waiting_for
from llmb.base.secrets import without_secrets
from llmb.base.tools import ask_program
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import JobSpec, filled
from llmb.launch.ranks import bind_words, words
from llmb.launch.scheduler_port import UNKNOWN, JobAnswers, JobHandle, JobState, Phase, Scheduler, Submission
from llmb.launch.site.site import Site
from llmb.launch.started_ranks import RANK_VARIABLES, StartedRank, rank_variables, started_rank
from llmb.readers.samples.host import host_name
from llmb.runs.folder import RunFolder, writing
from llmb.runs.record import BegunJob, Process, RunRecord, SubmittedJob, now, read_job, read_record, seconds_of

THREADS = "OMP_NUM_THREADS"
"""Set by default, because otherwise the thread pool of each process uses all cores."""
LAUNCHER_PID = "LLMB_LAUNCHER_PID"
LOOK_EVERY_S = 0.5
"""Seconds between checks of a run's files. Each check preempts a thread of the workers: with 20 checks per second, the
steps of a tiny model on a CPU took 8 % longer."""


def local_command(spec: JobSpec, folder: RunFolder, started: StartedRank | None = None) -> tuple[str, ...]:
    """Return the command that starts and watches the workers or, if another launcher ``started`` the ranks, only the
    command of this rank's worker."""
    filled_words = (filled(word, str(folder.path), sys.executable) for word in spec.work)
    work = (*bind_words(spec.bind_arguments), *filled_words)
    return work if started else (sys.executable, *words(1, spec.placement.processes), *work)


def local_variables(spec: JobSpec, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to ``environ``, without variables that it already contains."""
    threads = max(1, cores // spec.placement.processes_per_node)
    shipped = {THREADS: str(threads), **{item.name: item.value for item in spec.variables}}
    if rank := started_rank(environ):
        shipped = {RANK_VARIABLES: ",".join(shipped), **shipped, **rank_variables(rank, environ)}
    return {name: value for name, value in shipped.items() if name not in environ}


def run_workers(
    command: Sequence[str], variables: Mapping[str, str], folder: RunFolder, on_time: Callable[[], None]
) -> int:
    """Run ``command`` with its output in the run's log, calling ``on_time`` repeatedly; return its exit code.

    Variables that may contain secrets are not passed on, because libraries print and record their environment. Workers
    end when this process ends, even if it is killed. If workers report a stall, workers that do not end themselves are
    ended.

    Raises Interrupted on a signal, after ending all workers; EnvironmentProblem if the log cannot be created.
    """
    with writing(folder.log):
        log = folder.log.open("wb")
    with log:
        environ = {**without_secrets(os.environ), **variables, LAUNCHER_PID: str(os.getpid())}
        with started_program(command, log, subprocess.STDOUT, environ) as process:
            ended = waiting_for(process)
            while not ended.wait(LOOK_EVERY_S):
                on_time()
                if folder.stall.exists():
                    end_stalled(process)
            on_time()
        return process.returncode


BOOT = Path("/proc/sys/kernel/random/boot_id")
PS_LIMIT_S = 30
START_FIELD = 19
"""Index of the start time, in clock ticks since boot, among the fields after the name in /proc/<pid>/stat."""


def this_process() -> Process:
    pid = os.getpid()
    return Process(host=socket.gethostname(), pid=pid, started=started(pid) or "")


def is_here(process: Process) -> bool:
    return process.host == socket.gethostname()


def is_alive(process: Process) -> bool:
    """Return True if the process, which ran on this machine, still exists."""
    return started(process.pid) == process.started


def started(pid: int) -> str | None:
    """Return the start time of a process on this machine, as text; None if it does not exist or has ended."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        listing = ["ps", "-o", "lstart=", "-p", str(pid)]
        return ask_program(listing, PS_LIMIT_S).text.strip() or None
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return None if fields[0] in ("Z", "X") else f"{fields[START_FIELD]} {boot}"


INTERRUPTED = 130
"""Exit code of a run that was interrupted."""
JOB_VARIABLE = "LLMB_JOB_ID"
GONE = "the run folder was deleted, so the result of the run is unknown"
WORDS: dict[Phase, str] = {
    "running": "RUNNING",
    "completed": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "killed": "KILLED",
}


class LocalScheduler(Scheduler):
    """Runs jobs in the submitting process, without a queue."""

    name = "local"
    title = "the system"
    words = frozenset([*WORDS.values(), UNKNOWN])

    def completed(self, spec: JobSpec, options: JobOptions, site: Site) -> JobSpec:  # noqa: ARG002 (of the port)
        if spec.launch:
            do = "run 'llmb submit' on a machine with Slurm, or omit --framework"
            raise UsageError(f"{spec.program} queues its jobs in Slurm itself and cannot run on this machine", do=do)
        return spec

    def script(self, spec: JobSpec, folder: RunFolder) -> str:
        return shlex.join(local_command(spec, folder)) + "\n"

    def submit(self, job: Submission) -> SubmittedJob:  # noqa: ARG002 (whatever it is, it runs here)
        job_id, process = f"local-{secrets.token_hex(4)}", this_process()
        return SubmittedJob(scheduler=self.name, job_id=job_id, submitted_at=now(), process=process)

    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:  # noqa: ARG002 (it never waits)
        return JobAnswers({job.key: _state(job) for job in jobs if job.live})

    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        for job in jobs:
            process = _process(job.folder)
            if process is None:
                continue
            if not is_here(process):
                do = f"run 'llmb jobs cancel {job.job_id}' on {process.host}"
                raise UsageError(f"job {job.job_id} runs on {process.host}, not on this machine", do=do)
            if is_alive(process):
                _end(process, job)

    def current_job(self, environ: Mapping[str, str]) -> BegunJob:
        return BegunJob(scheduler=self.name, job_id=environ[JOB_VARIABLE], nodes=host_name())


def _end(process: Process, job: JobHandle) -> None:
    try:
        os.kill(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise UsageError(f"job {job.job_id} belongs to another user", do="ask that user to cancel it") from error


def _process(base: RunFolder) -> Process | None:
    try:
        handle = read_job(base)
    except (OSError, ValueError):
        return None
    return handle.process if handle else None


def _state(job: JobHandle) -> JobState:
    """Return a job's state; check the process before the record, which is complete once the process has ended."""
    job_id, process = str(job.job_id), _process(job.folder)
    here = process is not None and is_here(process)
    alive = process is not None and here and is_alive(process)
    try:
        record = read_record(job.folder)
    except (OSError, ValueError):
        record = None
    nodes = process.host if process else None
    if record and record.status not in ("queued", "running"):
        return _ended(job_id, record, nodes)
    started_s = seconds_of(record.started_at) if record else None
    if process and not here:
        meaning = f"it was started on {process.host}; whether it is still running can be checked only there"
        return JobState(job_id=job_id, phase="running", meaning=meaning, nodes=nodes, started_s=started_s)
    if process is None and not job.folder.path.is_dir():
        return JobState(job_id=job_id, state=UNKNOWN, phase="failed", meaning=GONE)
    phase: Phase = "running" if alive else "killed"
    how = None if alive else "its process was killed"
    return JobState(job_id=job_id, state=WORDS[phase], phase=phase, meaning=how, nodes=nodes, started_s=started_s)


def _ended(job_id: str, record: RunRecord, nodes: str | None) -> JobState:
    code = record.exit_code
    ends: dict[str, Phase] = {"success": "completed", "cancelled": "cancelled"}
    phase = ends.get(record.status, "failed")
    return JobState(
        job_id=job_id,
        state=WORDS[phase],
        phase=phase,
        meaning={"cancelled": "cancelled", "failed": f"ended with exit code {code}"}.get(phase),
        exit_code=code,
        nodes=nodes,
        started_s=seconds_of(record.started_at),
        ended_s=seconds_of(record.ended_at),
    )
