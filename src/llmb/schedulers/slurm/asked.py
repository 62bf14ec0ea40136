# SPDX-License-Identifier: Apache-2.0
"""Flags that a user asks for, by options and by the shell. Pure."""

import re
from collections.abc import Mapping, Sequence

from llmb.errors import UsageError
from llmb.jobspec.options import Flags
from llmb.schedulers.slurm.flags import flag_problems, on_top, parse_additional, parse_flags

ADDITIONAL = "ADDITIONAL_SLURM_PARAMS"
# Variables that choose a flag, the first that is set. sbatch itself reads some of them, and would prefer them to the
# batch script; so they are written into it, and kept from sbatch.
FLAG_VARIABLES: Mapping[str, Sequence[str]] = {
    "account": ("SBATCH_ACCOUNT", "SLURM_ACCOUNT"),
    "partition": ("SBATCH_PARTITION", "SLURM_PARTITION"),
    "qos": ("SBATCH_QOS",),
    "reservation": ("SBATCH_RESERVATION",),
    "constraint": ("SBATCH_CONSTRAINT",),
    "exclude": ("SBATCH_EXCLUDE",),
    "nodelist": ("SBATCH_NODELIST",),
    "time": ("TIME_LIMIT", "SBATCH_TIMELIMIT"),
}
MOST_INDICES = 1000
ARRAY_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
GPUS_PER_NODE = ("GPUS_PER_NODE", "SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE")


def job_flags(own: Flags, others: Sequence[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Flags of the options ``own`` and of ``--slurm-arg``, above those of the shell.

    Raises UsageError with all that is wrong, and where an option and --slurm-arg say different things.
    """
    rest = parse_flags(others, "--slurm-arg")
    twice = [name for name in rest if name in own and rest[name] != own[name]]
    if twice:
        raise UsageError(f"an option and --slurm-arg both give {', '.join(twice)}", do="give one of them")
    additional = parse_additional(environ.get(ADDITIONAL, ""))
    flags = on_top(shell_flags(environ), additional, {**rest, **own})
    problems = [*flag_problems(flags), *_array_problems(flags)]
    if problems:
        raise UsageError("these flags cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return flags


def shell_flags(environ: Mapping[str, str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for flag, names in FLAG_VARIABLES.items():
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is not None:
            found[flag] = value
    return found


def shell_gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Raises UsageError for a value that is no number; 'null' is none, as in the reference suite."""
    name = next((name for name in GPUS_PER_NODE if environ.get(name)), None)
    if name is None or environ[name] == "null":
        return None
    if not environ[name].isascii() or not environ[name].isdigit() or int(environ[name]) < 1:
        raise UsageError(f"{name} is '{environ[name]}'; it must be a number of GPUs, at least 1")
    return int(environ[name])


def array_indices(spec: str) -> list[int]:
    """Indices of Slurm's ``--array``, such as ``0-3``, ``1,4,7``, ``0-15:4%2``. Raises ValueError."""
    spans = []
    for part in spec.partition("%")[0].split(","):
        found = ARRAY_PART.fullmatch(part)
        if not found:
            raise ValueError(f"'{part}' is no index and no range")
        first, last, step = found.groups()
        spans.append(range(int(first), int(last or first) + 1, int(step or 1)))
    if sum(map(len, spans)) > MOST_INDICES:
        raise ValueError(f"more than {MOST_INDICES} indices")
    indices = [index for span in spans for index in span]
    if not indices or len(set(indices)) < len(indices):
        raise ValueError("it has to name different indices")
    return indices


def _array_problems(flags: Flags) -> list[str]:
    spec = flags.get("array")
    if not spec:
        return []
    try:
        array_indices(spec)
    except ValueError as error:
        return [f"array is '{spec}', but {error}; Slurm takes such as 0-3 or 1,4,7, and %2 for two at a time"]
    return []
