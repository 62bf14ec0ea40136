# SPDX-License-Identifier: Apache-2.0
"""What an installation is asked for: the answers of its user, as a file and as options."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.options.option import Option, limit_problems, options_of
from llmb.secrets import holds_secret

UNMOUNTABLE = ",:"
"""Container runtimes separate mounts by them."""
NONE = "none"
"""Answers a question that has an answer on other clusters; a question without an answer is open."""
ALL = "all"
EXISTING = "existing"

SchedulerName = Literal["slurm", "local"]
EnvironmentKind = Literal["uv", "venv", "conda", "existing"]
GpuRequest = Literal["gpus-per-node", "gres", "none"]
Runtime = Literal["none", "pyxis", "apptainer"]
Where = Literal["here", "job", "no"]

_place = partial(Option, panel="Place")
_cluster = partial(Option, panel="Cluster")
_software = partial(Option, panel="Software")
_data = partial(Option, panel="Data and checkpoints")


SHELL = {"gpu_type": "GPU_TYPE"}
QUEUE_SHELL = {"account": "SBATCH_ACCOUNT", "gpu_partition": "SBATCH_PARTITION"}
"""The reference suite's variables, by the answer that they give."""


class Answers(Record):
    """Everything is optional here: ``questions`` tells which answers an installation cannot do without.

    ``none`` is an answer, too; None is an open question.
    """

    path: Annotated[str | None, _place(help="Folder of the installation, LLMB_INSTALL afterwards.", folder=True)] = None
    workloads: Annotated[
        tuple[str, ...],
        _place(
            help="Workload to install, or 'all' for those of the GPU type. Repeatable, or with commas.",
            flags=("-w", "--workload", "--workloads"),
            repeatable=True,
        ),
    ] = ()
    scheduler: Annotated[SchedulerName | None, _cluster(help="What starts jobs: Slurm, or this machine alone.")] = None
    account: Annotated[str | None, _cluster(help="Slurm account, or none.")] = None
    gpu_partition: Annotated[str | None, _cluster(help="Partition of the nodes that train.")] = None
    cpu_partition: Annotated[
        str | None, _cluster(help="Partition for jobs that need no GPU, or none for the other one.")
    ] = None
    gpu_type: Annotated[str | None, _cluster(help="GPU type, such as h100, or cpu.")] = None
    node_architecture: Annotated[
        Literal["x86_64", "aarch64"] | None, _cluster(help="Architecture of the nodes that train.")
    ] = None
    gpus_per_node: Annotated[int | None, _cluster(help="GPUs of a node.", minimum=1)] = None
    gpu_request: Annotated[
        GpuRequest | None,
        _cluster(help="How jobs request GPUs: a flag of sbatch, or none if Slurm does not count them."),
    ] = None
    gres_type: Annotated[
        str | None, _cluster(help="Type in --gres=gpu:TYPE:N, or none. Default: none.", metavar="TYPE")
    ] = None
    fabric: Annotated[
        str | None, _cluster(help="Network between nodes, by its name in the catalogue, or none. Default: none.")
    ] = None
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every job; no secrets."""
    environment: Annotated[
        EnvironmentKind | None, _software(help="How the Python environment is made, or that one exists already.")
    ] = None
    python: Annotated[
        str | None,
        _software(help="Python to make it with, or the existing one. Default: the one that runs this command."),
    ] = None
    torch: Annotated[
        str | None,
        _software(
            help="Build of PyTorch: pypi, cpu, cu126, cu128, cu130, the address of an index, or existing for the one "
            "that this Python has."
        ),
    ] = None
    torch_version: Annotated[str | None, _software(help="Version of PyTorch, such as 2.11.0. Default: >=2.11.")] = None
    package: Annotated[
        str | None,
        _software(
            help="llmb itself: a folder with its source, a wheel, or a requirement. "
            "Default: the version that is running."
        ),
    ] = None
    container_runtime: Annotated[Runtime | None, _software(help="What starts containers. Default: none.")] = None
    image: Annotated[str | None, _software(help="Container image: a file, or the name of one in a registry.")] = None
    image_folder: Annotated[
        str | None, _software(help="Folder for images. Default: images in the installation.", folder=True)
    ] = None
    prepare: Annotated[
        Where | None, _data(help="Prepare data and checkpoints of fine-tunings: here, as Slurm jobs, or not.")
    ] = None
    dataset_source: Annotated[
        str | None, _data(help="Folder or file with the dataset, in place of the hub.", folder=True)
    ] = None
    checkpoint_source: Annotated[
        str | None, _data(help="Folder of the Hugging Face model, in place of the hub.", folder=True)
    ] = None
    size: Annotated[str | None, _data(help="Model size to prepare. Default: that of the documents.")] = None

    @field_validator("workloads", mode="before")
    @classmethod
    def _commas_separate(cls, value: object) -> object:
        """Names in lower case, without repeats."""
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            return value
        names = (name.strip().lower() for item in items for name in item.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @field_validator("gpu_type", "scheduler", "environment", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    def above(self, below: "Answers") -> "Answers":
        """These answers, and those of ``below`` to what is open here; workloads and variables of both."""
        mine = self.model_dump(exclude_none=True)
        both = {**below.model_dump(exclude_none=True), **mine}
        both["workloads"] = tuple(dict.fromkeys([*below.workloads, *self.workloads]))
        both["variables"] = {**below.variables, **self.variables}
        return Answers.model_validate(both)

    def document(self) -> dict[str, Any]:
        """What a file of answers holds: nothing that is open."""
        kept = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in kept.items() if value not in ([], {})}

    def problems(self) -> Iterator[str]:
        """What no cluster could take."""
        yield from limit_problems(self)
        for name, value in self._texts().items():
            if holds_secret(name, value):
                yield f"{name} looks like a secret, which would be written to files; leave it in the environment"
            elif not value.isprintable():
                yield f"{name} holds a character that does not print"

    def _texts(self) -> Mapping[str, str]:
        own = {name: value for name, value in self.model_dump().items() if isinstance(value, str)}
        return {**own, **self.variables}


OPTIONS = options_of(Answers)


def answers_of_shell(environ: Mapping[str, str], *, queues: bool) -> Answers:
    """What the variables of the reference documents answer; account and partition only where jobs can be queued."""
    names = {**SHELL, **(QUEUE_SHELL if queues else {})}
    values = {answer: environ.get(name, "").strip() for answer, name in names.items()}
    return Answers.model_validate({answer: value for answer, value in values.items() if value})


def flag_of(name: str) -> str:
    return OPTIONS[name].spelled


def given_answers(values: Mapping[str, Any]) -> Answers:
    """The answers that options of a command line give; None is open. Raises UsageError."""
    from pydantic import ValidationError

    given = {name: OPTIONS[name].value(value) for name, value in values.items() if value not in (None, [])}
    try:
        return Answers.model_validate(given)
    except ValidationError as error:
        lines = [f"{flag_of(str(item['loc'][0]))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise UsageError("\n".join(lines)) from error


def absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def path_problem(text: str) -> str | None:
    """What is wrong with the folder of an installation, in words."""
    path = absolute(text)
    if not Path(text).expanduser().is_absolute():
        return f"'{text}' is not absolute"
    normal = Path(os.path.normpath(path))
    if normal == Path(normal.anchor) or normal == Path.home():
        return f"'{text}' is not a folder of its own; give one below it"
    if any(letter in text for letter in UNMOUNTABLE) or not text.isprintable():
        return "a comma, a colon or a character that does not print is in the path; containers cannot mount it"
    try:
        return _place_problem(normal)
    except OSError as error:
        return f"'{text}' cannot be used: {error.strerror}"


def _place_problem(path: Path) -> str | None:
    if path.is_dir():
        return None if os.access(path, os.W_OK | os.X_OK) else f"you may not write to '{path}'"
    if path.exists() or path.is_symlink():
        return f"'{path}' is not a folder"
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}'; make it first, if the path is right"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not write to '{path.parent}'"
    return None
