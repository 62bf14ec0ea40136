# SPDX-License-Identifier: Apache-2.0
"""The user's answers to the installer's questions, from options and the reference suite's variables."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, field_validator

from llmb.base.errors import UsageError
from llmb.base.options import Option, limit_problems, options_of
from llmb.base.secrets import holds_secret
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.launch.documents.launch_scripts import LaunchScript, launch_scripts
from llmb.launch.scheduler_lookup import SCHEDULERS, all_schedulers, find_scheduler

UNMOUNTABLE = ",:"
"""Characters with which container runtimes separate mounts, so that paths cannot contain them."""
ALL = "all"
EXISTING = "existing"
LISTED = ("workloads", "suite_releases")
"""Answers with several values, to which later answers add."""

EnvironmentKind = Literal["uv", "venv", "conda", "existing"]
Runtime = Literal["none", "pyxis", "apptainer"]
Where = Literal["here", "job", "no"]

_place = partial(Option, panel="Place")
_cluster = partial(Option, panel="Cluster")
_software = partial(Option, panel="Software")
_data = partial(Option, panel="Data and checkpoints")


class Answers(Record):
    """Answers to the installer's questions; None is an open question, unlike ``none``.

    Schedulers add answers in ``answers_schema``.
    """

    path: Annotated[
        str | None, _place(help="Shared folder to install to. Default: LLMB_INSTALL or STAGE_PATH.", folder=True)
    ] = None
    workloads: Annotated[
        tuple[str, ...],
        _place(
            help="Workload to install; all: those that run on the GPU type. Repeatable, or separated by commas.",
            flags=("-w", "--workload", "--workloads"),
            repeatable=True,
        ),
    ] = ()
    suite_releases: Annotated[
        tuple[str, ...],
        _place(
            help="Also install the reference suite's own software of this release, such as 25.04, for the chosen "
            "workloads that the release has. Repeatable, or separated by commas.",
            flags=("--suite-releases", "--suite-release"),
            repeatable=True,
        ),
    ] = ()
    scheduler: str | None = None
    gpu_type: Annotated[
        str | None, _cluster(help="GPU type, such as h100, or cpu. Default: as detected.", set_by=("GPU_TYPE",))
    ] = None
    node_architecture: Annotated[
        Literal["x86_64", "aarch64"] | None,
        _cluster(help="Architecture of the nodes that train. Default: as detected, else this machine's."),
    ] = None
    gpus_per_node: Annotated[
        int | None, _cluster(help="GPUs per node. Default: as detected, else, on a cluster, the GPU type's.", minimum=1)
    ] = None
    fabric: Annotated[
        str | None,
        _cluster(help="Network between nodes, by its name in the catalogue. Default: none; NCCL then chooses."),
    ] = None
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every job; no secrets."""
    environment: Annotated[
        EnvironmentKind | None,
        _software(
            help="Tool that creates the Python environment; existing: use --python. Default: uv if present, else venv."
        ),
    ] = None
    python: Annotated[
        str | None,
        _software(
            help="Python for the environment: a program or, for uv, also a version; for conda, only a version. Default:"
            " the Python that runs this command, or its version."
        ),
    ] = None
    torch: Annotated[
        str | None,
        _software(
            help="PyTorch build: pypi, cpu, cu126, cu128, cu130, the address of an index, or 'existing' for the one in"
            " --python. Default: cpu if the GPU type is; else the newest this machine's driver supports, else pypi."
        ),
    ] = None
    torch_version: Annotated[str | None, _software(help="Version of PyTorch, such as 2.11.0. Default: >=2.11.")] = None
    package: Annotated[
        str | None,
        _software(
            help="llmb to install: a folder with its source, a wheel, or a requirement. "
            "Default: the version that is running."
        ),
    ] = None
    container_runtime: Annotated[Runtime | None, _software(help="Container runtime. Default: none.")] = None
    image: Annotated[str | None, _software(help="Image for --container-runtime: a file or name in a registry.")] = None
    image_folder: Annotated[
        str | None, _software(help="Folder for images. Default: 'images' in the installation.", folder=True)
    ] = None
    prepare: Annotated[
        Where | None,
        _data(help="Where to prepare fine-tuning data and checkpoints: this machine, jobs, or not at all."),
    ] = None
    dataset_source: Annotated[
        str | None, _data(help="Folder or file with the dataset. Default: the Hugging Face hub.", folder=True)
    ] = None
    checkpoint_source: Annotated[
        str | None, _data(help="Folder with the Hugging Face model, if there is one. Default: the hub.", folder=True)
    ] = None
    size: Annotated[str | None, _data(help="Model size to prepare. Default: all except tiny.")] = None

    @field_validator("workloads", "suite_releases", mode="before")
    @classmethod
    def _commas_separate(cls, value: object) -> object:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            return value
        names = (name.strip().lower() for item in items for name in item.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @field_validator("gpu_type", "scheduler", "environment", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("prepare", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: object) -> object:
        return "no" if value is False else value  # YAML reads an unquoted no as false

    def above(self, below: "Answers") -> "Answers":
        """Return these answers, completed from ``below``; workloads, releases and variables are merged."""
        mine = self.model_dump(exclude_none=True)
        both = {**below.model_dump(exclude_none=True), **mine}
        for name in LISTED:
            both[name] = tuple(dict.fromkeys([*getattr(below, name), *getattr(self, name)]))
        both["variables"] = {**below.variables, **self.variables}
        return answers_schema().model_validate(both)

    @property
    def has_gpus(self) -> bool:
        return self.gpu_type not in (None, CPU)

    def document(self) -> dict[str, Any]:
        """Return the answers as the content of a file, without open answers."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in values.items() if value not in ([], {})}

    def problems(self) -> Iterator[str]:
        """Yield problems that do not depend on the cluster: exceeded limits, secrets, and unprintable characters."""
        yield from limit_problems(self)
        for name, value in self._texts().items():
            if holds_secret(name, value):
                yield f"{name} looks like a secret, which would be written to files; leave it in the environment"
            elif not value.isprintable():
                yield f"{name} contains a character that is not printable"

    def _texts(self) -> Mapping[str, str]:
        paths = {name: value for name, value in self.model_dump().items() if isinstance(value, str)}
        return {**paths, **self.variables}


@cache
def answers_schema() -> type[Answers]:
    """Return the schema of all answers, including the answers for every scheduler."""
    parts = (item.answers for item in all_schedulers() if item.answers is not Record)
    option = _cluster(help="Scheduler of the cluster, or local for this machine alone. Default: slurm if usable.")
    fields: dict[str, Any] = {"scheduler": (Annotated[Literal[tuple(SCHEDULERS)] | None, option], None)}
    return create_model("AllAnswers", __base__=(*parts, Answers), **fields)  # type: ignore[arg-type]


OPTIONS = options_of(answers_schema())


def answers_of_shell(environ: Mapping[str, str], schedulers: Iterable[str]) -> Answers:
    """Return the answers in the reference suite's environment variables, including the variables of ``schedulers``."""
    names = {*Answers.model_fields}.union(*(find_scheduler(name).answers.model_fields for name in schedulers))
    options = [option for name, option in OPTIONS.items() if name in names]
    values = {option.name: environ.get(variable, "").strip() for option in options for variable in option.set_by}
    return answers_schema().model_validate({name: value for name, value in values.items() if value})


def suite_scripts(answers: Answers, *releases: str) -> Iterator[LaunchScript]:
    """Yield the launch scripts of ``releases``, or of all chosen releases, for the chosen workloads and GPU type."""
    for script in launch_scripts():
        is_chosen = script.release in (releases or answers.suite_releases) and script.workload in answers.workloads
        if is_chosen and answers.gpu_type in (None, *script.gpu_types):
            yield script


def flag_of(name: str) -> str:
    return OPTIONS[name].spelled


def parse_answers(values: Mapping[str, Any]) -> Answers:
    """Return the answers from command-line options, where None is open; raise UsageError for invalid values."""
    from pydantic import ValidationError

    values_read = {name: OPTIONS[name].value(value) for name, value in values.items() if value not in (None, [])}
    try:
        return answers_schema().model_validate(values_read)
    except ValidationError as error:
        lines = [f"{flag_of(str(item['loc'][0]))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise UsageError("\n".join(lines)) from error


def absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def path_problem(text: str) -> str | None:
    """Describe the problem with an installation folder, if any."""
    path = absolute(text)
    if not Path(text).expanduser().is_absolute():
        return f"'{text}' is not absolute"
    normal = Path(os.path.normpath(path))
    if normal == Path(normal.anchor) or normal == Path.home():
        return f"'{text}' is not a folder of its own; use a folder below it"
    if any(letter in text for letter in UNMOUNTABLE) or not text.isprintable():
        return "the path contains a comma, a colon or an unprintable character; containers cannot mount it"
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
        return f"there is no folder '{path.parent}'; create it first, if the path is right"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not write to '{path.parent}'"
    return None
