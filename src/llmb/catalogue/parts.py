# SPDX-License-Identifier: Apache-2.0
"""Compares a model with required parts. Pure."""

from collections.abc import Iterator, Mapping

from llmb.catalogue.records import Model, Record

Parts = Mapping[str, object]
"""Required values of a model's fields, by name; ``moe.router`` is the router of its experts, None if it has none."""


def part(model: Model, name: str) -> object:
    """A field of ``model``; None if it belongs to a part that the model lacks."""
    found: object = model
    for step in name.split("."):
        found = getattr(found, step) if isinstance(found, Record) else None
    return found


def part_differences(model: Model, parts: Parts) -> Iterator[str]:
    for name, wanted in parts.items():
        if (found := part(model, name)) != wanted:
            yield f"{name} is {found}, not {wanted}"
