# SPDX-License-Identifier: Apache-2.0
"""Base classes of records in files, and parts that they share."""

import json
from collections.abc import Iterator
from typing import Any, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import json_or_python_schema

from llmb.base.input_files import check_values
from llmb.base.missing import Missing

MOST_ERRORS = 1000
CACHE_SIZE = 1024
"""The maximum number of values in the cache of a field's validator."""


class Record(BaseModel):
    """Base class of immutable records in files, which by default reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:  # noqa: ANN401
        return _stopping(handler(source))

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:  # noqa: ANN401
        """Validate untrusted JSON; raise ValidationError if it is invalid or may have too many values."""
        try:
            check_values(json_data.encode(errors="replace") if isinstance(json_data, str) else bytes(json_data))
        except ValueError as error:
            wrong = InitErrorDetails(type=PydanticCustomError("values", str(error)), input=None)
            raise ValidationError.from_exception_data(cls.__name__, [wrong]) from error
        return super().model_validate_json(json_data, **options)


def _stopping(schema: Any) -> Any:  # noqa: ANN401 (a schema of pydantic's core, or a part of one)
    """Return a schema that stops at the first invalid item of a sequence in JSON."""
    if isinstance(schema, list):
        return [_stopping(part) for part in schema]
    if not isinstance(schema, dict) or schema.get("type") == "json-or-python":
        return schema
    schemas = {name: _stopping(part) for name, part in schema.items()}
    if schemas.get("type") not in ("tuple", "list", "set", "frozenset"):
        return schemas
    return json_or_python_schema({**schemas, "fail_fast": True}, schemas)


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the first problem's dotted keys and message, or ``''`` and the number of problems if there are too
    many."""
    if error.error_count() > MOST_ERRORS:
        return "", f"{error.error_count():,} of its values are wrong"
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


class ReasonedRecord(Record):
    """A record whose ``Missing`` values are null in files; a key such as ``verdict_reason`` has the reason."""

    @classmethod
    def reason_keys(cls) -> Iterator[tuple[str, str]]:
        """Yield the fields that may be missing, each with the key of its reason."""
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
                values.pop(name, None)  # without a reason too, the default is used
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


class ValidateOnce:
    """Validates a field that is equal in many records; results are cached."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self, stored: object, validate: ValidatorFunctionWrapHandler) -> object:
        if not isinstance(stored, dict):
            return validate(stored)
        text = json.dumps(stored)
        if text not in self.values:
            if len(self.values) == CACHE_SIZE:
                self.values.clear()
            self.values[text] = validate(stored)
        return self.values[text]


class Threshold(Record):
    """A threshold and the reason for its value."""

    value: float = Field(gt=0)
    why: str
