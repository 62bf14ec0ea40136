# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the source documents, and what they ask of llmb. Pure."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from llmb.catalogue.records import Record
from llmb.errors import UsageError

Value = str | int | bool | None
ValueType = Literal["word", "text", "count", "number", "flag", "duration", "ranks"]

FLAGS = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}
NONE_WORDS = frozenset({"null", "none", "na", "n/a"})
_LENGTHS_OF_SLIPS = (7, 13)
_FORMS: dict[ValueType, tuple[re.Pattern[str], str]] = {
    "word": (re.compile(r"[\w.+-]+", re.ASCII), "a name"),
    "text": (re.compile(r".+"), "text on one line"),
    "count": (re.compile(r"0*[1-9]\d{0,8}", re.ASCII), "a whole number of at least 1"),
    "number": (re.compile(r"\d{1,9}", re.ASCII), "a whole number of at least 0"),
    "flag": (re.compile("|".join(FLAGS)), "true or false"),
    # Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    "duration": (
        re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|unlimited|infinite", re.ASCII),
        "a time such as 30, 00:30:00 or 1-12:00:00",
    ),
    "ranks": (re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII), "ranks such as 0 or 0,8,16"),
}


class VariableUse(Record):
    """What llmb makes of a variable, for some workloads or for all."""

    workloads: tuple[str, ...] = ()
    framework: bool = False
    """Only where a framework runs the recipe in its container, and not llmb's engine."""
    sets: str | None = None
    """The option, by its parameter's name, that takes the value."""
    values: dict[str, str] = Field(default_factory=dict)
    """The values that are possible, and what the option calls them; empty where they are the option's own."""
    adds: dict[str, str] = Field(default_factory=dict)
    """Options that go with it, unless the value is false."""
    install: bool = False
    """The value is the install root."""
    shell: bool = False
    """Read from the environment wherever a job is submitted."""
    accepts: tuple[str, ...] = ()
    """The only values that are possible."""
    because: str | None = None
    ignored: str | None = None
    refused: str | None = None

    @model_validator(mode="after")
    def _is_one_use(self) -> Self:
        kinds = (self.sets, self.install, self.shell, self.accepts, self.ignored, self.refused)
        if sum(map(bool, kinds)) != 1:
            raise ValueError("a use is one of sets, install, shell, accepts, ignored and refused")
        if bool(self.accepts) != bool(self.because):
            raise ValueError("accepts needs a reason in because")
        return self

    def fits(self, workload: str, *, framework: bool) -> bool:
        return (not self.workloads or workload in self.workloads) and (framework or not self.framework)


class Variable(Record):
    """One variable of the documents."""

    name: str
    meaning: str
    type: ValueType
    none_is: int | None = None
    """What a word such as null stands for, where ``none_is`` is given at all."""
    releases: tuple[str, ...]
    uses: tuple[VariableUse, ...]
    excludes: tuple[str, ...] = ()
    """Variables that ask for what does not go with this."""
    quiet: bool = False
    """Other programs read it too: nothing is said of a value that llmb has no need of."""

    def use_for(self, workload: str, *, framework: bool = False) -> VariableUse | None:
        return next((use for use in self.uses if use.fits(workload, framework=framework)), None)

    def value(self, text: str) -> Value:
        """Raises ValueError with what is valid."""
        if "none_is" in self.model_fields_set and text.lower() in NONE_WORDS:
            return self.none_is
        form, valid = _FORMS[self.type]
        folded = text if self.type == "text" else text.lower()
        if not form.fullmatch(folded) or not text.isprintable():
            raise ValueError(valid)
        if self.type in ("count", "number"):
            return int(folded)
        return FLAGS[folded] if self.type == "flag" else folded


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
    given: Collection[str] = (),
    *,
    framework: bool = False,
) -> Reading:
    """What ``environ`` says about a launch of ``workload``. An empty value is none, as in the documents' scripts.

    Options in ``given``, those of the command line, win: a variable that sets one of them is not looked at. Raises
    UsageError with every variable that does not apply, has a bad value, or contradicts another one.
    """
    reading, problems = _Readings(), list[str]()
    for variable in variables:
        text = environ.get(variable.name, "").strip()
        use = variable.use_for(workload, framework=framework)
        if not text or (use and use.sets in given and use.sets is not None):
            continue
        problem = reading.add(variable, use, text) if use else _does_not_apply(variable, workload)
        if problem:
            problems.append(problem)
    problems.extend(_exclusions(variables, reading.heeded))
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

    def __init__(self) -> None:
        self.options: dict[str, Value] = {}
        self.origins: dict[str, str] = {}
        self.install: str | None = None
        self.notes: list[str] = []
        self.heeded: dict[str, Value] = {}
        """Values by variable, of those that set something."""

    def add(self, variable: Variable, use: VariableUse, text: str) -> str | None:
        """Takes the value up; returns what is wrong with it."""
        if use.refused:
            return f"{variable.name} cannot be heeded: {use.refused}"
        if use.ignored:
            if not variable.quiet:
                self.notes.append(f"{variable.name} is not needed: {use.ignored}")
            return None
        try:
            value = variable.value(text)
        except ValueError as valid:
            return f"{variable.name} is '{text}'; it must be {valid}"
        if use.accepts:
            return _not_accepted(variable, use, value)
        if use.shell:
            return None
        if use.values:
            if value not in use.values:
                return f"{variable.name} is '{value}'; it must be {' or '.join(use.values)}"
            value = use.values[str(value)]
        self.heeded[variable.name] = value
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


def _exclusions(variables: Iterable[Variable], heeded: Mapping[str, Value]) -> Iterator[str]:
    """Of flags that are set: one that is false excludes nothing."""
    for variable in variables:
        for other in variable.excludes:
            if heeded.get(variable.name) and heeded.get(other):
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
    known = {variable.name for variable in variables}
    for name in sorted(set(environ) - known):
        near = [candidate for candidate in sorted(known) if _is_near(name, candidate)]
        if near:
            yield f"{name} is no variable that llmb reads; did you mean {' or '.join(near)}?"


def _is_near(name: str, known: str) -> bool:
    """The same but for case and underscores; a longer name also but for one slip of the pen, a very long one two."""
    left, right = name.replace("_", "").upper(), known.replace("_", "").upper()
    allowed = sum(len(right) >= length for length in _LENGTHS_OF_SLIPS)
    return left == right or (abs(len(left) - len(right)) <= allowed and distance(left, right) <= allowed)


def distance(left: str, right: str) -> int:
    """Characters added, dropped or replaced, and neighbours swapped, between two words (optimal string alignment)."""
    before, row = list[int](), list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        earlier, before, row = before, row, [i]
        for j, b in enumerate(right, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
