# SPDX-License-Identifier: Apache-2.0
"""Reads ``cluster_config.yaml``, which contains all settings of a cluster, and the user's defaults; finds keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from llmb.base.errors import UsageError, see, unknown
from llmb.base.trust import check_owner
from llmb.catalogue.data_files import CatalogueError, read_data, schema_problems
from llmb.catalogue.records import Record
from llmb.launch.documents.suite_cluster_config import ReferenceForm, form_of, notes_on, translated
from llmb.launch.jobspec.job_options import Binding, ContainerSettings, Vboost, text_problems
from llmb.launch.jobspec.spec import variable_problems
from llmb.runs.folder import CLUSTER_CONFIG, ROOT_KEY, user_config

Shape = TypeVar("Shape", bound=BaseModel)
Variables = dict[str, str]


class WorkloadSettings(Record):
    """Settings for the jobs of one workload on this cluster."""

    environment: Variables = Field(default_factory=dict)

    @field_validator("environment", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: object) -> object:
        return texts(value)

    @field_validator("environment")
    @classmethod
    def _variables_can_be_set(cls, value: Variables) -> Variables:
        _raise(list(variable_problems(value)))
        return value


class InstallSettings(Record):
    """Answers to the installer, so that an installation can be repeated and extended; runs do not use them."""

    environment: Literal["uv", "venv", "conda", "existing"] | None = None
    """The kind of the shared Python environment."""
    python: str | None = None
    """Version or path of the interpreter with which the environment is created."""
    image_folder: str | None = None
    """The folder of container images; None for ``images`` in the install root."""
    node_architecture: Literal["x86_64", "aarch64"] | None = None
    workloads: tuple[str, ...] = ()
    """Installed workloads."""


class SuiteSettings(Record):
    """Settings of the reference suite on this cluster, for ``--framework reference_suite``."""

    checkout: str | None = None
    """Path of a clone of the suite's repository at the tag of a release."""
    environments: Variables = Field(default_factory=dict)
    """Paths of virtual environments with the suite's software, by workload."""


class ClusterConfig(WorkloadSettings):
    """The content of ``cluster_config.yaml`` without the sections of schedulers; every key is optional."""

    cluster_name: str | None = None
    scheduler: str | None = None
    """The scheduler of jobs; None for Slurm."""
    gpu_type: str | None = None
    """The GPU type to use if none is specified."""
    python: str | None = None
    """The interpreter with llmb and torch on the nodes; None for the interpreter that runs llmb now."""
    fabric: str | None = None
    """The network between nodes, by its name in the catalogue."""
    modules: tuple[str, ...] = ()
    """Modules that the batch script loads with ``module load``, before it sources ``profiles``."""
    profiles: tuple[str, ...] = ()
    """Files that the batch script sources."""
    prolog: tuple[str, ...] = ()
    """Shell commands that every node runs before the workers, outside of the container."""
    vboost: Vboost | None = None
    """The boost of the nodes while the workers train, for jobs on whole nodes."""
    binding: Binding = Field(default_factory=Binding)
    container: ContainerSettings = Field(default_factory=ContainerSettings)
    install: InstallSettings = Field(default_factory=InstallSettings)
    reference_suite: SuiteSettings = Field(default_factory=SuiteSettings)
    workloads: dict[str, WorkloadSettings] = Field(default_factory=dict)
    """The settings by workload."""

    @model_validator(mode="after")
    def _every_text_prints(self) -> Self:
        python = [self.python] if self.python else []
        texts = {"python": python, "modules": self.modules, "profiles": self.profiles, "prolog": self.prolog}
        _raise([f"{key}: {one}" for key, values in texts.items() for text in values for one in text_problems(text)])
        return self

    def environment_of(self, workload: str) -> Variables:
        return self.workloads[workload].environment if workload in self.workloads else {}


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A valid settings file; ``data`` is its content in llmb's format."""

    path: Path
    data: Mapping[str, Any] = field(default_factory=dict)
    form: ReferenceForm | None = None
    """The reference suite's format that the file has, if any."""
    notes: tuple[str, ...] = ()
    """Notes to show to the user whenever the file is read."""
    left_out: tuple[str, ...] = ()
    """Notes on settings in a file of the reference suite that were dropped or changed."""


def read_cluster_file(path: Path, schema: type[ClusterConfig]) -> SettingsFile:
    """Read ``cluster_config.yaml`` in llmb's or the reference suite's format; the result for a missing file is empty.

    ``schema`` covers all schedulers. Raises UsageError with its problems, or if another user than the folder's owns it.
    """
    if not path.exists():
        return SettingsFile(path)
    check_owner(path, path.parent)
    try:
        data = read_data(path)
        form = form_of(data)
        if form is None:
            return SettingsFile(path, checked(path, data, schema))
        config = checked_record(path, data, form.shape)
    except ValueError as error:
        raise unusable(path, [f"{path}: {error}"]) from error
    except CatalogueError as error:
        raise unusable(path, error.problems) from error
    result = translated(config)
    try:
        schema.model_validate(result.data)
    except ValidationError as error:
        problems = (f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise unusable(path, problems) from error
    return SettingsFile(path, result.data, form, tuple(notes_on(form, result)), tuple(result.notes))


def checked(path: Path, data: object, schema: type[Shape]) -> dict[str, Any]:
    """Return the content ``data`` of a file; raise CatalogueError with all problems if it violates ``schema``."""
    checked_record(path, data, schema)
    return data if isinstance(data, dict) else {}


def checked_record(path: Path, data: object, schema: type[Shape]) -> Shape:
    try:
        return schema.model_validate({} if data is None else data)
    except ValidationError as error:
        raise CatalogueError(schema_problems(path, error)) from error


def unusable(path: Path, problems: Iterable[str]) -> UsageError:
    """Return the error to raise for a settings file with these problems."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    return UsageError(f"{path.name} cannot be used:\n{lines}", do=see("describe-a-cluster"))


def read_user_file(environ: Mapping[str, str], schema: type[BaseModel]) -> SettingsFile | None:
    """Read the user's own defaults; return None if there is no file; raise UsageError if it cannot be used."""
    path = user_config(environ)
    if path is None or not path.exists():
        return None
    check_owner(path)
    try:
        return SettingsFile(path, checked(path, read_data(path), schema))
    except CatalogueError as error:
        raise unusable(path, error.problems) from error


def combined(site: SettingsFile, user: SettingsFile | None, schema: type[ClusterConfig]) -> ClusterConfig:
    """Return the cluster's settings, overridden by the user's; raise UsageError if they are invalid together."""
    data = dict(site.data)
    if user:
        data = _above(data, {key: value for key, value in user.data.items() if key != ROOT_KEY})
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        files = f"{site.path} and {user.path}" if user else str(site.path)
        problems = [f"{files}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise unusable(site.path, problems) from error


def read_cluster_config(install: Path, schema: type[ClusterConfig]) -> ClusterConfig:
    """Read the settings below ``install`` without the user's; raise UsageError if they are invalid."""
    return combined(read_cluster_file(install / CLUSTER_CONFIG, schema), None, schema)


def _above(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _above(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **both}


def texts(value: object) -> object:
    """Convert numbers in a YAML mapping to text; other values are left to the schema."""
    if not isinstance(value, dict):
        return value
    return {key: str(item) if type(item) in (int, float) else item for key, item in value.items()}


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


NAME = "<name>"


def split_key(schema: type[BaseModel], text: str) -> tuple[str, ...]:
    """Split a dotted key, in which free names may contain dots; raise UsageError if it is unknown."""
    path = _split(schema, text.split("."))
    if path is None:
        valid = list(setting_keys(schema))
        *above, name = text.split(".")
        free = [".".join((*keys[:-1], name)) for keys in valid if keys[-1] == NAME and list(keys[:-2]) == above]
        do = f"use {' or '.join(free)}, which accepts any name" if free and above else None
        raise unknown("key", text, [".".join(keys) for keys in valid], do=do)
    return path


def is_key(schema: type[BaseModel], text: str) -> bool:
    return _split(schema, text.split(".")) is not None


def _split(kind: Any, parts: Sequence[str]) -> tuple[str, ...] | None:  # noqa: ANN401 (any type there is)
    kind = plain(kind)
    if not all(parts):
        return None
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(parts[0])
        if field is None or len(parts) == 1:
            return (parts[0],) if field else None
        rest = _split(field.annotation, parts[1:])
        return None if rest is None else (parts[0], *rest)
    if get_origin(kind) is not dict:
        return None
    below = get_args(kind)[1]
    for place in range(1, len(parts)):
        rest = _split(below, parts[place:])
        if rest is not None:
            return (".".join(parts[:place]), *rest)
    return (".".join(parts),)


def setting_keys(kind: Any) -> Iterator[tuple[str, ...]]:  # noqa: ANN401 (any type there is)
    """Yield the keys of all settings in a schema, with a placeholder for free names."""
    kind = plain(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from ((name, *rest) for rest in setting_keys(field.annotation))
    elif get_origin(kind) is dict:
        yield from ((NAME, *rest) for rest in setting_keys(get_args(kind)[1]))
    else:
        yield ()


def plain(kind: Any) -> Any:  # noqa: ANN401 (any type there is)
    """Return a type without annotations; for ``T | None``, return T."""
    if get_origin(kind) is Annotated:
        return plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        kinds = [item for item in get_args(kind) if item is not NoneType]
        return plain(kinds[0]) if len(kinds) == 1 else kind
    return kind


def leaves(value: object, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value in settings with its keys, except None and empty lists."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, (*above, str(name)))
    elif value is not None and value != ():
        yield above, list(value) if isinstance(value, tuple) else value


def has_keys(data: object, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True
