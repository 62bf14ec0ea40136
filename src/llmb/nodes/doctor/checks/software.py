# SPDX-License-Identifier: Apache-2.0
"""Checks that the interpreter, llmb, torch, driver and NCCL are compatible, by what the interpreter itself reports.

Also checks container runtimes, Enroot's folders, the scheduler, and the scheduler's state of this node.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from llmb import __version__
from llmb.base.missing import Missing
from llmb.base.shown_text import listed
from llmb.launch.scheduler_port import SchedulerSetup, Trait
from llmb.nodes.doctor.checks.disk import read_disk
from llmb.nodes.doctor.facts import FactSource, TargetFacts, printed_documents
from llmb.nodes.doctor.rules import Finding, gb, names_of, rule, skipped

OLDEST_PYTHON = (3, 11)
IN_CONTAINER = "jobs run in a container, which has its own"
PROBE = Path(__file__).with_name("software_probe.py")
NO_WORKING_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"
"""Python code that replaces the option -P, for interpreters that may be too old for it."""
LIMIT_S = 180.0
"""Time limit in seconds: loading torch from a file server takes minutes if many nodes do so concurrently."""


class SoftwareFacts(BaseModel):
    """The facts that the interpreter reports; None for packages that are not installed and for unknown values."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    python: str
    llmb: str | None = None
    torch: str | None = None
    torch_problem: str | None = None
    cuda: str | None = None
    """The CUDA version for which torch was built."""
    driver_cuda: str | None = None
    """The newest CUDA version that the driver supports."""
    nccl: str | None = None
    """The NCCL version that torch loads."""
    nccl_package: str | None = None
    nccl_problem: str | None = None
    gpus: int | None = None
    """The number of GPUs that torch can use; None if torch was not loaded."""
    architectures: tuple[str, ...] = ()
    """The architectures for which torch has kernels, such as sm_90."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities of the GPUs, such as 90."""
    cuda_problem: str | None = None


def read_software(source: FactSource, python: str) -> SoftwareFacts | Missing:
    output = source.ask([python, "-c", NO_WORKING_FOLDER + PROBE.read_text()], LIMIT_S)
    document = printed_documents(output.text)
    if output.problem and document.get("torch") and "gpus" not in document:
        document["torch_problem"] = output.problem
    try:
        return SoftwareFacts.model_validate(document)
    except ValidationError:
        return Missing(output.problem or "it did not report its version")


def software_checks(source: FactSource, python: str, gpus: int, target: TargetFacts) -> Iterator[Finding]:
    """Check the software of the interpreter ``python``; ``gpus`` is the number of GPUs that nvidia-smi reports."""
    of, others = rule("software_python"), names_of("software")[1:]
    facts = read_software(source, python)
    if isinstance(facts, Missing):
        yield of.check("fail", f"{python}: {facts.reason}", "none")
        yield from skipped(others, "the interpreter does not run")
        return
    numbers = tuple(map(int, re.findall(r"\d+", facts.python)[:2]))
    yield of.check("fail" if numbers < OLDEST_PYTHON else "pass", f"{facts.python} ({python})")
    yield _llmb(facts)
    if target.runtime != "none":
        yield from skipped(others[1:], IN_CONTAINER)
        return
    if facts.torch is None:
        yield rule("software_torch").check("warn", "not installed")
        yield from skipped(others[2:], "torch is not installed")
        return
    if facts.torch_problem:
        yield rule("software_torch").check("fail", f"{facts.torch}: {facts.torch_problem}", "broken")
        yield from skipped(others[2:], "torch cannot be loaded")
        return
    yield rule("software_torch").passed(facts.torch)
    yield _cuda(facts, gpus)
    yield _gpus(facts, gpus)
    yield _nccl(facts, gpus)


def _llmb(facts: SoftwareFacts) -> Finding:
    of = rule("software_llmb")
    if facts.llmb is None:
        return of.check("warn", "not installed", "none")
    if facts.llmb != __version__:
        return of.check("warn", f"{facts.llmb}, but this command is from {__version__}")
    return of.passed(facts.llmb)


def _cuda(facts: SoftwareFacts, gpus: int) -> Finding:
    """Check that the driver supports torch's CUDA; a driver supports its own and older major versions of CUDA."""
    of = rule("software_cuda")
    if facts.cuda is None:
        return of.check("fail", "torch is built without CUDA", "cpu") if gpus else of.skipped("torch is built for CPUs")
    if facts.driver_cuda is None:
        reason = f"torch is built for CUDA {facts.cuda}, but there is no driver"
        return of.check("fail", reason, "no_driver") if gpus else of.skipped(reason)
    text = f"torch for CUDA {facts.cuda}, driver up to CUDA {facts.driver_cuda}"
    if _major(facts.driver_cuda) >= _major(facts.cuda):
        return of.passed(text)
    if facts.gpus:
        return of.passed(f"{text}, with a compatibility package")
    return of.check("fail", text)


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def _gpus(facts: SoftwareFacts, gpus: int) -> Finding:
    of = rule("software_gpus")
    if facts.cuda is None or not (gpus or facts.gpus):
        return of.skipped("no GPU" if facts.cuda else "torch is built for CPUs")
    problem = f": {facts.cuda_problem}" if facts.cuda_problem else ""
    text = f"{facts.gpus or 0} of {gpus}{problem}"
    if (facts.gpus or 0) != gpus or problem:
        return of.check("fail" if (facts.gpus or 0) < gpus or problem else "warn", text)
    unfit = sorted({one for one in facts.capabilities if not _has_kernels(one, facts.architectures)})
    if unfit:
        return of.check("fail", f"torch has no kernels for sm_{', sm_'.join(unfit)}", "architecture")
    return of.passed(text)


def _has_kernels(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return whether torch has kernels or PTX that run on a GPU; assume so if ``architectures`` is empty."""
    number = int(capability)
    for name in architectures:
        kind, _, digits = name.partition("_")
        version = int(re.sub(r"\D", "", digits) or 0)
        exact = not digits.isdecimal()
        if kind == "compute" and version <= number:
            return True
        if kind == "sm" and (version == number or (not exact and version // 10 == number // 10 and version < number)):
            return True
    return not architectures


def _nccl(facts: SoftwareFacts, gpus: int) -> Finding:
    of = rule("software_nccl")
    if facts.cuda is None:
        return of.skipped("torch is built for CPUs")
    if facts.nccl is None:
        reason = f"torch has no NCCL{f': {facts.nccl_problem}' if facts.nccl_problem else ''}"
        return of.check("fail", reason) if gpus else of.skipped(reason)
    if facts.nccl_package and facts.nccl_package.split("+")[0] != facts.nccl:
        return of.check("warn", f"{facts.nccl} is loaded, but {facts.nccl_package} is installed with torch", "other")
    return of.passed(facts.nccl)


RUNTIME_LIMIT_S = 20.0
RUNTIMES = {
    "enroot": ("enroot", "version"),
    "apptainer": ("apptainer", "--version"),
    "singularity": ("singularity", "--version"),
    "docker": ("docker", "--version"),
    "podman": ("podman", "--version"),
}
RUNTIMES_NEEDED = {"pyxis": ("enroot",), "apptainer": ("apptainer", "singularity")}
"""Programs by the runtime in cluster_config.yaml, which needs one of them."""
ENROOT_DEFAULTS = {
    "ENROOT_CACHE_PATH": "${XDG_CACHE_HOME:-${HOME}/.cache}/enroot",
    "ENROOT_DATA_PATH": "${XDG_DATA_HOME:-${HOME}/.local/share}/enroot",
    "ENROOT_TEMP_PATH": "${TMPDIR:-/tmp}",
}
"""Defaults of Enroot's variables for folders, from its documentation."""
ENROOT_CONFIGURATION = ("/etc/enroot/enroot.conf", "/etc/enroot/enroot.conf.d")
_SETTING = re.compile(r"^\s*(ENROOT_\w+)\s+(\S.*?)\s*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")


def container_checks(source: FactSource, target: TargetFacts) -> Iterator[Finding]:
    versions = {}
    for name, command in RUNTIMES.items():
        output = source.ask(command, RUNTIME_LIMIT_S)
        match = re.search(r"\d+(\.\d+)+", output.text)
        if output.problem is None and match:
            versions[name] = match[0]
    yield _runtime(versions, target)
    yield _enroot(source, installed="enroot" in versions)


def _runtime(versions: Mapping[str, str], target: TargetFacts) -> Finding:
    of = rule("container_runtime")
    text = listed(f"{name} {version}" for name, version in versions.items())
    needed = RUNTIMES_NEEDED.get(target.runtime, ())
    if needed and not set(needed) & versions.keys():
        has = f"; only {text}" if text else ""
        return of.check("fail", f"no {needed[0]}{has}; cluster_config.yaml has runtime: {target.runtime}")
    if not versions:
        return of.skipped("no container runtime is installed, and none is configured")
    return of.passed(text)


def _enroot(source: FactSource, *, installed: bool) -> Finding:
    of, folders = rule("container_enroot_folders"), enroot_folders(source)
    if not installed:
        return of.skipped("Enroot is not installed")
    if not folders:
        return of.skipped("Enroot's settings cannot be expanded without a shell")
    disks = {f"{setting} {path}": read_disk(source, path, 0) for setting, path in folders.items()}
    hung = [f"{where}: {disk.reason}" for where, disk in disks.items() if isinstance(disk, Missing)]
    if hung:
        return of.check("fail", listed(hung), "closed")
    readable = {where: disk for where, disk in disks.items() if not isinstance(disk, Missing)}
    if closed := [where for where, disk in readable.items() if not disk.writable]:
        return of.check("fail", f"not writable: {listed(closed)}", "closed")
    free, where = min((disk.free, where) for where, disk in readable.items())
    return of.measured(free / 1e9, f"at least {gb(free)} free ({where})")


def enroot_folders(source: FactSource) -> dict[str, Path]:
    """Return Enroot's folders by setting, from the environment, configuration files or defaults, if they can be
    expanded without a shell."""
    main, more = ENROOT_CONFIGURATION
    files = [main, *(f"{more}/{name}" for name in sorted(source.names(more)) if name.endswith(".conf"))]
    lines = (line for name in files for line in (source.text(name) or "").splitlines())
    matches = (_SETTING.match(line) for line in lines)
    configured = {setting[1]: setting[2].strip("\"'") for setting in matches if setting}
    values = (
        (name, source.environ.get(name) or configured.get(name, default)) for name, default in ENROOT_DEFAULTS.items()
    )
    return {name: path for name, value in values if (path := expanded(value, source.environ))}


def expanded(value: str, environ: Mapping[str, str]) -> Path | None:
    """Return the path with its variables expanded; None if that requires a shell or the path is not absolute."""
    variables = {"UID": str(os.getuid()), "EUID": str(os.geteuid()), **environ}
    for command in ("$(id -u)", "$(id --user)"):
        value = value.replace(command, variables["UID"])
    for _ in range(4):
        if "$" not in value:
            break
        value = _VARIABLE.sub(lambda match: variables.get(match[1] or match[3]) or match[2] or "", value)
    return Path(value) if value.startswith("/") and not set(value) & set("$`\0") else None


CHECKED: tuple[Trait, ...] = ("tracking", "binding", "selection", "gpus", "mpi", "containers")


class Silent(NamedTuple):
    """The reason why a scheduler that should respond here does not."""

    reason: str


def scheduler_checks(
    setup: SchedulerSetup | Silent | Missing, title: str, gpus: int, target: TargetFacts
) -> Iterator[Finding]:
    """Check the scheduler; ``gpus`` is the number of GPUs that are visible on this node."""
    if isinstance(setup, Missing):
        yield from skipped(names_of("scheduler"), setup.reason)
        return
    of = rule("scheduler_answer")
    if isinstance(setup, Silent):
        yield of.check("warn", setup.reason)
        yield from skipped([name for name in names_of("scheduler") if name != of.name], f"{title} does not answer")
        return
    yield of.passed("yes")
    of = rule("scheduler_version")
    yield of.passed(f"{title} {setup.version}") if setup.version else of.skipped(f"{title} does not report it")
    yield from _scheduler_node(setup, title, gpus)
    for trait in CHECKED:
        yield _trait(trait, setup, target)


def _trait(trait: Trait, setup: SchedulerSetup, target: TargetFacts) -> Finding:
    of = rule(f"scheduler_{trait}")
    plugin = setup.traits.get(trait)
    if plugin is None:
        return of.skipped("the scheduler's commands do not report it")
    if plugin.fit:
        return of.passed(plugin.value)
    if trait == "gpus" and not target.needs_gpus:
        return of.skipped(f"{plugin.value}, and no GPU is expected")
    if trait == "containers":
        needs_pyxis = target.runtime == "pyxis"
        return of.check("fail", plugin.value) if needs_pyxis else of.skipped(f"{plugin.value}, and none is configured")
    return of.check("warn", plugin.value)


def _scheduler_node(setup: SchedulerSetup, title: str, gpus: int) -> Iterator[Finding]:
    of = rule("scheduler_node")
    if setup.node is None:
        yield of.skipped(f"this machine is not a node of {title}, such as a login node")
        yield rule("scheduler_node_gpus").skipped(f"this machine is not a node of {title}")
        return
    reason = f": {setup.node.reason}" if setup.node.reason and not setup.node.usable else ""
    yield of.check("pass" if setup.node.usable else "fail", f"{setup.node.state}{reason}")
    of = rule("scheduler_node_gpus")
    if setup.node.gpus is None:
        yield of.skipped(f"{title} does not manage the GPUs of this node")
    else:
        text = f"{setup.node.gpus} in {title}, {gpus} here"
        yield of.check("pass" if setup.node.gpus == gpus else "fail", text)
