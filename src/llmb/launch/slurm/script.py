# SPDX-License-Identifier: Apache-2.0
"""The text of a batch script. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmb.launch.slurm.flags import Flags, directive
from llmb.launch.slurm.words import Shell, Word, command_line, command_lines
from llmb.launch.variables import Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """All that one batch script says; whoever starts another program than the engine's workers makes one of these.

    ``begin`` runs first and may refuse; ``work`` is followed to its end, with its output in ``log``; ``finish`` gets
    the exit code and the signal that ended the job, if one did.
    """

    title: str
    flags: Flags
    folder: Word
    """The run folder, in which everything is written."""
    log: str
    """Name of the log in it."""
    modules: Sequence[str] = ()
    profiles: Sequence[str] = ()
    variables: Sequence[Variable] = ()
    processes_per_node: int
    python: str
    begin: Sequence[Word] = ()
    work: Sequence[Word]
    finish: Sequence[Word] = ()
    shell_variables: Mapping[str, Shell] | None = None
    """What ``work`` reads beside ``$llmb_folder``, ``$llmb_address`` and ``$llmb_port``; exported."""


def batch_script(job: BatchJob) -> str:
    return "\n".join([*_head(job), "", *_environment(job), "", END, "", *_meeting_point(job), "", *_work(job)]) + "\n"


def _head(job: BatchJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {job.title}"
    yield from (directive(name, value) for name, value in job.flags.items())


def _environment(job: BatchJob) -> Iterator[str]:
    yield "unset SLURM_JWT  # by which sbatch knew who submits; no job has a use for it"
    yield from (f"module load {shlex.quote(module)}" for module in job.modules)
    yield from (f". {shlex.quote(profile)}" for profile in job.profiles)
    yield from (f"export {item.name}={shlex.quote(item.value)}  # {item.origin}" for item in job.variables)
    yield f"llmb_threads=$((${{SLURM_CPUS_ON_NODE:-1}} / {job.processes_per_node}))"
    yield 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((llmb_threads > 1 ? llmb_threads : 1))}"'


END = r"""set -uo pipefail
llmb_exit_code=1
llmb_signal=
llmb_workers=
llmb_woken=

# Tells how the job ended, whatever ended it: Slurm forgets, and keeps no account everywhere.
llmb_leave() {
    local code=$? file="$llmb_folder/job_end.json"
    trap - EXIT
    printf '{"job_id": "%s", "restarts": %d, "exit_code": %d, "signal": "%s", "ended_at": "%s"}\n' \
        "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$code" "$llmb_signal" "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" \
        >"$file.$$" && mv -f "$file.$$" "$file"
    exit "$code"
}

# Slurm sends TERM to every process of the job, and what --signal asks for to this script alone.
llmb_end() {
    llmb_signal=$1
    llmb_woken=1
    if [ "$1" != TERM ] && [ -n "$llmb_workers" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID"
    fi
}"""

TRAPS = """trap llmb_leave EXIT
trap 'llmb_end TERM' TERM
trap 'llmb_end USR1' USR1"""


WAIT = r"""llmb_workers=$!
while :; do
    llmb_woken=
    wait "$llmb_workers"
    llmb_exit_code=$?
    # A signal ends 'wait' before the workers have ended.
    [ -n "$llmb_woken" ] || break
done"""


def _meeting_point(job: BatchJob) -> Iterator[str]:
    yield f"llmb_folder={command_line([job.folder])}"
    yield f"llmb_python={shlex.quote(job.python)}"
    yield TRAPS
    yield ""
    yield "# The first node as Slurm reaches it: its name need not be known to the others."
    yield 'llmb_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    yield "llmb_known=$(scontrol -o show node \"$llmb_address\" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"
    yield 'llmb_address="${llmb_known:-$llmb_address}"'
    yield "llmb_port=$((20000 + SLURM_JOB_ID % 10000))"
    yield from (f"export {name}={value}" for name, value in (job.shell_variables or {}).items())


def _work(job: BatchJob) -> Iterator[str]:
    if job.begin:
        yield f"{command_line(job.begin)} || exit $?"
    yield '[ -z "$llmb_signal" ] || exit 143'
    yield ""
    log = f'"$llmb_folder"/{shlex.quote(job.log)}'
    yield f"{command_lines(job.work)} \\\n    >>{log} 2>&1 </dev/null &"
    yield WAIT
    if job.finish:
        yield ""
        finish = [*job.finish, Shell('"$llmb_exit_code"'), Shell('"$llmb_signal"')]
        yield f'{command_line(finish)} || echo "llmb: the result could not be written here" >&2'
    yield 'exit "$llmb_exit_code"'
