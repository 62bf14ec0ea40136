# SPDX-License-Identifier: Apache-2.0
"""What an installer sees of the machine that it runs on, and of its scheduler."""

import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Record
from llmb.errors import EnvironmentProblem, InfrastructureError
from llmb.schedulers.lookup import SCHEDULERS, find_scheduler
from llmb.schedulers.port import Offer
from llmb.site.machine import gpu_type_of, this_machine
from llmb.tools import ask_program

BUILDS = Path(__file__).with_name("torch_builds.yaml")
PROGRAMS = ("sinfo", "uv", "conda", "enroot", "apptainer")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
DRIVER_LIMIT_S = 30
MAJOR = re.compile(r"[0-9]{1,6}")


class TorchBuild(Record):
    """A build of PyTorch."""

    name: str
    meaning: str
    index: str | None
    """Its address; None for the index that pip and uv use by themselves."""
    least_driver: int | None
    """None if it needs no GPU."""


class TorchBuilds(Record):
    """``torch_builds.yaml``."""

    source: str
    builds: tuple[TorchBuild, ...] = Field(min_length=1)


def torch_builds() -> Sequence[TorchBuild]:
    return read_file(BUILDS, TorchBuilds).builds


@dataclass(kw_only=True)
class Surroundings:
    """Seen once; the scheduler is asked when that is first needed."""

    catalogue: Catalogue
    architecture: str = field(default_factory=platform.machine)
    python: str = sys.executable
    gpu_type: str | None = None
    """GPU type of this machine; None without a GPU, and for one that is not in the catalogue."""
    gpus: int = 0
    driver: int | None = None
    """Major version of NVIDIA's driver here."""
    programs: frozenset[str] = frozenset()
    """Programs of ``PROGRAMS`` that are here."""

    @cached_property
    def queue(self) -> Offer:
        """What Slurm offers. Raises InfrastructureError where it does not answer, EnvironmentProblem where there is
        none."""
        return find_scheduler(next(iter(SCHEDULERS))).offer()

    @cached_property
    def no_slurm(self) -> str | None:
        """Why no job can be queued from here; None where Slurm is configured, even if it does not answer now."""
        if "sinfo" not in self.programs:
            return "Slurm's commands are not on this machine; call this on a login node"
        try:
            _ = self.queue
        except EnvironmentProblem as error:
            return f"{error.what}; call this on a login node"
        except InfrastructureError:
            pass
        return None


def look_around(catalogue: Catalogue) -> Surroundings:
    machine = this_machine()
    names = machine.gpu_names
    return Surroundings(
        catalogue=catalogue,
        gpu_type=next((found for name in names if (found := gpu_type_of(name, catalogue.gpus.values()))), None),
        gpus=len(names),
        driver=_driver() if names else None,
        programs=frozenset(name for name in PROGRAMS if shutil.which(name)),
    )


def _driver() -> int | None:
    said = ask_program(DRIVER, DRIVER_LIMIT_S)
    major = "" if said.problem else said.text.strip().partition(".")[0]
    return int(major) if MAJOR.fullmatch(major) else None
