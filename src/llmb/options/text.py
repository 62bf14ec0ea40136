# SPDX-License-Identifier: Apache-2.0
"""Converts text to values of options, for campaign files and variables."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from llmb.errors import UsageError
from llmb.options.option import Form, Option, pattern

# pydantic also accepts '1.0', '1_000' and ' 1' as whole numbers, and 'nan' as a number.
_NUMBERS = {int: pattern(r"-?\d{1,12}"), float: pattern(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?")}

NONE_WORDS = frozenset({"null", "none", "na", "n/a"})
"""Values of environment variables that mean none, in the reference documents."""


def convert(option: Option, key: str, texts: Sequence[str]) -> Any:  # noqa: ANN401 (of the option's type)
    """The option's value; a tuple if it is repeated. Raises UsageError with ``key``, the value and the valid values."""
    if option.repeatable or option.listed:
        return tuple(_one(option, key, text) for text in texts)
    if len(texts) != 1:
        raise UsageError(f"{key} takes one value, not {len(texts)}")
    return _one(option, key, texts[0])


def read_value(option: Option, text: str) -> Any:  # noqa: ANN401 (of the option's type)
    """One value. Raises ValueError."""
    try:
        return _adapter(option.type, option.minimum, option.above, option.form).validate_python(text)
    except ValidationError as error:
        raise ValueError(valid_values(option)) from error


def valid_values(option: Option) -> str:
    """Valid values, as words after "it must be"."""
    if get_origin(option.type) is Literal:
        return " or ".join(get_args(option.type))
    if option.type is bool:
        return "true or false"
    if option.type is str:
        return option.form.valid
    what = "a whole number" if option.type is int else "a number"
    return f"{what} of {option.limit}" if option.minimum is not None else f"{what} {option.limit}".strip()


def _one(option: Option, key: str, text: str) -> object:
    try:
        return read_value(option, text.lower() if option.form.any_case else text)
    except ValueError as valid:
        raise UsageError(f"{key} is '{text}'; it must be {valid}") from valid


@cache
def _adapter(wanted: Any, minimum: float | None, above: float | None, form: Form) -> TypeAdapter[Any]:  # noqa: ANN401
    if wanted is str:
        return TypeAdapter(Annotated[str, BeforeValidator(_written(form.is_written))])
    if wanted in _NUMBERS:
        return TypeAdapter(Annotated[wanted, BeforeValidator(_written(_NUMBERS[wanted])), Field(ge=minimum, gt=above)])
    return TypeAdapter(wanted)


def _written(is_written: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not is_written(text):
            raise ValueError(text)
        return text

    return check
