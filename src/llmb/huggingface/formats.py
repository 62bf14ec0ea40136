# SPDX-License-Identifier: Apache-2.0
"""The forms in which Hugging Face keeps models, and which one is a model's. Pure but for its data file."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Model, Record
from llmb.errors import UsageError, itemized

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


DATA = Path(__file__).with_name("formats.yaml")
IN_EVERY_FORM = ("tied_embeddings", "rope_scaling")
SETTINGS = Path(__file__).with_name("settings.yaml")


class WeightsFormat(Record):
    """One entry of ``formats.yaml``, which says what the fields mean."""

    model_type: str
    model_class: str
    multimodal_type: str | None = None
    """What ``config.json`` says of a model that has this one as its text model."""
    parts: dict[str, Any]
    equal: dict[str, str] = Field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Parts that a model must have, whatever they are."""
    settings: dict[str, str]
    constants: dict[str, Any] = Field(default_factory=dict)
    silent: dict[str, Any]
    compared: tuple[str, ...]
    unused: tuple[str, ...] = ()
    multimodal_keys: tuple[str, ...] = ()
    lists_layers: bool = False
    """The configuration lists which layers have experts, and which rotary."""
    names: dict[str, str] = Field(default_factory=dict)
    expert_matrices: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class IgnoredSettings(Record):
    """Keys of ``config.json`` that change nothing in training, for one reason."""

    why: str
    keys: tuple[str, ...]


class CommonSettings(Record):
    """``settings.yaml``, which says what the fields mean."""

    ignored: tuple[IgnoredSettings, ...]
    fixed: dict[str, Any]


class FormatsFile(Record):
    """``formats.yaml``."""

    formats: tuple[WeightsFormat, ...]


@cache
def known_formats() -> tuple[WeightsFormat, ...]:
    return read_file(DATA, FormatsFile, wrap="formats").formats


@cache
def common_settings() -> CommonSettings:
    return read_file(SETTINGS, CommonSettings)


def format_of(model: Model) -> WeightsFormat:
    """Raises UsageError for a model that no form can express, with what keeps it from the nearest one."""
    problems = {known.model_class: list(obstacles(model, known)) for known in known_formats()}
    found = next((known for known in known_formats() if not problems[known.model_class]), None)
    if found is None:
        nearest = min(problems, key=lambda name: len(problems[name]))
        what = f"{model.model} {model.size} has no form in Hugging Face's formats; it is no {nearest}:"
        raise UsageError(what + itemized(problems[nearest]))
    return found


def obstacles(model: Model, known: WeightsFormat) -> Iterator[str]:
    """Fields that the form does not name must have their default, so that a part that is new is not overlooked."""
    yield from part_differences(model, known.parts)
    named = {name.partition(".")[0] for name in (*IN_EVERY_FORM, *known.parts, *known.equal, *known.settings.values())}
    for name, field in Model.model_fields.items():
        if name not in named and not field.is_required() and (found := getattr(model, name)) != field.default:
            yield f"{name} is {found}, not {field.default}"
    for name, other in known.equal.items():
        if part(model, name) != part(model, other):
            yield f"{name} is {part(model, name)}, not {part(model, other)} as {other}"
    for name in known.needed:
        if part(model, name) is None:
            yield f"it has no {name}"
