# SPDX-License-Identifier: Apache-2.0
"""Options of a job beyond those of its run, and settings of its workers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmb.base.errors import UsageError
from llmb.base.options import Option
from llmb.base.secrets import has_secret, holds_secret
from llmb.catalogue.records import Record

Vboost = Literal["recipe"] | Annotated[int, Field(ge=0, le=4)]
"""Level of ``nvidia-smi boost-slider``; 0 is the driver's default. ``recipe`` is the level of the published jobs."""
CpuBinding = Literal["none", "cores"] | Annotated[int, Field(ge=1)]
NumaBinding = Literal["auto", "none", "local"]


def text_problems(text: str) -> Iterator[str]:
    """Yield the reason, if any, why ``text`` cannot be written into a batch script."""
    if has_secret(text):
        yield "it looks like a secret, which the batch script would contain; log in on the nodes instead"
    elif not text.isprintable():
        yield f"{text!r} contains an unprintable character"


class ContainerSettings(Record):
    """The container in which workers run, if any."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """Mounts as ``path`` or ``path:path inside[:options]``, in addition to the folders that a job needs."""
    python: str = "python3"
    """The interpreter with llmb and torch inside the container."""

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        problems = [problem for item in self._texts() for problem in text_problems(item)]
        problems += [
            f"the mount '{mount}' contains a comma, which separates mounts" for mount in self.mounts if "," in mount
        ]
        if self.runtime != "none" and not self.image:
            problems.append(f"{self.runtime} requires an image")
        if self.runtime == "none" and self.image:
            problems.append("an image requires a runtime: pyxis or apptainer")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _texts(self) -> Iterator[str]:
        yield from (self.image or "", *self.mounts, self.python)


class Boost(Record):
    """The level of ``nvidia-smi boost-slider`` while the workers train."""

    level: int
    required: bool = True
    """True if the job must fail when a node cannot set the level."""


class Binding(Record):
    """The CPU cores and the memory to which the workers of a node are bound."""

    cpu: CpuBinding = "none"
    """Cores of each worker: ``cores`` for an equal part of the available cores, or a number of cores."""
    numa: NumaBinding = "auto"
    """``local`` restricts each worker to the cores and memory of one NUMA node: its GPU's, if known. ``auto`` does the
    same, but leaves other memory usable, if ``cpu`` is ``none`` and there are several GPUs with NUMA nodes that the
    system reports."""

    def arguments(self, *, gpus: bool, workers: int) -> tuple[str, str] | None:
        """Return the arguments of ``llmb.launch.bind`` on a node with this number of workers; None for no binding."""
        cpu, numa = str(self.cpu), self.numa
        if numa == "auto" and (cpu != "none" or not gpus or workers == 1):
            numa = "none"
        return None if (cpu, numa) == ("none", "none") else (cpu, numa)


UNBOUND = Binding(numa="none")


Flags = Mapping[str, str | None]
"""A scheduler's own flags by long name. None means a flag without a value; an empty value removes an inherited flag."""

StartMode = Literal["torchrun", "task-per-gpu"]
FrameworkName = Literal["megatron_bridge", "reference_suite", "torchtitan"]
NAMES = (r"[a-z][a-z0-9_]*", r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
"""Patterns of the names of frameworks' arguments, without and with a section."""
_option = partial(Option, panel="Container and framework")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The user's options for a job; None selects the cluster's setting or, if it has none, the default."""

    flags: Flags = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    """The number of nodes, which determines the scale if the scale is not specified."""
    gpus_per_node: int | None = None
    start: StartMode | None = None
    gpu_request: str | None = None
    """The scheduler's flag with which GPUs are requested."""
    vboost: Vboost | None = None
    cpu_binding: CpuBinding | None = None
    numa_binding: NumaBinding | None = None
    retries: int | None = None
    """The maximum number of restarts after infrastructure failures."""
    python: str = "python3"
    """The interpreter on the nodes, if the cluster's settings name none."""


class FrameworkChoices(Record):
    """The options of a job's framework: which one, the suite's checkout, the image, mounts and arguments."""

    framework: Annotated[
        FrameworkName | None,
        _option(
            help="Software that trains: torchtitan or, in Slurm jobs only, Megatron-Bridge in a container or the"
            " reference suite's own launch script for the recipe's release. Default: llmb's engine."
        ),
    ] = None
    suite: Annotated[
        str | None,
        _option(
            help="Checkout of the reference suite, for --framework reference_suite. Default: as in cluster_config.yaml,"
            " else the clone made by 'llmb install', else llmb_repo in the install root.",
            folder=True,
        ),
    ] = None
    modified_suite: Annotated[
        bool,
        _option(
            help="Run a launch script of the reference suite even if it was modified; the run then no longer represents"
            " its document."
        ),
    ] = False
    image: Annotated[
        str | None, _option(help="Container image. Default: the framework's, else that in cluster_config.yaml.")
    ] = None
    mounts: Annotated[str | None, _option(help="More mounts, such as /data or /data:/mnt, separated by commas.")] = None
    framework_arg: Annotated[
        tuple[str, ...],
        _option(help="Argument for the framework. Repeatable.", metavar="[SECTION.]NAME=VALUE", repeatable=True),
    ] = ()


class FrameworkOptions(Record):
    """The framework that trains, with its image and arguments; ``framework`` is None for llmb's own engine."""

    framework: FrameworkName | None = None
    suite: str | None = None
    """The checkout of the reference suite; None for the default of ``--suite``."""
    modified_suite: bool = False
    """True if the suite's scripts may differ from their release."""
    image: str | None = None
    mounts: tuple[str, ...] = ()
    """Mounts in addition to the mounts in the cluster's settings."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """Arguments of the framework's script, by name."""


def framework_options(chosen: FrameworkChoices) -> FrameworkOptions:
    """Check and convert the choices; raise UsageError if an option or argument is invalid."""
    arguments: dict[str, str] = {}
    texts = {"--image": chosen.image, "--mounts": chosen.mounts}
    problems = [f"{name}: {problem}" for name, text in texts.items() for problem in text_problems(text or "")]
    dotted = chosen.framework == "torchtitan"
    for text in chosen.framework_arg:
        name, equals, value = text.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if holds_secret(name, value):
            problems.append(f"--framework-arg {name} looks like a secret, which the batch script would contain")
        elif not equals or not re.fullmatch(NAMES[dotted], name, re.ASCII) or not value.isprintable():
            problems.append(f"--framework-arg is {text!r}; it must be {'SECTION.' * dotted}NAME=VALUE")
        elif name in arguments:
            problems.append(f"--framework-arg has duplicate key '{name}'")
        arguments[name] = value
    if problems:
        raise UsageError("\n".join(problems), do="see 'llmb run --help-all' or 'llmb submit --help-all' for the format")
    mounts = tuple(mount.strip() for mount in (chosen.mounts or "").split(",") if mount.strip())
    if (chosen.suite or chosen.modified_suite) and chosen.framework != "reference_suite":
        do = "add --framework reference_suite, or omit --suite and --modified-suite"
        raise UsageError("--suite and --modified-suite require --framework reference_suite", do=do)
    suite = str(Path(chosen.suite).expanduser().absolute()) if chosen.suite else None
    return FrameworkOptions(
        framework=chosen.framework,
        suite=suite,
        modified_suite=chosen.modified_suite,
        image=chosen.image,
        mounts=mounts,
        arguments=arguments,
    )


def framework_arguments(options: FrameworkOptions) -> list[str]:
    """Return the arguments of ``llmb run`` that select the framework and set its arguments."""
    chosen = ["--framework", options.framework] if options.framework else []
    return [*chosen, *(word for pair in options.arguments.items() for word in ("--framework-arg", "=".join(pair)))]
