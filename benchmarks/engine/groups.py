# SPDX-License-Identifier: Apache-2.0
"""``plan.yaml``: which engines train which models, in order of worth."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from llmb.catalogue.records import Dtype, Record

PLAN = Path(__file__).with_name("plan.yaml")


class Variant(Record):
    """Settings of llmb that are tried against its defaults."""

    options: tuple[str, ...] = ()
    """Of ``llmb run``."""
    environ: dict[str, str] = Field(default_factory=dict)
    profiled_steps: int = 0
    """Profiled after the timed steps."""


class Group(Record):
    """Cases that are worth the same: each engine on each model in each dtype. ``round`` counts from 0."""

    name: str
    models: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    engines: tuple[str, ...]
    micro_batches: int
    """Per step."""
    round: int = 0
    variant: str | None = None


class Plan(Record):
    """All groups in order, of the models for GPUs and of tiny ones, and the variants by name."""

    variants: dict[str, Variant]
    gpu: tuple[Group, ...]
    tiny: tuple[Group, ...]

    def groups(self, *, tiny: bool) -> tuple[Group, ...]:
        return self.tiny if tiny else self.gpu


def load_plan() -> Plan:
    content: dict[str, Any] = yaml.safe_load(PLAN.read_text())
    return Plan.model_validate(content)
