# SPDX-License-Identifier: Apache-2.0
"""Slurm's own commands, called with argument lists and read in their text formats."""

import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llmb.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.secrets import without_secrets

TIME_OUT_S = 60
"""A command waits 9 s for a controller that does not answer, sbatch twice that."""
DOWN = re.compile(
    r"Unable to contact|Zero Bytes|timed out|Connection refused|connection failure|Munge|authentication error", re.I
)
NO_CONFIGURATION = re.compile(
    r"establish a configuration source|Unable to process (configuration|slurm\.conf) file|cannot stat file", re.I
)
NO_JOB = "Invalid job id"
SPEAKER = re.compile(r"^\w+: ((error|fatal): )?")
# sbatch reads SBATCH_ before the script, and a job inherits what the submitting one was given.
USER_TOKEN = "SLURM_JWT"  # noqa: S105 (its name, not a token)
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", USER_TOKEN)


def submit(
    script: Path,
    environ: Mapping[str, str],
    held: Sequence[int] = (),
    arguments: Sequence[str] = (),
    secrets: Collection[str] = (),
) -> tuple[str, str | None]:
    """Id of the new job, and its cluster where there are several; sbatch inherits the descriptors ``held``.

    ``arguments`` are preferred to the script's own flags; variables named in ``secrets`` reach the job, too.

    Raises UsageError if the script is rejected, InfrastructureError if Slurm does not answer: the job may have been
    queued even then.
    """
    kept = submitting_environment(environ, secrets)
    hidden = [not_exported(USER_TOKEN)] if USER_TOKEN in kept else []
    done = call(["sbatch", "--parsable", *hidden, *arguments, str(script)], kept, held=held)
    if done.returncode:
        do = "correct the options or cluster_config.yaml; --dry-run prints the batch script"
        raise UsageError(f"Slurm rejected the job: {message(done)}", do=do)
    job_id, _, cluster = done.stdout.strip().splitlines()[-1].partition(";")
    return job_id, cluster or None


def not_exported(name: str) -> str:
    """The flag of sbatch by which a variable of its own does not reach the job: there it is empty."""
    return f"--export=ALL,{name}="


def call(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    time_out_s: float = TIME_OUT_S,
    held: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands.

    Raises EnvironmentProblem where this machine has no Slurm or none that is configured, InfrastructureError where the
    controller is down.
    """
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_out_s,
            pass_fds=held,
            check=False,
        )
    except FileNotFoundError as error:
        do = "call llmb where Slurm's commands are, such as a login node; or use 'llmb run' here"
        raise EnvironmentProblem(f"{command[0]} is not on this machine", do=do) from error
    except OSError as error:
        do = "look at the file that 'command -v' names; a login node has Slurm's own"
        raise EnvironmentProblem(f"{command[0]} cannot be started: {error.strerror}", do=do) from error
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        _raise_unless_configured(said)
        raise InfrastructureError(f"{command[0]} did not answer within {time_out_s:.0f} s", do="try again") from error
    if done.returncode:
        _raise_unless_configured(done.stderr)
        if DOWN.search(done.stderr):
            raise InfrastructureError(f"Slurm does not answer: {message(done)}", do="try again, or see 'scontrol ping'")
    return done


def _raise_unless_configured(said: str) -> None:
    """A machine that gets its configuration from the controller has none while that is down, and says both."""
    if NO_CONFIGURATION.search(said) and not DOWN.search(said):
        do = "call llmb where Slurm is configured, such as a login node, or set SLURM_CONF to its slurm.conf"
        raise EnvironmentProblem(f"Slurm has no configuration on this machine: {last_lines(said)}", do=do)


def submitting_environment(environ: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """What sbatch gets, and hands on to the job: nothing that would replace what the script says, and no secret but
    those named in ``secrets``, and the token by which Slurm knows the user, which is not handed on.
    """
    harmless = {
        name: value
        for name, value in without_secrets(environ).items()
        if not name.startswith(("SBATCH_", "SLURM_", "SRUN_"))
    }
    return harmless | {name: environ[name] for name in (*KEPT, *secrets) if name in environ}


def message(done: "subprocess.CompletedProcess[str]") -> str:
    return last_lines(done.stderr) or f"exit code {done.returncode} with no output"


def last_lines(said: str) -> str:
    return "; ".join([SPEAKER.sub("", line.strip()) for line in said.splitlines() if line.strip()][-3:])
