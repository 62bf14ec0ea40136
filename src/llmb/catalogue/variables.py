# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the reference documents, and what they ask of llmb. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from llmb.catalogue.records import Record
from llmb.errors import UsageError, closest
from llmb.options.forms import WORD
from llmb.options.option import Option
from llmb.options.text import read_value, valid_values

Value = str | int | float | bool | None
NONE_WORDS = frozenset({"null", "none", "na", "n/a"})
TYPES: Mapping[str, Option] = {
    "word": Option(form=WORD),
    "text": Option(),
    "count": Option(annotation=int, minimum=1),
    "number": Option(annotation=int, minimum=0),
    "flag": Option(annotation=bool),
}
"""What values of variables may be that set no option."""
SHORTEST_INEXACT = 7
"""Letters of a name that others may be near to: of shorter ones, many differ by one letter only."""
LIKENESS = 0.87
MOST_LETTERS_MORE = 1


class VariableUse(Record):
    """What llmb makes of a variable, for some workloads or for all."""

    workloads: tuple[str, ...] = ()
    framework: bool = False
    """Only where a framework runs the recipe in its container, and not llmb's engine."""
    sets: str | None = None
    """The name of the option that takes the value."""
    values: dict[str, str] = Field(default_factory=dict)
    """The values that are possible, and what the option calls them; empty where they are the option's own."""
    adds: dict[str, str] = Field(default_factory=dict)
    """Options that go with it, unless the value is false."""
    install: bool = False
    """The value is the install root."""
    read_for: str | None = None
    """The name of the option that it stands for wherever a job is submitted, whether by ``llmb launch`` or not."""
    accepts: tuple[str, ...] = ()
    """The only values that are possible."""
    because: str | None = None
    ignored: str | None = None
    refused: str | None = None

    @model_validator(mode="after")
    def _is_one_use(self) -> Self:
        kinds = (self.sets, self.install, self.read_for, self.accepts, self.ignored, self.refused)
        if sum(map(bool, kinds)) != 1:
            raise ValueError("a use is one of sets, install, read_for, accepts, ignored and refused")
        if bool(self.accepts) != bool(self.because):
            raise ValueError("accepts needs a reason in because")
        return self

    def fits(self, workload: str, *, framework: bool) -> bool:
        return (not self.workloads or workload in self.workloads) and (framework or not self.framework)


class Variable(Record):
    """One variable of the documents."""

    name: str
    meaning: str
    type: Literal["word", "text", "count", "number", "flag"] | None = None
    """What a value has to be; None where that is the option's to say."""
    none_is: int | None = None
    """What a word such as null stands for, where ``none_is`` is given at all."""
    releases: tuple[str, ...]
    uses: tuple[VariableUse, ...]
    excludes: tuple[str, ...] = ()
    """Variables that ask for what does not go with this."""
    quiet: bool = False
    """Other programs read it too: a value that llmb has no need of is not reported."""

    def use_for(self, workload: str, *, framework: bool = False) -> VariableUse | None:
        return next((use for use in self.uses if use.fits(workload, framework=framework)), None)

    @model_validator(mode="after")
    def _has_one_type(self) -> Self:
        if bool(self.type) == bool(self.option):
            raise ValueError("type is for variables that no use of gives to an option, and these need it")
        return self

    @property
    def option(self) -> str | None:
        """The name of the option that values are of."""
        return next((name for use in self.uses if (name := use.sets or use.read_for)), None)

    def value(self, text: str, options: Mapping[str, Option]) -> Value:
        """Raises ValueError with what is valid."""
        if "none_is" in self.model_fields_set and text.lower() in NONE_WORDS:
            return self.none_is
        takes = self.takes(options)
        found: Value = read_value(takes, text.lower() if takes.form.any_case else text)
        return found

    def valid(self, options: Mapping[str, Option]) -> str:
        """What a value may be, in words that follow "it must be"."""
        names = [name for use in self.uses for name in use.values]
        return " or ".join(names) if names else valid_values(self.takes(options))

    def takes(self, options: Mapping[str, Option]) -> Option:
        return TYPES[self.type] if self.type else options[str(self.option)]


class VariablesFile(Record):
    """``variables.yaml``."""

    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the environment asks for."""

    options: Mapping[str, Value]
    """Values by option."""
    origins: Mapping[str, str]
    """The variable that each of ``options`` comes from."""
    install: str | None
    notes: tuple[str, ...]
    """Variables that nothing is done with, and why."""


def read_variables(
    variables: Sequence[Variable],
    environ: Mapping[str, str],
    workload: str,
    options: Mapping[str, Option],
    given: Collection[str] = (),
    *,
    framework: bool = False,
) -> Reading:
    """What ``environ`` says about a launch of ``workload``. As in the documents' scripts, an empty value is none.

    ``options`` are those that variables may set. Those in ``given``, of the command line, win: a variable that sets one
    of them is not looked at. Raises UsageError with every variable that does not apply, has a bad value, or contradicts
    another one.
    """
    reading, problems = _Readings(options), list[str]()
    for variable in variables:
        text = environ.get(variable.name, "").strip()
        use = variable.use_for(workload, framework=framework)
        if not text or (use and use.sets in given and use.sets is not None):
            continue
        problem = reading.add(variable, use, text) if use else _does_not_apply(variable, workload)
        if problem:
            problems.append(problem)
    problems.extend(_exclusions(variables, reading.honored))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise UsageError(
            f"the environment asks for what cannot be done:\n{lines}",
            where="environment variables",
            do="correct or unset them; see docs/reference/environment.md",
        )
    return Reading(reading.options, reading.origins, reading.install, tuple(reading.notes))


class _Readings:
    """What was read so far."""

    def __init__(self, known: Mapping[str, Option]) -> None:
        self.known = known
        self.options: dict[str, Value] = {}
        self.origins: dict[str, str] = {}
        self.install: str | None = None
        self.notes: list[str] = []
        self.honored: dict[str, Value] = {}
        """Values by variable, of those that set something."""

    def add(self, variable: Variable, use: VariableUse, text: str) -> str | None:
        """Takes the value up; returns what is wrong with it."""
        if use.refused:
            return f"{variable.name} is not supported: {use.refused}"
        if use.ignored:
            if not variable.quiet:
                self.notes.append(f"{variable.name} is not needed: {use.ignored}")
            return None
        try:
            value = _read(variable, use, text, self.known)
        except ValueError:
            return f"{variable.name} is '{text}'; it must be {variable.valid(self.known)}"
        if use.accepts:
            return _not_accepted(variable, use, value)
        if use.read_for:
            return None
        self.honored[variable.name] = value
        taken = {"install" if use.install else str(use.sets): value, **(use.adds if value is not False else {})}
        problems = (self._take(option, variable.name, item) for option, item in taken.items())
        return next(filter(None, problems), None)

    def _take(self, option: str, name: str, value: Value) -> str | None:
        before = self.install if option == "install" else self.options.get(option)
        if option in self.origins and before != value:
            return f"{name} is '{value}', but {self.origins[option]} is '{before}'; unset one of them"
        self.origins[option] = name
        if option == "install":
            self.install = str(value)
        else:
            self.options[option] = value
        return None


def _read(variable: Variable, use: VariableUse, text: str, options: Mapping[str, Option]) -> Value:
    """Raises ValueError."""
    if not use.values:
        return variable.value(text, options)
    if text.lower() not in use.values:
        raise ValueError(text)
    return use.values[text.lower()]


def _exclusions(variables: Iterable[Variable], honored: Mapping[str, Value]) -> Iterator[str]:
    """Of flags that are set: one that is false excludes nothing."""
    for variable in variables:
        for other in variable.excludes:
            if honored.get(variable.name) and honored.get(other):
                yield f"{variable.name} and {other} exclude each other; unset one of them"


def _not_accepted(variable: Variable, use: VariableUse, value: Value) -> str | None:
    written = str(value).lower()
    if written in use.accepts:
        return None
    return f"{variable.name} is '{written}'; it can only be {' or '.join(use.accepts)}: {use.because}"


def _does_not_apply(variable: Variable, workload: str) -> str:
    fitting = dict.fromkeys(name for use in variable.uses if not use.refused for name in use.workloads)
    return f"{variable.name} does not apply to {workload}; it is for {', '.join(fitting)}"


def near_misses(variables: Iterable[Variable], environ: Iterable[str]) -> Iterator[str]:
    """A warning for each name in ``environ`` that is almost that of a variable."""
    known = {_letters(variable.name): variable.name for variable in variables}
    for name in sorted(set(environ) - set(known.values())):
        like = closest(_letters(name), known, cutoff=LIKENESS)
        if near := [known[letters] for letters in like if _is_near(name, letters)]:
            yield f"{name} is no variable that llmb reads; did you mean {' or '.join(near)}?"


def _is_near(name: str, known: str) -> bool:
    """Whether ``name``, which is like the letters ``known``, can be meant for them: a prefix more is another name."""
    letters = _letters(name)
    long = len(known) >= SHORTEST_INEXACT
    return letters == known or (long and abs(len(letters) - len(known)) <= MOST_LETTERS_MORE)


def _letters(name: str) -> str:
    """Without what is often written otherwise: case and underscores."""
    return name.replace("_", "").upper()
