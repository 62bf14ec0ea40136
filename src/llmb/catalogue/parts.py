# SPDX-License-Identifier: Apache-2.0
"""Whether a model has the parts that something else asks for. Pure."""

from collections.abc import Iterator, Mapping

from llmb.catalogue.records import Model, Record

Parts = Mapping[str, object]
"""What fields of a model have to be, by name; ``moe.router`` is that of its experts, None for a model without any."""


def part(model: Model, name: str) -> object:
    """A field of ``model``; None where it belongs to a part that the model lacks."""
    found: object = model
    for step in name.split("."):
        found = getattr(found, step) if isinstance(found, Record) else None
    return found


def part_differences(model: Model, parts: Parts) -> Iterator[str]:
    for name, wanted in parts.items():
        if (found := part(model, name)) != wanted:
            yield f"{name} is {found}, not {wanted}"
