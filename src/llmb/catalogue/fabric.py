# SPDX-License-Identifier: Apache-2.0
"""Networks between nodes."""

from pydantic import Field

from llmb.catalogue.records import Record


class Fabric(Record):
    """A network between nodes: the NCCL settings that make NCCL use it, and only it."""

    fabric: str
    title: str
    variables: dict[str, str] = Field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Variables whose value only the site knows."""
    profile: str | None = None
    """A file on the nodes that sets more variables; the batch script sources it."""
    source: str
    notes: tuple[str, ...] = ()
