# SPDX-License-Identifier: Apache-2.0
"""Submits jobs with a program's own script, which queues them in Slurm or is itself queued; finds their ids."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from llmb.base.errors import InfrastructureError, UsageError, itemized
from llmb.base.secrets import HIDDEN, redacted, without_secrets
from llmb.base.shown_text import printable
from llmb.base.tools import ask_program
from llmb.launch.documents.launch_scripts import NEMO_RUN_JOB
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.jobspec.spec import JobSpec, Launch, Variable, read_spec
from llmb.launch.scheduler_port import Submission
from llmb.launch.slurm.client import AGAIN, DOWN
from llmb.launch.slurm.offer import site_partition
from llmb.launch.slurm.request import gpu_request
from llmb.launch.slurm.settings import GPU_FLAGS, SlurmSettings, flag_problems, minutes, on_top, requested_flags
from llmb.runs.folder import RunFolder, writing

LIMIT_S = 1800
"""Time limit of the script in seconds: NeMo-Run packs its code, and may wait for a busy controller."""
JOB_ID = {"scheduler": re.compile(r"^Submitted batch job (\d{1,20})\b", re.M), "script": NEMO_RUN_JOB}
REFUSED = re.compile(r"sbatch: error: (.{1,400})")
SHORT = {"account": "-A", "partition": "-p"}
SBATCH_VARIABLES = {
    "time": "SBATCH_TIMELIMIT",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
    "constraint": "SBATCH_CONSTRAINT",
    "gres": "SBATCH_GRES",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
}
"""Variables that override the flags in a batch script, by flag (sbatch(1), input environment variables)."""
LAST_LINES = 8


def completed_launch(spec: JobSpec, launch: Launch, options: JobOptions, settings: SlurmSettings) -> JobSpec:
    """Add flags from the cluster's settings and the user's options to ``spec``; the script itself sets all others.
    Raises UsageError if an option or a flag is invalid, is missing, or cannot be passed to the script."""
    settings_flags = {"account": settings.account, "partition": site_partition(settings, spec.gpu_type)}
    site = {**{name: value for name, value in settings_flags.items() if value}, **settings.flags}
    chosen = on_top(site, options.flags)
    asking = settings.within(chosen.get("partition"))
    if options.gpu_request:
        asking = asking.model_copy(update={"gpu_request": options.gpu_request})
    flags = {
        **{name: value for name, value in requested_flags(chosen).items() if name not in GPU_FLAGS},
        **gpu_request(asking, spec.placement, chosen),
    }
    handed = {} if launch.queued_by == "scheduler" else dict(_handed(launch, flags))
    problems = [*_problems(launch, flags, options), *flag_problems(flags)]
    if problems:
        raise UsageError(f"this job cannot be requested:{itemized(problems)}", do="correct the options or settings")
    variables = (*spec.variables, *(Variable(name, value, "slurm") for name, value in handed.items()))
    limit = minutes(flags.get("time") or "") if flags.get("time") else spec.time_limit_min
    return spec.model_copy(update={"flags": flags, "variables": variables, "time_limit_min": limit})


def _problems(launch: Launch, flags: Mapping[str, str | None], options: JobOptions) -> Iterator[str]:
    yield from (
        f"the launch script requires --{name}: pass it, or set slurm.{name} in cluster_config.yaml"
        for name in ("account", "partition")
        if name in launch.needed and not flags.get(name)
    )
    if launch.queued_by == "script" and "flags" not in launch.named:
        names = {*launch.named, *SBATCH_VARIABLES}
        yield from (
            f"--{name} cannot be passed to sbatch by the launch script; omit it" for name in flags if name not in names
        )
    chosen = {
        "--start": options.start,
        "--vboost": options.vboost,
        "--cpu-binding": options.cpu_binding,
        "--numa-binding": options.numa_binding,
        "--retries": options.retries,
    }
    yield from (f"{name} is only supported for jobs that llmb starts itself" for name, value in chosen.items() if value)


def _handed(launch: Launch, flags: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield the variables that pass ``flags`` to the script, or to the sbatch that it calls."""
    more: list[str] = []
    for name, value in flags.items():
        variable = launch.named.get(name) or SBATCH_VARIABLES.get(name)
        if variable:
            yield variable, value or ""
        else:
            more.append(name if value is None else f"{name}={value}")
    if more and "flags" in launch.named:
        yield launch.named["flags"], ";".join(more)


def launch_text(spec: JobSpec, launch: Launch, folder: RunFolder) -> str:
    """Return the shell script that calls the program's script and writes its output to the run folder."""
    return "\n".join(_lines(spec, launch, folder)) + "\n"


def _lines(spec: JobSpec, launch: Launch, folder: RunFolder) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {spec.title}"
    yield f"cd {shlex.quote(launch.folder)} || exit"
    if launch.removed:
        yield f"unset {' '.join(launch.removed)}"
    yield from (f"export {item.name}={shlex.quote(item.value)}  # {item.origin}" for item in spec.variables)
    yield from (f"export {name}  # from the submitting shell" for name in spec.secrets)
    if launch.environment:
        yield f"export VIRTUAL_ENV={shlex.quote(launch.environment)}"
        yield 'export PATH="$VIRTUAL_ENV/bin:$PATH"; unset PYTHONHOME'
    yield f"{_call(spec, launch)} >{shlex.quote(str(folder.launch_output))} 2>&1"


def _call(spec: JobSpec, launch: Launch) -> str:
    if launch.queued_by == "script":
        return launch.script
    flags = dict(spec.flags)
    words = ["sbatch"]
    for name, short in SHORT.items():
        if value := flags.pop(name, None):
            words += [short, value]
    words += ["-N", str(spec.placement.nodes)]
    words += [f"--{name}" if value is None else f"--{name}={value}" for name, value in flags.items()]
    return shlex.join([*words, launch.script])


def call_launch(job: Submission) -> str:
    """Run the script, and return the id of the job that it queued. Raises UsageError, with sbatch's error or else the
    script's last lines, if it queued none, InfrastructureError if that is unknown, NotWritable if its output cannot be
    written."""
    launch, output = job.spec.launch, job.folder.launch_output
    assert launch is not None
    secrets = {name: job.environ[name] for name in job.spec.secrets if name in job.environ}
    environ = without_secrets(job.environ) | secrets
    with writing(output):
        output.touch()
    program = ask_program(["bash", str(job.folder.batch_script)], LIMIT_S, environ=environ, held=job.held, cwd=None)
    text = _hidden(output, secrets.values())
    ids = JOB_ID[launch.queued_by].findall(text)
    if ids:
        return str(ids[0])
    last = "\n".join(f"  {printable(line)}" for line in text.strip().splitlines()[-LAST_LINES:])
    if DOWN.search(text):
        raise InfrastructureError(f"Slurm does not answer:\n{last}", do=AGAIN)
    if refused := REFUSED.search(text):
        do = "correct the options or cluster_config.yaml"
        raise UsageError(f"Slurm rejected the job: {printable(refused[1])}", do=do)
    if program.code == 0:
        what = f"{launch.script} ended without printing a job id:\n{last}"
        raise InfrastructureError(what, do="run 'squeue --me' to see if it queued a job; llmb does not follow that job")
    why = f"took more than {LIMIT_S // 60} minutes" if program.timed_out else f"ended with exit code {program.code}"
    raise UsageError(f"{launch.script} in {launch.folder} {why} without printing a job id:\n{last}", where=str(output))


def _hidden(output: Path, secrets: Iterable[str]) -> str:
    printed = text = _text(output)
    for secret in filter(None, secrets):
        text = text.replace(secret, HIDDEN)
    text = redacted(text)  # other secrets that it printed
    if text != printed:
        with suppress(OSError):  # in place, so that on a full disk the job id is not lost, and the secret not kept
            output.write_text(text)
    return text


def launched_id(base: RunFolder) -> str | None:
    """Return the job id in the saved output of a program's script, if there is one."""
    try:
        launch = read_spec(base).launch
    except (OSError, ValueError):
        return None
    ids = JOB_ID[launch.queued_by].findall(_text(base.launch_output)) if launch else []
    return ids[0] if ids else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
