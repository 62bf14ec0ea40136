# SPDX-License-Identifier: Apache-2.0
"""The base of records."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from llmb.missing import Missing


class Record(BaseModel):
    """Base of all records that are written to files: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ReasonedRecord(Record):
    """A record with values that may be ``Missing``.

    In files and documents such a value is null, and a key beside it has the reason: ``verdict_reason`` for ``verdict``,
    ``step_time_reason`` for ``step_time_s``. It is null if there is a value.
    """

    @classmethod
    def reason_keys(cls) -> Iterator[tuple[str, str]]:
        """The fields that may be missing, each with the key of its reason."""
        for name, field in cls.model_fields.items():
            if Missing in get_args(field.annotation):
                yield name, f"{name.removesuffix('_s')}_reason"

    @model_validator(mode="before")
    @classmethod
    def _join(cls, stored: object) -> object:
        if not isinstance(stored, dict):
            return stored
        values = dict(stored)
        for name, key in cls.reason_keys():
            reason = values.pop(key, None)
            if values.get(name) is None:
                values.pop(name, None)  # without a reason either, the default holds
                if isinstance(reason, str):
                    values[name] = Missing(reason)
        return values

    @model_serializer(mode="wrap")
    def _split(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        keys, values = dict(self.reason_keys()), dict[str, Any]()
        for name, value in write(self).items():
            values[name] = value
            if name in keys:
                held = getattr(self, name)
                values |= {name: None, keys[name]: held.reason} if isinstance(held, Missing) else {keys[name]: None}
        return values


class Threshold(Record):
    """A number, and why it is that."""

    value: float = Field(gt=0)
    why: str
