# SPDX-License-Identifier: Apache-2.0
"""Creates and tests the Python environment for an installation's jobs, and inspects the machine that creates it."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pydantic import Field, ValidationError

import llmb
from llmb.base.errors import EnvironmentProblem, InfrastructureError
from llmb.base.parent_death import ending_with_this
from llmb.base.tools import ask_program
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record, gpu_type_of
from llmb.launch.scheduler_lookup import SCHEDULERS, find_scheduler
from llmb.launch.scheduler_port import NONE, Offer
from llmb.launch.site.site import this_machine
from llmb.runs.folder import ROOT_VARIABLES
from llmb.setup.install.answers import EXISTING, Answers
from llmb.setup.install.install_state import Journal, put_file

BUILDS = Path(__file__).with_name("torch_builds.yaml")
PROGRAMS = ("uv", "conda")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
DRIVER_LIMIT_S = 30
MAJOR = re.compile(r"[0-9]{1,6}")


class TorchBuild(Record):
    """A build of PyTorch."""

    name: str
    meaning: str
    index: str | None
    """The address of the package index; None for the default index of pip and uv."""
    least_driver: int | None
    """Major version of the oldest driver that supports the build; None if the build needs no driver."""


class TorchBuilds(Record):
    """The content of ``torch_builds.yaml``."""

    source: str
    builds: tuple[TorchBuild, ...] = Field(min_length=1)


def torch_builds() -> Sequence[TorchBuild]:
    return read_file(BUILDS, TorchBuilds).builds


@dataclass(kw_only=True)
class Surroundings:
    """The properties of this machine, inspected once; schedulers are queried on first use."""

    catalogue: Catalogue
    architecture: str = field(default_factory=platform.machine)
    python: str = sys.executable
    gpu_type: str | None = None
    """GPU type of this machine; None if it has no GPU that is in the catalogue."""
    gpus: int = 0
    driver: int | None = None
    """Major version of NVIDIA's driver here."""
    programs: frozenset[str] = frozenset()
    """The members of ``PROGRAMS`` that exist on this machine."""
    root: str | None = None
    """The install root according to the environment variables, if any."""
    offers: dict[str, Offer] = field(default_factory=dict)
    """The offers of the schedulers that were queried, by name."""

    def offer(self, scheduler: str) -> Offer:
        """Return what a scheduler offers.

        Raise InfrastructureError if it does not respond, EnvironmentProblem if it is not installed.
        """
        if scheduler not in self.offers:
            self.offers[scheduler] = find_scheduler(scheduler).offer()
        return self.offers[scheduler]

    @cached_property
    def unusable(self) -> dict[str, str]:
        """Return why schedulers cannot be used, by name, except schedulers that only do not respond at the moment."""
        offers = {}
        for name in SCHEDULERS:
            try:
                self.offer(name)
            except EnvironmentProblem as error:
                offers[name] = f"{error.what}; run this on a login node"
            except InfrastructureError:
                continue
        return offers


def look_around(catalogue: Catalogue) -> Surroundings:
    machine = this_machine()
    names = machine.gpu_names
    return Surroundings(
        catalogue=catalogue,
        gpu_type=next((kind for name in names if (kind := gpu_type_of(name, catalogue.gpus.values()))), None),
        gpus=len(names),
        driver=_driver() if names else None,
        programs=frozenset(name for name in PROGRAMS if shutil.which(name)),
        # A default below the home folder would be on no other node.
        root=next((text for name in ROOT_VARIABLES if (text := os.environ.get(name, "").strip())), None),
    )


def _driver() -> int | None:
    output = ask_program(DRIVER, DRIVER_LIMIT_S)
    major = "" if output.problem else output.text.strip().partition(".")[0]
    return int(major) if MAJOR.fullmatch(major) else None


FOLDER = "environment"
SOURCE = "pyproject.toml"
RECORD = "llmb_environment.json"
EXTRAS = "prepare,weights"
TORCH = ">=2.11"
PROOF_LIMIT_S = 600
PROOF = """
import sys
sys.path[:] = filter(None, sys.path)  # not the working folder; Pythons before 3.11 lack -P
import importlib, json
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = module.__version__
    if name == "torch":
        found["cuda"] = module.version.cuda
json.dump(found, sys.stdout)
"""


class PythonContents(Record):
    """The content of a Python environment, as its interpreter reports it."""

    python: str
    llmb: str
    torch: str | None = None
    cuda: str | None = None


class EnvironmentRecord(Record):
    """``llmb_environment.json`` in an environment, written when it is complete and tested."""

    kind: str
    made_with: str | None
    torch: str | None
    torch_version: str | None
    package: str
    contents: PythonContents | None = None

    @property
    def recipe(self) -> "EnvironmentRecord":
        """Return the record as requested, without the environment's actual content."""
        return self.model_copy(update={"contents": None})


def python_of(answers: Answers, root: Path) -> Path:
    """Return the interpreter of the installation; it need not exist."""
    if answers.environment == EXISTING:
        return Path(str(answers.python))
    return root / FOLDER / "bin" / "python"


def record_of(answers: Answers) -> EnvironmentRecord:
    """Return the record of the environment that these answers request."""
    return EnvironmentRecord(
        kind=str(answers.environment),
        made_with=answers.python,
        torch=answers.torch,
        torch_version=answers.torch_version,
        package=answers.package or llmb_requirement(),
    )


def matches(answers: Answers, root: Path) -> bool:
    """Return True if the environment is complete and built as requested."""
    try:
        record = EnvironmentRecord.model_validate_json((root / FOLDER / RECORD).read_bytes())
    except (OSError, ValidationError):
        return False
    return record.recipe == record_of(answers) and os.access(python_of(answers, root), os.X_OK)


def make_environment(answers: Answers, journal: Journal) -> str:
    """Create or replace the environment, and describe its content. Raise EnvironmentProblem if that fails."""
    record = record_of(answers)
    folder = journal.tree(FOLDER)
    for command in commands(record, folder):
        run_visibly(command)
    contents = proven(python_of(answers, journal.root), answers)
    complete = record.model_copy(update={"contents": contents})
    put_file(folder / RECORD, complete.model_dump_json(indent=1) + "\n")
    return contents_text(contents)


def commands(record: EnvironmentRecord, folder: Path) -> Iterator[Sequence[str]]:
    """Yield the commands that create an environment in ``folder``, in order."""
    here = ["--system-site-packages"] if record.torch == EXISTING else []
    inner = str(folder / "bin" / "python")
    yield empty_environment(record.kind, str(record.made_with), folder, here)
    uv = record.kind == "uv"
    install = ["uv", "pip", "install", "--python", inner] if uv else [inner, "-I", "-m", "pip", "install"]
    if record.torch not in (EXISTING, NONE, None):
        yield [*install, *_index(record.torch), f"torch{_version(record.torch_version)}", "numpy"]
    yield [*install, _with_extras(record.package)]


def empty_environment(kind: str, made_with: str, folder: Path, more: Sequence[str] = ()) -> Sequence[str]:
    """Return the command that creates an environment; ``more`` are further options for uv and venv."""
    match kind:
        case "uv":
            return ["uv", "venv", "--python", made_with, *more, str(folder)]
        case "conda":
            return ["conda", "create", "--yes", "--prefix", str(folder), f"python={made_with}", "pip"]
        case _:
            return [made_with, "-I", "-m", "venv", *more, str(folder)]


def activated(environment: Path) -> dict[str, str]:
    """Return the environment variables of this process as if ``environment`` were activated."""
    env = {"VIRTUAL_ENV": str(environment), "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONHOME"} | env


def _index(build: str) -> Sequence[str]:
    address = next((item.index for item in torch_builds() if item.name == build), build)
    return ["--index-url", address] if address else []


def _version(text: str | None) -> str:
    if text is None:
        return TORCH
    return text if text[0] in "<>=~!" else f"=={text}"


def _with_extras(package: str) -> str:
    path = Path(package)
    return f"llmb[{EXTRAS}] @ {path.absolute().as_uri()}" if path.exists() else package


def run_visibly(
    command: Sequence[str], *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Run a program with visible output; it ends if this process ends. Raise EnvironmentProblem if it fails."""
    sys.stderr.flush()
    try:
        process = subprocess.run(
            ending_with_this(command), stdin=subprocess.DEVNULL, stdout=2, check=False, cwd=folder, env=environ
        )
    except OSError as error:
        raise EnvironmentProblem(f"{command[0]} cannot be started: {error.strerror}") from error
    if process.returncode:
        what = f"{shlex.join(command)} failed with exit code {process.returncode}; its output is above"
        raise EnvironmentProblem(what)


def proven(python: Path, answers: Answers) -> PythonContents:
    """Return the versions of an interpreter and its packages. Raise EnvironmentProblem if it cannot run jobs."""
    packages = ["llmb"] if answers.torch == NONE else ["llmb", "torch"]
    is_existing = answers.environment == EXISTING
    output = ask_program([str(python), "-c", PROOF, *packages], PROOF_LIMIT_S, cwd=None)
    if output.code is None:
        raise EnvironmentProblem(f"this Python does not run: {output.problem}", where=str(python))
    if output.code:
        last = output.errors.strip().splitlines()[-1:] or ["no output"]
        do = f"pass the --python of an environment with {' and '.join(packages)}, or create one with --environment venv"
        do = do if is_existing else "pass another --package, --torch or --torch-version"
        raise EnvironmentProblem(f"this Python cannot be used: {last[0]}", where=str(python), do=do)
    try:
        contents = PythonContents.model_validate(json.loads(output.text))
    except (ValueError, RecursionError) as error:
        what = f"this Python printed something other than its versions: {error}"
        raise EnvironmentProblem(
            what, where=str(python), do="remove what prints at its start, or pass another"
        ) from error
    if contents.llmb != llmb.__version__:
        how = "install" if is_existing else "pass a --package with"
        do = f"{how} llmb {llmb.__version__}, or use the llmb of that Python"
        raise EnvironmentProblem(
            f"that Python has llmb {contents.llmb}, but this is llmb {llmb.__version__}", where=str(python), do=do
        )
    if answers.has_gpus and contents.torch and contents.cuda is None:
        do = "pass another --python" if is_existing else "pass another --torch, such as cu128"
        raise EnvironmentProblem(
            f"that Python's torch {contents.torch} is built for CPUs only", where=str(python), do=do
        )
    return contents


def contents_text(contents: PythonContents) -> str:
    torch = f", torch {contents.torch}" if contents.torch else ""
    cuda = f" for CUDA {contents.cuda}" if contents.cuda else ""
    return f"Python {contents.python}, llmb {contents.llmb}{torch}{cuda}"


def llmb_requirement() -> str:
    """Return this llmb as a requirement: a source folder, the address that pip recorded, or a version in the index."""
    folder = Path(llmb.__file__).resolve().parents[2]
    if (folder / SOURCE).is_file():
        return str(folder)
    address = _address()
    return f"llmb[{EXTRAS}] @ {address}" if address else f"llmb[{EXTRAS}]=={llmb.__version__}"


def _address() -> str | None:
    try:
        source = json.loads(distribution("llmb").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    address, commit = source.get("url"), source.get("vcs_info", {}).get("commit_id")
    if address and commit:
        return f"{source['vcs_info']['vcs']}+{address}@{commit}"
    return str(address) if address else None
