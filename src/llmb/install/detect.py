# SPDX-License-Identifier: Apache-2.0
"""What an installer sees of the machine that it runs on, and of its scheduler."""

import os
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
from llmb.catalogue.records import Record, gpu_type_of
from llmb.errors import EnvironmentProblem, InfrastructureError
from llmb.runs.folder import ROOT_VARIABLES
from llmb.schedulers.installer import Offer
from llmb.schedulers.lookup import SCHEDULERS, find_scheduler
from llmb.site.machine import this_machine
from llmb.tools import ask_program

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
    """Seen once; schedulers are asked when that is first needed."""

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
    root: str | None = None
    """The root of installation that the environment names."""
    offers: dict[str, Offer] = field(default_factory=dict)
    """What schedulers offer, by name, where they were asked."""

    def offer(self, scheduler: str) -> Offer:
        """Raises InfrastructureError where the scheduler does not answer, EnvironmentProblem where it is not here."""
        if scheduler not in self.offers:
            self.offers[scheduler] = find_scheduler(scheduler).offer()
        return self.offers[scheduler]

    @cached_property
    def unusable(self) -> dict[str, str]:
        """Why schedulers are of no use here, by name; one that merely does not answer now is not among them."""
        found = {}
        for name in SCHEDULERS:
            try:
                self.offer(name)
            except EnvironmentProblem as error:
                found[name] = f"{error.what}; call this on a login node"
            except InfrastructureError:
                continue
        return found


def look_around(catalogue: Catalogue) -> Surroundings:
    machine = this_machine()
    names = machine.gpu_names
    return Surroundings(
        catalogue=catalogue,
        gpu_type=next((found for name in names if (found := gpu_type_of(name, catalogue.gpus.values()))), None),
        gpus=len(names),
        driver=_driver() if names else None,
        programs=frozenset(name for name in PROGRAMS if shutil.which(name)),
        # A default below the home folder would be on no other node.
        root=next((text for name in ROOT_VARIABLES if (text := os.environ.get(name, "").strip())), None),
    )


def _driver() -> int | None:
    said = ask_program(DRIVER, DRIVER_LIMIT_S)
    major = "" if said.problem else said.text.strip().partition(".")[0]
    return int(major) if MAJOR.fullmatch(major) else None
