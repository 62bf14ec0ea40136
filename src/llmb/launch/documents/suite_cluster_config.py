# SPDX-License-Identifier: Apache-2.0
"""Converts the reference suite's own ``cluster_config.yaml``, in each of its formats, to llmb's settings. Pure.

Version 1 has a block ``launcher`` and flat Slurm keys (``gpu_partition``, ``gpu_gres``). ``schema_version: 2`` has the
launcher's keys at the top level, and ``partition`` and ``gres`` in the blocks ``slurm.gpu`` and ``slurm.cpu``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llmb.base.secrets import has_secret, holds_secret
from llmb.catalogue.records import Record
from llmb.launch.jobspec.spec import variable_problems

Value = str | int | float | bool | None
Values = dict[str, Value]
Data = dict[str, Any]
VBOOST_CLUSTER = "eos"
"""The cluster on which the reference suite sets vboost itself."""
VERSION_1_KEYS = ("launcher",)
VERSION_2_KEYS = ("llmb_repo", "llmb_install")
FLAT_KEYS = ("gpu_partition", "gpu_gres", "cpu_gres")
BLOCKS = ("gpu", "cpu")
FLAG_OF = {
    "TIMELIMIT": "time",
    "MEM_PER_NODE": "mem",
    "ARRAY_INX": "array",
    "JOB_NAME": "job-name",
    "CPU_FREQ_REQ": "cpu-freq",
}
"""Flags of sbatch by the names of their environment variables after ``SBATCH_``, if the two differ."""


class _Lenient(BaseModel):
    """A section in which unknown keys are ignored, because they do not concern jobs."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Install(_Lenient):
    venv_type: Literal["uv", "venv", "conda"] | None = None
    method: Literal["slurm", "local"] | None = None
    node_architecture: str | None = None
    image_folder: str | None = None


class _Workload(_Lenient):
    venv_path: str | None = None
    venv_type: str | None = None
    environment: Values | None = None


class _Workloads(_Lenient):
    installed: tuple[str, ...] = ()
    config: dict[str, _Workload | None] | None = None


class _Launcher(_Lenient):
    llmb_repo: str | None = None
    llmb_install: str | None = None
    gpu_type: str | None = None
    node_architecture: str | None = None
    cluster_name: str | None = None


class _Block(BaseModel):
    """A section with arbitrary additional keys, which are variables of Slurm."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Value]

    def others(self) -> Values:
        return dict(self.__pydantic_extra__ or {})


class _Partition(_Block):
    partition: str | None = None
    gres: str | int | None = None


class _Blocks(_Block):
    account: str | int | None = None
    gpu: _Partition | None = None
    cpu: _Partition | None = None


class _Flat(_Block):
    account: str | int | None = None
    gpu_partition: str | None = None
    gpu_gres: str | int | None = None
    cpu_partition: str | None = None
    cpu_gres: str | int | None = None


class _Common(Record):
    install: _Install | None = None
    environment: Values | None = None
    workloads: _Workloads | None = None


class Version2(_Common):
    """The format with ``schema_version: 2``."""

    schema_version: Literal[2]
    llmb_repo: str | None = None
    llmb_install: str | None = None
    gpu_type: str | None = None
    cluster_name: str | None = None
    slurm: _Blocks | None = None


class Version1(_Common):
    """The formats before ``schema_version: 2``."""

    schema_version: Literal[1] | None = None
    launcher: _Launcher | None = None
    slurm: _Flat | None = None


@dataclass(frozen=True, slots=True)
class ReferenceForm:
    """A format of the reference suite: its title and its schema."""

    title: str
    shape: type[Version1] | type[Version2]


@dataclass(slots=True)
class Translation:
    """A file of the reference suite in llmb's format; ``notes`` explain settings that were dropped or changed."""

    data: Data = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    """Names of settings that were omitted because they contain secrets."""
    notes: list[str] = field(default_factory=list)


def form_of(data: object) -> ReferenceForm | None:
    """Return the reference suite's format that a file has; None for llmb's own format.

    Raises ValueError if the file mixes formats or has an unknown version.
    """
    if not isinstance(data, dict):
        return None
    first, second = _marks(data, VERSION_1_KEYS, FLAT_KEYS), _marks(data, VERSION_2_KEYS, BLOCKS)
    version = data.get("schema_version")
    if first and (second or version == 2):
        other = second[0] if second else "schema_version: 2"
        raise ValueError(f"{first[0]} is from version 1 of the suite's format, {other} from version 2; remove one")
    if "schema_version" in data and version not in (1, 2):
        raise ValueError(f"schema_version is {version}; the reference suite's files have 1 or 2, llmb's have none")
    if second or version == 2:
        return ReferenceForm("schema_version 2", Version2)
    workloads = data.get("workloads")
    listed = isinstance(workloads, dict) and isinstance(workloads.get("installed"), list)
    if first or version == 1 or listed:
        return ReferenceForm("version 1", Version1)
    return None


def _marks(data: Mapping[str, object], keys: tuple[str, ...], below_slurm: tuple[str, ...]) -> list[str]:
    slurm = data.get("slurm")
    return [
        *(key for key in keys if key in data),
        *(f"slurm.{key}" for key in below_slurm if isinstance(slurm, dict) and key in slurm),
    ]


def translated(config: Version1 | Version2) -> Translation:
    """Convert a file of the reference suite to data in llmb's format."""
    result = Translation()
    head = config.launcher or _Launcher() if isinstance(config, Version1) else config
    slurm = _slurm(config, result)
    environment = _variables(config.environment or {}, "environment", result, slurm)
    values = {
        "cluster_name": head.cluster_name,
        "gpu_type": head.gpu_type and head.gpu_type.lower(),
        "environment": environment,
        "slurm": slurm,
        "install": _install(config, result),
        "workloads": _workloads(config.workloads, result),
        "reference_suite": _suite(config),
    }
    result.data.update({key: value for key, value in values.items() if value})
    if (head.cluster_name or "").lower() == VBOOST_CLUSTER:
        result.data.setdefault("vboost", 1)
    return result


def _slurm(config: Version1 | Version2, result: Translation) -> Data:
    if isinstance(config.slurm, _Flat):
        flat = config.slurm
        shared, gpu = flat.others(), _Partition(partition=flat.gpu_partition, gres=flat.gpu_gres)
        cpu = _Partition(partition=flat.cpu_partition, gres=flat.cpu_gres)
    elif config.slurm:
        shared, gpu, cpu = config.slurm.others(), config.slurm.gpu or _Partition(), config.slurm.cpu or _Partition()
    else:
        return {}
    account = config.slurm.account
    slurm: Data = {
        "account": None if account is None else str(account),
        "partition": gpu.partition,
        "cpu_partition": cpu.partition,
        **_gres(gpu.gres, result),
    }
    # Keys of a block replace shared ones; null removes them.
    for name, value in {**shared, **gpu.others()}.items():
        _add_flag(name, value, slurm, result)
    if cpu.gres:
        result.notes.append("slurm: the GRES of CPU jobs is not used: they request no GPUs")
    result.notes.extend(f"slurm.cpu.{name} is not used: flags apply to all jobs" for name in cpu.others())
    return {key: value for key, value in slurm.items() if value is not None}


def _gres(gres: str | int | None, result: Translation) -> Data:
    if gres is None or str(gres).strip().lower() in ("", "null", "none", "0"):
        return {"gpu_request": "none"}
    kind, _, count = str(gres).strip().removeprefix("gpu:").rpartition(":")
    if not count.isdecimal():
        result.notes.append(
            f"slurm: the GRES '{gres}' is not used: it must end in a number of GPUs, such as 8 or h100:8"
        )
        return {}
    if count == "1":
        result.notes.append("slurm: a GRES of 1 is read as all GPUs of a node")
    return {"gpus_per_node": None if count == "1" else int(count), "gres_type": kind or None}


def _add_flag(name: str, value: Value, slurm: Data, result: Translation) -> None:
    variable = name.upper() if name.lower().startswith(("sbatch_", "slurm_")) else f"SBATCH_{name.upper()}"
    if value is None:
        return
    text = str(value)
    kind, _, key = variable.partition("_")
    if holds_secret(variable, text):
        result.secrets.append(name)
    elif key in ("ACCOUNT", "PARTITION"):
        slurm[key.lower()] = text
    elif key == "GPUS_PER_NODE":
        slurm.update(_gres(text, result))
    elif kind == "SLURM":
        result.notes.append(f"slurm.{name} is not used: {variable} is a variable of srun; set slurm.srun_flags instead")
    else:
        flag = FLAG_OF.get(key, key.lower().replace("_", "-"))
        flags = slurm.setdefault("flags", {})
        flags[flag] = value if isinstance(value, bool) else text


def _variables(values: Values, where: str, result: Translation, slurm: Data | None = None) -> dict[str, str]:
    variables = {}
    for name, value in values.items():
        text = str(value)
        if value is None:
            result.notes.append(f"{where}.{name} is not used: it has no value")
        elif holds_secret(name, text):
            result.secrets.append(name)
        elif slurm is not None and name.startswith("SBATCH_"):
            _add_flag(name.lower(), value, slurm, result)
        elif slurm is not None and name in _READ:
            _READ[name](text, slurm, result)
        elif problems := list(variable_problems({name: text})):
            result.notes.append(f"{where}.{name} is not used: {problems[0]}")
        else:
            variables[name] = text
    return variables


def _time_limit(text: str, slurm: Data, result: Translation) -> None:  # noqa: ARG001
    slurm.setdefault("flags", {})["time"] = text


def _gpus_per_node(text: str, slurm: Data, result: Translation) -> None:
    if text.isdecimal():
        slurm["gpus_per_node"] = int(text)
    else:
        result.notes.append(f"environment.GPUS_PER_NODE is not used: '{text}' is not a number")


def _additional(text: str, slurm: Data, result: Translation) -> None:
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, value = part.lstrip("-").partition("=")
        if has_secret(part):
            result.secrets.append("ADDITIONAL_SLURM_PARAMS")
        else:
            slurm.setdefault("flags", {})[name.strip()] = value.strip() if equals else True


def _vboost(text: str, slurm: Data, result: Translation) -> None:  # noqa: ARG001
    result.data["vboost"] = int(text.strip().lower() in ("1", "true", "yes"))


_READ = {
    "TIME_LIMIT": _time_limit,
    "GPUS_PER_NODE": _gpus_per_node,
    "ADDITIONAL_SLURM_PARAMS": _additional,
    "ENABLE_VBOOST": _vboost,
}


def _install(config: Version1 | Version2, result: Translation) -> Data:
    install = config.install or _Install()
    launcher = config.launcher if isinstance(config, Version1) else None
    architecture = install.node_architecture or (launcher and launcher.node_architecture)
    name = {"arm64": "aarch64", "amd64": "x86_64"}.get(str(architecture), architecture)
    if name not in (None, "x86_64", "aarch64"):
        result.notes.append(f"install.node_architecture is not used: '{name}' is unknown")
        name = None
    values = {
        "environment": install.venv_type,
        "image_folder": install.image_folder,
        "node_architecture": name,
        "workloads": list(config.workloads.installed) if config.workloads else [],
    }
    return {key: value for key, value in values.items() if value}


def _workloads(section: _Workloads | None, result: Translation) -> Data:
    workloads: Data = {}
    for name, item in (section.config or {}).items() if section else ():
        variables = _variables((item and item.environment) or {}, f"workloads.config.{name}.environment", result)
        if variables:
            workloads[name] = {"environment": variables}
    return workloads


def _suite(suite: Version1 | Version2) -> Data:
    launcher = suite.launcher if isinstance(suite, Version1) else None
    checkout = suite.llmb_repo if isinstance(suite, Version2) else launcher and launcher.llmb_repo
    config = (suite.workloads and suite.workloads.config) or {}
    environments = {name: item.venv_path for name, item in config.items() if item and item.venv_path}
    return {name: value for name, value in (("checkout", checkout), ("environments", environments)) if value}


def notes_on(form: ReferenceForm, result: Translation) -> Iterator[str]:
    """Yield the notes to show whenever a file in the suite's format is read."""
    what = f"cluster_config.yaml has the reference suite's format ({form.title})"
    yield f"{what}; run 'llmb config migrate' to convert it to llmb's"
    if result.secrets:
        names = ", ".join(dict.fromkeys(result.secrets))
        yield f"cluster_config.yaml contains secrets, which are ignored (set HF_TOKEN in your shell instead): {names}"
