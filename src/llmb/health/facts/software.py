# SPDX-License-Identifier: Apache-2.0
"""Python, torch, CUDA and NCCL of the interpreter that trains, which a process of its own loads."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmb.health.facts.source import FactSource, Missing

PROBE = Path(__file__).with_name("software_probe.py")
NO_WORKING_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"
"""For interpreters that may be too old for -P."""
LIMIT_S = 180.0
"""Loading torch from a file server takes minutes when many nodes begin at once."""


class SoftwareFacts(BaseModel):
    """What the interpreter says; None is not installed, or not known."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    python: str
    llmb: str | None = None
    torch: str | None = None
    torch_problem: str | None = None
    cuda: str | None = None
    """That torch is built for."""
    driver_cuda: str | None = None
    """The newest that the driver supports."""
    nccl: str | None = None
    """That torch loads."""
    nccl_package: str | None = None
    nccl_problem: str | None = None
    gpus: int | None = None
    """That torch can use; None if it was not loaded."""
    architectures: tuple[str, ...] = ()
    """That torch has kernels for, such as sm_90."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities of the GPUs, such as 90."""
    cuda_problem: str | None = None


def read_software(source: FactSource, python: str) -> SoftwareFacts | Missing:
    said = source.ask([python, "-c", NO_WORKING_FOLDER + PROBE.read_text()], LIMIT_S)
    found: dict[str, Any] = {}
    for line in said.text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue  # a start-up file of the interpreter may print, too
        found.update(document if isinstance(document, dict) else {})
    if said.problem and found.get("torch") and "gpus" not in found:
        found["torch_problem"] = said.problem
    try:
        return SoftwareFacts.model_validate(found)
    except ValidationError:
        return Missing(said.problem or "it does not describe itself")
