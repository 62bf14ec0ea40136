# SPDX-License-Identifier: Apache-2.0
"""The section ``slurm`` of cluster_config.yaml, and parsing of sbatch's flags."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llmb.base.errors import UsageError
from llmb.base.secrets import HIDDEN, has_secret, holds_secret
from llmb.catalogue.records import Record
from llmb.launch.jobspec.job_options import Flags, StartMode
from llmb.launch.site.cluster_config import texts
from llmb.launch.site.site import Site

NO_FLAG = ""
# Flags that users cannot set, and the option or the part of llmb that determines them.
DECIDED = {
    "nodes": "--scale or --nodes",
    "ntasks": "--scale and --gpus-per-node",
    "ntasks-per-node": "--gpus-per-node and --start",
    "gpus": "--scale",
    "gpus-per-task": "--start",
    "output": "the run folder",
    "error": "the run folder",
    "open-mode": "the run folder",
    "chdir": "the run folder",
    "export": "--env",
    "array": "--repeats",
    "requeue": "--retries",
    "wait": "--wait",
    "wrap": "the recipe",
    "parsable": "llmb",
    "quiet": "llmb",
    "test-only": "--dry-run",
}
GPU_FLAGS = ("gpus-per-node", "gres")
"""The flags that request GPUs. If a flag is removed, as in ``gres=``, llmb adds no request for GPUs."""
PER_GPU = ("mem-per-gpu", "cpus-per-gpu")
"""Flags that sbatch rejects for a job without GPUs."""
EXCLUDING = (("requeue", "no-requeue"), ("mem", "mem-per-cpu", "mem-per-gpu"), ("cpus-per-task", "cpus-per-gpu"))
"""Groups of mutually exclusive flags of sbatch."""

NAME = re.compile(r"[a-z][a-z0-9-]*")
# Slurm's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?|UNLIMITED|INFINITE")
PLAIN = re.compile(r"[\w@%+=:,./&|()\[\]*^-]+", re.ASCII)
LONGEST_VALUE = 4096
_NEXT_PAIR = re.compile(r",\s*[a-z-]+=")


def parse_flag(text: str) -> tuple[str, str | None]:
    """Split ``key[=value]``, with or without leading dashes; the value is None if there is no ``=``."""
    key, equals, value = text.strip().partition("=")
    return key.strip().lstrip("-"), value.strip() if equals else None


def parse_flags(texts: Iterable[str], what: str) -> dict[str, str | None]:
    """Parse flags from the source ``what``; raise UsageError if a flag is set to different values."""
    flags: dict[str, str | None] = {}
    for text in texts:
        key, value = parse_flag(text)
        if key in flags and flags[key] != value:
            values = f"{_shown(flags[key])} and {_shown(value)}"
            raise UsageError(f"{what} has duplicate key '{key}': {values}", do="set each flag only once")
        flags[key] = value
    return flags


def parse_additional(text: str) -> dict[str, str | None]:
    """Parse flags such as ``a=b,c;d=e``; raise UsageError if commas seem to separate flags, or one has two values."""
    parts = [part for part in text.split(";") if part.strip()]
    for part in parts:
        if _NEXT_PAIR.search(part):
            do = "separate flags with ';', or pass a value that contains ',name=' with --slurm-arg"
            raise UsageError(f"this may be several flags: '{part.strip()}'", where="ADDITIONAL_SLURM_PARAMS", do=do)
    return parse_flags(parts, "ADDITIONAL_SLURM_PARAMS")


def on_top(*layers: Flags) -> dict[str, str | None]:
    """Merge layers of flags; a flag replaces earlier flags that have its name or that it excludes."""
    flags: dict[str, str | None] = {}
    for layer in layers:
        for group in EXCLUDING:
            if any(name in layer for name in group):
                flags = {name: value for name, value in flags.items() if name not in group}
        flags.update(layer)
    return flags


def requested_flags(flags: Flags) -> dict[str, str | None]:
    return {name: value for name, value in flags.items() if value != NO_FLAG}


def flag_problems(flags: Flags) -> Iterator[str]:
    """Yield the reasons why ``flags`` are invalid, or cannot be written into a batch script or set by users."""
    yield from _conflicts(flags)
    for name, value in flags.items():
        if not NAME.fullmatch(name):
            yield f"'{name}' is not a long name of an sbatch flag, such as 'reservation'"
        elif name in DECIDED:
            yield f"'{name}' cannot be set: it is determined by {DECIDED[name]}"
        if value is None:
            continue
        if holds_secret(name, value):
            yield f"{name} looks like a secret, which the batch script would contain"
        elif not value.isprintable():
            yield f"{name} contains an unprintable character: {value!r}"
        elif len(value) > LONGEST_VALUE:
            yield f"{name} is longer than {LONGEST_VALUE} characters"
        elif name == "time" and value and not TIME.fullmatch(value):
            yield f"the time limit is '{value}'; it must be minutes, hh:mm:ss or d-hh:mm:ss"
        elif name in ("nice", "segment") and value and not re.fullmatch(r"-?\d+", value):
            yield f"{name} is '{value}'; it must be a whole number"


def _conflicts(flags: Flags) -> Iterator[str]:
    for group in EXCLUDING:
        if len(both := [name for name in group if name in flags]) > 1:
            yield f"{' and '.join(both)} are mutually exclusive; pass only one"


def directive(name: str, value: str | None) -> str:
    """Format a flag as a line of a batch script, escaped because sbatch strips quotes and backslashes."""
    if value is None:
        return f"#SBATCH --{name}"
    if PLAIN.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def duration(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def minutes(text: str) -> float | None:
    """Convert a time in one of Slurm's formats to minutes; return None if it is invalid or unlimited."""
    match = TIME.fullmatch(text)
    if not match or match[2] is None:
        return None
    days, first, second, third = (int(part) if part else None for part in match.groups())
    head = first or 0
    if days is not None:
        return (days * 24 + head) * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return head * 60 + (second or 0) + third / 60
    return head + (second or 0) / 60


def _shown(value: str | None) -> str:
    return "no value" if value is None else f"'{HIDDEN if has_secret(value) else value}'"


GpuRequest = Literal["gpus-per-node", "gres", "none"]


def partition_names(text: str | None) -> list[str]:
    """Split a comma-separated list of partitions; without a list, return one empty name."""
    return [name.strip() for name in (text or "").split(",")]


def _name_of_gres(value: str | None) -> str | None:
    if value and not value.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"'{value}' is not a name such as h100")
    return value


class PartitionSettings(Record):
    """Settings of a partition; if None, the setting of the cluster applies."""

    gpu_type: str | None = None
    """The GPU type of the partition's nodes."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    gpu_request: GpuRequest | None = None
    gres_type: str | None = None

    _gres_type_is_a_name = field_validator("gres_type")(_name_of_gres)


class SlurmSettings(Record):
    """The cluster's defaults for requests to Slurm."""

    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    """The partition for jobs without GPUs; None to use ``partition``."""
    partitions: dict[str, PartitionSettings] = Field(default_factory=dict)
    """Settings by partition, if partitions have different GPUs, or request them by different flags."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """The number of GPUs per node; None for the number in the catalogue for the GPU type."""
    gpu_request: GpuRequest = "gpus-per-node"
    gres_type: str | None = None
    """The GPU type in requests for GPUs, such as ``--gres=gpu:TYPE:N``; None omits it."""
    start: StartMode = "torchrun"
    retries: int = Field(default=0, ge=0)
    """The default maximum number of restarts after infrastructure failures."""
    flags: dict[str, str | None] = Field(default_factory=dict)
    """Other flags of sbatch by their long names; None for a flag without a value, ``NO_FLAG`` to remove the flag."""
    srun_flags: dict[str, str | None] = Field(default_factory=dict)
    """Flags of srun for the workers' step."""

    _gres_type_is_a_name = field_validator("gres_type")(_name_of_gres)

    def types_of(self, partition: str | None) -> dict[str, str]:
        """Return the configured GPU types by partition, for a list of partitions separated by commas."""
        names = partition_names(partition)
        types = {name: self.partitions[name].gpu_type for name in names if name in self.partitions}
        return {name: gpu_type for name, gpu_type in types.items() if gpu_type}

    def within(self, partition: str | None) -> Self:
        """Return the settings, overridden by the first partition in the list that has settings of its own."""
        names = partition_names(partition)
        part = next((self.partitions[name] for name in names if name in self.partitions), PartitionSettings())
        fields = part.model_dump(exclude={"gpu_type"}, exclude_none=True)
        return self.model_copy(update=fields)

    @field_validator("flags", "srun_flags", mode="before")
    @classmethod
    def _values_are_text(cls, value: object) -> object:
        """Convert numbers to text; true is a flag without a value, and false removes a flag."""
        values = texts(value)
        if not isinstance(values, dict):
            return values
        return {key: {True: None, False: NO_FLAG}[item] if type(item) is bool else item for key, item in values.items()}

    @model_validator(mode="after")
    def _flags_can_be_given(self) -> Self:
        flags = {"account": self.account, "partition": self.partition}
        names = {"partition": ",".join(filter(None, (self.cpu_partition, *self.partitions)))}
        problems = [
            *flag_problems({**self.flags, **{name: value for name, value in flags.items() if value}}),
            *(flag_problems(names)),
            *(f"flags.{name} must be set as slurm.{name} instead" for name in flags if name in self.flags),
            *flag_problems({f"srun-{name}": value for name, value in self.srun_flags.items()}),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def settings_of(site: Site) -> SlurmSettings:
    section = getattr(site.config, "slurm", None)
    return section if isinstance(section, SlurmSettings) else SlurmSettings()
