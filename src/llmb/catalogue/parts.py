# SPDX-License-Identifier: Apache-2.0
"""Compares a model with required parts. Pure."""

from collections.abc import Collection, Iterator, Mapping

from llmb.catalogue.records import Model, Record

Parts = Mapping[str, object]
"""Required values of a model's fields, by name; ``moe.router`` is the router of its experts, None if it has none."""


def part(model: Model, name: str) -> object:
    """A field of ``model``; None if it belongs to a part that the model lacks."""
    found: object = model
    for step in name.split("."):
        found = getattr(found, step) if isinstance(found, Record) else None
    return found


def part_differences(model: Model, parts: Parts, any_value: Collection[str] = ()) -> Iterator[str]:
    """In what ``model`` differs from ``parts``. Fields that are in neither argument must have their default, so that a
    part that is new is not overlooked.
    """
    for name, wanted in parts.items():
        if (found := part(model, name)) != wanted:
            yield f"{name} is {found}, not {wanted}"
    named = {name.partition(".")[0] for name in (*parts, *any_value)}
    for name, field in Model.model_fields.items():
        if name not in named and not field.is_required() and (found := getattr(model, name)) != field.default:
            yield f"{name} is {found}, not {field.default}"
