# SPDX-License-Identifier: Apache-2.0
"""Options as the fields of records declare them: ``steps: Annotated[int | None, Option(help=..., minimum=1)] = None``.

The field gives name, type and default. Command line, campaign files, variables and documentation are made from this.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from llmb.options.forms import TEXT, Form

Shape = TypeVar("Shape")
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field's declaration adds to its type. The last four fields are filled by ``options_of``."""

    help: str = ""
    flags: tuple[str, ...] = ()
    """As the command line spells it, if not ``--name``."""
    panel: str | None = None
    """The part of the help that shows it."""
    minimum: float | None = None
    above: float | None = None
    form: Form = TEXT
    """Of text."""
    metavar: str | None = None
    repeatable: bool = False
    """Given several times, and a job gets all the values: it is not swept. The field is a tuple."""
    negates: bool = False
    """A flag, ``--no-name``, that sets the field to False."""
    folder: bool = False
    """A path, made absolute: workers may start elsewhere."""
    envvar: str | None = None
    """The reference suite's variable, which the command line reads where the option is not given."""
    set_by: tuple[str, ...] = ()
    """Variables, the strongest first, that the scheduler reads: they come below its other settings in the shell."""
    name: str = ""
    """The option's own; the field's unless the declaration says otherwise."""
    field: str = ""
    annotation: Any = str
    default: Any = None

    @property
    def type(self) -> Any:  # noqa: ANN401 (whatever the field's type is)
        """Of one value: without None, and without the tuple of several."""
        wanted = self.annotation
        if get_origin(wanted) in (Union, UnionType):
            (wanted,) = (item for item in get_args(wanted) if item is not NoneType)
        return get_args(wanted)[0] if get_origin(wanted) is tuple else wanted

    @property
    def listed(self) -> bool:
        """Values with commas between them."""
        return get_origin(self.annotation) is tuple and not self.repeatable

    @property
    def spellings(self) -> tuple[str, ...]:
        """Of a pair such as ``--compile/--no-compile`` both in one."""
        return self.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def spelled(self) -> str:
        """As messages name it."""
        return self.spellings[-1].partition("/")[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in files: the option's, the field's, and the long ones of the command line, without dashes."""
        long = (text.partition("/")[0] for text in self.spellings if text.startswith("--"))
        spelled = (text.removeprefix("--").replace("-", "_") for text in long)
        return tuple(dict.fromkeys((self.name, *(() if self.negates else (self.field,)), *spelled)))

    @property
    def limit(self) -> str:
        """Of a number, in words; empty without one."""
        if self.minimum is not None:
            return f"at least {self.minimum:g}"
        return "" if self.above is None else f"above {self.above:g}"

    def is_within(self, number: Any) -> bool:  # noqa: ANN401 (of the option's type)
        """Whether the limit, if any, allows it."""
        low = self.minimum is None or number >= self.minimum
        return bool(low and (self.above is None or number > self.above))

    def value(self, given: Any) -> Any:  # noqa: ANN401 (of the option's type)
        """What the field gets."""
        if self.negates:
            return False if given else self.default
        return str(Path(given).absolute()) if self.folder else given


@cache
def options_of(*records: type) -> Mapping[str, Option]:
    """The options that fields of ``records`` and of records in them declare, by name and in their order."""
    return {option.name: option for record in records for option in _options(record)}


def made(record: type[Shape], values: Mapping[str, Any]) -> Shape:
    """The record that options make; one that is None or not among ``values`` leaves its field to the default."""
    given: dict[str, Any] = {}
    kind: type = record
    for field, declared in _declared(kind).items():
        if isinstance(declared, type):
            given[field] = made(declared, values)
        elif values.get(declared.name) is not None:
            given[field] = declared.value(values[declared.name])
    return record(**given)


def limit_problems(record: object) -> Iterator[str]:
    """What is wrong with the numbers of a record's own fields."""
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
    """Of each field its option, or the record that it holds; fields without any are left out."""
    found: dict[str, Option | type] = {}
    defaults = _defaults(record)
    for field, annotation in inspect.get_annotations(record).items():
        for option in getattr(annotation, "__metadata__", ()):
            if isinstance(option, Option):
                name = option.name or (f"no_{field}" if option.negates else field)
                own = {"name": name, "field": field, "annotation": get_args(annotation)[0], "default": defaults[field]}
                found[field] = dataclasses.replace(option, **own)
        if isinstance(annotation, type) and field in defaults and _declared_in(annotation):
            found[field] = annotation
    return found


def _declared_in(annotation: type) -> bool:
    is_record = dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields")
    return is_record and bool(_declared(annotation))


def _defaults(record: type) -> dict[str, Any]:
    """Default of each field; ``REQUIRED`` without one."""
    fields = getattr(record, "model_fields", None)
    if fields is not None:
        return {name: REQUIRED if field.is_required() else field.default for name, field in fields.items()}
    return {
        field.name: REQUIRED if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(record)
    }
