# SPDX-License-Identifier: Apache-2.0
"""Options, declared as fields of records: ``steps: Annotated[int | None, Option(help=..., minimum=1)] = None``."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from llmb.base.errors import UsageError
from llmb.base.secrets import has_secret

_PART = r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?"
Shape = TypeVar("Shape")
REQUIRED = inspect.Parameter.empty


class Span(NamedTuple):
    """The numbers from ``first`` up to ``last`` in steps of ``step``; ``first`` equals ``last`` for a single number."""

    first: int
    last: int
    step: int = 1
    width: int = 1
    """Number of digits of the first number as written, including leading zeros."""

    @property
    def numbers(self) -> range:
        return range(self.first, self.last + 1, self.step)


def parse_ranges(text: str) -> tuple[Span, ...]:
    """Parse ranges such as ``0,4-7``; raise ValueError if invalid. They are not expanded, because they may be long."""
    return tuple(_span(part) for part in text.split(","))


def numbers_of(spans: Iterable[Span]) -> tuple[int, ...]:
    """Return every number in the ranges, in the order of the ranges."""
    return tuple(number for span in spans for number in span.numbers)


def _span(part: str) -> Span:
    match = re.fullmatch(_PART, part)
    if not match:
        raise ValueError(f"'{part}' is not a number or a range")
    first, last, step = match.groups()
    span = Span(int(first), int(last or first), int(step or 1), len(first))
    if span.last < span.first:
        raise ValueError(f"'{part}' ends before it begins")
    return span


MOST_WHOLE = 2**63 - 1


class Form(NamedTuple):
    """The format of an option's text. ``is_written`` returns a false value, or raises ValueError, for invalid text."""

    is_written: Callable[[str], object]
    valid: str
    """The valid strings, as words after "it must be"."""
    any_case: bool = False
    """True if case is ignored, as in the reference suite's scripts."""


def pattern(expression: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(expression, text, re.ASCII | re.IGNORECASE)


TEXT = Form(str.isprintable, "text on one line")
WORD = Form(pattern(r"[\w.+-]+"), "a name", any_case=True)
LABEL = Form(
    pattern(r"(?!(\d+|latest|\d{4}-\d\d-\d\d.*)$)(?!.*\.\.)[a-z0-9][\w.+-]{0,63}"),
    "up to 64 letters, digits, '.', '_', '+' and '-', beginning with a letter or a digit, without '..', and not a"
    " number, a date or 'latest'",
)
"""Excludes strings that selections of runs would read as an id, a date, a range of dates or ``latest``."""
RANKS = Form(parse_ranges, "ranks such as 0 or 0,4-7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Metadata of an option's field. ``options_of`` fills the last four fields."""

    help: str = ""
    flags: tuple[str, ...] = ()
    """Flags on the command line, if not ``--name``."""
    panel: str | None = None
    """Panel of the help in which the option is listed."""
    basic: bool = False
    """True if the short help lists the option, although it omits the option's panel."""
    minimum: float | None = None
    above: float | None = None
    form: Form = TEXT
    """Format of a text value."""
    metavar: str | None = None
    repeatable: bool = False
    """True if the option can be repeated; its values are not swept over. The field is a tuple."""
    several: bool = False
    """True for text that accepts several values to sweep over, as numbers and choices always do."""
    negates: bool = False
    """True for a flag ``--no-name``, which sets the field to False."""
    folder: bool = False
    """True for a path. It is made absolute, because workers may start in another folder."""
    envvar: str | None = None
    """The reference suite's variable, which the command line reads if the option is not set."""
    set_by: tuple[str, ...] = ()
    """Variables of the shell that set the option by default, in order of precedence."""
    name: str = ""
    """Name of the option; by default, the field's name, after ``no_`` if the option negates it."""
    field: str = ""
    annotation: Any = str
    default: Any = None

    @property
    def type(self) -> Any:  # noqa: ANN401 (whatever the field's type is)
        """The type of one value, without None and without the tuple of an option with several values."""
        annotation = self.annotation
        if get_origin(annotation) in (Union, UnionType):
            (annotation,) = (item for item in get_args(annotation) if item is not NoneType)
        return get_args(annotation)[0] if get_origin(annotation) is tuple else annotation

    @property
    def listed(self) -> bool:
        """True if the option accepts a list of values, separated by commas."""
        return get_origin(self.annotation) is tuple and not self.repeatable

    @property
    def swept(self) -> bool:
        """True if the option accepts several values, separated by commas, in commands that run each of them."""
        if self.listed or self.repeatable or self.negates or self.folder:
            return False
        return self.type in (int, float) or get_origin(self.type) is Literal or self.several

    @property
    def spellings(self) -> tuple[str, ...]:
        """The option's flags; a pair such as ``--compile/--no-compile`` is one string."""
        return self.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def spelled(self) -> str:
        """The option's name in messages, such as ``--steps``."""
        return self.spellings[-1].partition("/")[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The option's keys in files: its name, its field's unless a flag negates it, and its long flags with
        underscores."""
        long = (text.partition("/")[0] for text in self.spellings if text.startswith("--"))
        spelled = (text.removeprefix("--").replace("-", "_") for text in long)
        return tuple(dict.fromkeys((self.name, *(() if self.negates else (self.field,)), *spelled)))

    @property
    def limit(self) -> str:
        """Description of the lower limit of a number; empty if there is none."""
        if self.minimum is not None:
            return f"at least {self.minimum:g}"
        return "" if self.above is None else f"above {self.above:g}"

    def is_within(self, number: Any) -> bool:  # noqa: ANN401 (of the option's type)
        """Return True if a number is within the limit."""
        low = self.minimum is None or number >= self.minimum
        return bool(low and (self.above is None or number > self.above))

    def takes(self, value: object) -> bool:
        """Return True if a Python value has the option's type, within 64 bits; lower limits are checked later."""
        if get_origin(self.type) is Literal:
            return value in get_args(self.type)
        if self.annotation is not bool and isinstance(value, bool):
            return self.type is bool
        if self.folder and isinstance(value, Path):
            return True
        if isinstance(value, int) and abs(value) > MOST_WHOLE:
            return False
        return isinstance(value, (int, float) if self.type is float else self.type)

    def arguments(self, value: Any) -> Iterator[str]:  # noqa: ANN401 (of the option's type)
        """Yield the command-line arguments that set the option to ``value``."""
        yes, _, no = self.spellings[-1].partition("/")
        if isinstance(value, bool):
            yield yes if value or self.negates else no
        else:
            for item in value if isinstance(value, tuple) else (value,):
                yield from (yes, str(item))

    def value(self, given: Any) -> Any:  # noqa: ANN401 (of the option's type)
        """Convert a parsed value to the field's value. Raise UsageError if a path looks like a secret."""
        if isinstance(given, str) and self.form.any_case:
            return given.lower()
        if self.negates:
            return False if given else self.default
        if self.folder and has_secret(str(given), settings=False):
            what = f"the value of {self.spellings[0]} looks like a secret, and paths are saved in records"
            raise UsageError(what, do="pass a path without a secret, such as that of a local copy")
        return str(Path(given).absolute()) if self.folder else given


@cache
def options_of(*records: type) -> Mapping[str, Option]:
    """Return the options declared by the fields of ``records`` and of nested records, by name, in order."""
    return {option.name: option for record in records for option in _options(record)}


def build(record: type[Shape], values: Mapping[str, Any]) -> Shape:
    """Return a record made from values of options, by name; None or a missing value leaves the default."""
    given: dict[str, Any] = {}
    kind: type = record
    for field, declared in _declared(kind).items():
        if isinstance(declared, type):
            given[field] = build(declared, values)
        elif values.get(declared.name) is not None:
            given[field] = declared.value(values[declared.name])
    if not given and (construct := getattr(record, "model_construct", None)):
        unset: Shape = construct()  # defaults need no validator, which takes milliseconds to build
        return unset
    return record(**given)


def arguments_of(record: object) -> Iterator[str]:
    """Yield the command-line arguments that reproduce ``record``; values that are defaults are omitted."""
    kind: type = type(record)
    for field, declared in _declared(kind).items():
        value = getattr(record, field)
        if isinstance(declared, type):
            yield from arguments_of(value)
        elif value != declared.default:
            yield from declared.arguments(value)


def limit_problems(record: object) -> Iterator[str]:
    """Yield a message for each number that is outside the limit of its option, except in nested records."""
    kind: type = type(record)
    for field, option in _declared(kind).items():
        if isinstance(option, Option):
            value = getattr(record, field)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not option.is_within(number):
                    yield f"{option.spelled} is {number}; it must be {option.limit}"


def _options(record: type) -> Iterator[Option]:
    for declared in _declared(record).values():
        if isinstance(declared, Option):
            yield declared
        else:
            yield from _options(declared)


@cache
def _declared(record: type) -> dict[str, Option | type]:
    declared: dict[str, Option | type] = {}
    defaults = _defaults(record)
    annotations: dict[str, Any] = {}
    for base in reversed(record.__mro__):
        annotations |= inspect.get_annotations(base)
    for field, annotation in annotations.items():
        for option in getattr(annotation, "__metadata__", ()):
            if isinstance(option, Option):
                name = option.name or (f"no_{field}" if option.negates else field)
                item = {"name": name, "field": field, "annotation": get_args(annotation)[0], "default": defaults[field]}
                declared[field] = dataclasses.replace(option, **item)
        if isinstance(annotation, type) and field in defaults and _declared_in(annotation):
            declared[field] = annotation
    return declared


def _declared_in(annotation: type) -> bool:
    is_record = dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields")
    return is_record and bool(_declared(annotation))


def _defaults(record: type) -> dict[str, Any]:
    fields = getattr(record, "model_fields", None)
    if fields is not None:
        return {name: REQUIRED if field.is_required() else field.default for name, field in fields.items()}
    return {
        field.name: REQUIRED if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(record)
    }


# pydantic also accepts '1.0', '1_000' and ' 1' as whole numbers, and 'nan' as a number.
_NUMBERS = {int: pattern(r"-?\d{1,12}"), float: pattern(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?")}

NONE_WORDS = frozenset({"null", "none", "na", "n/a"})
"""Values of environment variables that mean none, in the reference documents."""


def convert(option: Option, key: str, texts: Sequence[str]) -> Any:  # noqa: ANN401 (of the option's type)
    """Parse an option's value, or a tuple's values; raise UsageError about ``key`` for an invalid value or too many."""
    if option.repeatable or option.listed:
        return tuple(_one(option, key, text) for text in texts)
    if len(texts) != 1:
        raise UsageError(f"{key} accepts one value, not {len(texts)}")
    return _one(option, key, texts[0])


def read_value(option: Option, text: str) -> Any:  # noqa: ANN401 (of the option's type)
    """Parse one value; raise ValueError with the valid values if it is invalid."""
    try:
        return _adapter(option.type, option.minimum, option.above, option.form).validate_python(text)
    except ValidationError as error:
        raise ValueError(valid_values(option)) from error


def valid_values(option: Option) -> str:
    """Return a description of the valid values, as words after "it must be"."""
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
def _adapter(kind: Any, minimum: float | None, above: float | None, form: Form) -> TypeAdapter[Any]:  # noqa: ANN401
    if kind is str:
        return TypeAdapter(Annotated[str, BeforeValidator(_written(form.is_written))])
    if kind in _NUMBERS:
        return TypeAdapter(Annotated[kind, BeforeValidator(_written(_NUMBERS[kind])), Field(ge=minimum, gt=above)])
    return TypeAdapter(kind)


def _written(is_written: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not is_written(text):
            raise ValueError(text)
        return text

    return check
