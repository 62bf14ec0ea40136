# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the reference documents, and how llmb interprets them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from llmb.base.errors import UsageError, closest, itemized, see
from llmb.base.options import NONE_WORDS, WORD, Option, read_value, valid_values
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import read_file
from llmb.catalogue.model_name import split_model
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import find_workload, releases_of, sizes_of
from llmb.launch.documents.launch_scripts import CACHES, TOKEN, find_launch_script, launch_scripts

SUITE = "reference_suite"
"""The program that runs the suite's own launch scripts."""
VARIABLES = Path(__file__).with_name("variables.yaml")
Value = str | int | float | bool | None
TYPES: Mapping[str, Option] = {
    "word": Option(form=WORD),
    "text": Option(),
    "count": Option(annotation=int, minimum=1),
    "number": Option(annotation=int, minimum=0),
    "flag": Option(annotation=bool),
}
"""Types of variables that set no option."""
SHORTEST_INEXACT = 7
"""Minimum length of names for which similar names are suggested, because many shorter names differ by one letter."""
LIKENESS = 0.87
MOST_LETTERS_MORE = 1


class VariableUse(Record):
    """The interpretation of a variable for some workloads, or for all if ``workloads`` is empty."""

    workloads: tuple[str, ...] = ()
    framework: bool = False
    """True if this use applies only to jobs with a framework other than llmb's engine."""
    sets: str | None = None
    """Name of the option that is set to the value."""
    values: dict[str, str] = Field(default_factory=dict)
    """The option's value for each valid value of the variable; empty if the two are always equal."""
    adds: dict[str, str] = Field(default_factory=dict)
    """Values of other options that are also set, by option, unless the variable is false."""
    install: bool = False
    """True if the value is the install root, which every command reads."""
    read_for: str | None = None
    """Name of the option that reads the variable in every submission, not only in ``llmb launch``."""
    passed: bool = False
    """True if the variable is passed to the job in its environment."""
    accepts: tuple[str, ...] = ()
    """The only supported values of a variable that has no other use."""
    because: str | None = None
    ignored: str | None = None
    refused: str | None = None

    @model_validator(mode="after")
    def _is_one_use(self) -> Self:
        kinds = (self.sets, self.install, self.read_for, self.passed, self.accepts, self.ignored, self.refused)
        if sum(map(bool, kinds)) != 1:
            raise ValueError("a use needs exactly one of sets, install, read_for, passed, accepts, ignored and refused")
        if bool(self.accepts) != bool(self.because):
            raise ValueError("accepts and because require each other")
        return self

    def fits(self, workload: str, *, framework: bool) -> bool:
        return (not self.workloads or workload in self.workloads) and (framework or not self.framework)


class LaunchVariable(Record):
    """A variable of the reference documents."""

    name: str
    meaning: str
    type: Literal["word", "text", "count", "number", "flag"] | None = None
    """Type of the value; None if an option defines the type."""
    none_is: int | None = None
    """The value for words such as null, if these are valid."""
    releases: tuple[str, ...]
    uses: tuple[VariableUse, ...]
    excludes: tuple[str, ...] = ()
    """Variables that cannot be combined with this variable."""
    quiet: bool = False
    """True if the variable is ignored with no message, because other programs also read it."""
    preparation: VariableUse | None = None
    """The interpretation by ``llmb prepare submit``; see ``prepares`` if it is None."""

    def use_for(self, workload: str, *, framework: bool = False) -> VariableUse | None:
        return next((use for use in self.uses if use.fits(workload, framework=framework)), None)

    @property
    def prepares(self) -> VariableUse | None:
        """Return the interpretation for a preparation; None if the variable applies only to runs."""
        shared = next((use for use in self.uses if use.read_for or use.install), None)
        return self.preparation or shared

    @model_validator(mode="after")
    def _has_one_type(self) -> Self:
        if bool(self.type) == bool(self.option):
            raise ValueError("type is required if no use sets an option, and invalid otherwise")
        return self

    @property
    def option(self) -> str | None:
        """Return the name of the option that defines the type; None if ``type`` does."""
        return next((name for use in self.uses if (name := use.sets or use.read_for)), None)

    def value(self, text: str, options: Mapping[str, Option]) -> Value:
        """Parse a value; raise ValueError if it is invalid."""
        if "none_is" in self.model_fields_set and text.lower() in NONE_WORDS:
            return self.none_is
        takes = self.takes(options)
        value: Value = read_value(takes, text.lower() if takes.form.any_case else text)
        return value

    def valid(self, options: Mapping[str, Option]) -> str:
        """Describe the valid values, to follow the words "it must be"."""
        names = [name for use in self.uses for name in use.values]
        return " or ".join(dict.fromkeys(names)) if names else valid_values(self.takes(options))

    def takes(self, options: Mapping[str, Option]) -> Option:
        return TYPES[self.type] if self.type else options[str(self.option)]


class VariablesFile(Record):
    """The content of ``variables.yaml``."""

    variables: tuple[LaunchVariable, ...]


@cache
def documented_variables(path: Path = VARIABLES) -> tuple[LaunchVariable, ...]:
    """Read the variables of the reference documents; raise CatalogueError if the file is invalid."""
    return read_file(path, VariablesFile, wrap="variables").variables


@dataclass(frozen=True, slots=True)
class Reading:
    """The options that environment variables set."""

    options: Mapping[str, Value]
    """Values by the name of the option."""
    origins: Mapping[str, str]
    """For each of ``options``, the variable that sets it."""
    notes: tuple[str, ...]
    """Ignored variables, with the reasons."""


def read_variables(
    variables: Sequence[LaunchVariable],
    environ: Mapping[str, str],
    workload: str,
    options: Mapping[str, Option],
    explicit: Collection[str] = (),
    *,
    framework: bool = False,
) -> Reading:
    """Return the options that ``environ`` sets for a launch of ``workload``. Empty variables count as unset.

    ``options`` are all options that variables may set. Variables that set an option in ``explicit``, the options
    on the command line, are ignored. Raises UsageError that lists all variables that do not apply, are unsupported or
    invalid, or contradict another variable.
    """
    reading, problems = _Readings(options), list[str]()
    for variable in variables:
        text = environ.get(variable.name, "").strip()
        use = variable.use_for(workload, framework=framework)
        if not text or (use and use.sets in explicit and use.sets is not None):
            continue
        problem = reading.add(variable, use, text) if use else _does_not_apply(variable, workload)
        if problem:
            problems.append(problem)
    problems.extend(_exclusions(variables, reading.honored))
    if problems:
        raise UsageError(
            f"the environment has invalid or unsupported variables:{itemized(problems)}",
            where="environment variables",
            do=f"correct or unset them; {see('environment')}",
        )
    return Reading(reading.options, reading.origins, tuple(reading.notes))


def read_preparation_variables(
    variables: Sequence[LaunchVariable],
    environ: Mapping[str, str],
    workload: str,
    options: Mapping[str, Option],
    explicit: Collection[str] = (),
) -> Reading:
    """Return the options that ``environ`` sets for a preparation, with notes on variables that apply only to runs."""
    prep = [item.model_copy(update={"uses": (item.prepares,), "excludes": ()}) for item in variables if item.prepares]
    reading = read_variables(prep, environ, workload, options, explicit)
    others = [item.name for item in variables if not item.prepares and not item.quiet and environ.get(item.name)]
    notes = (f"{name} is not needed: it applies to runs, and this is a preparation" for name in others)
    return Reading(reading.options, reading.origins, (*reading.notes, *notes))


class _Readings:
    def __init__(self, options: Mapping[str, Option]) -> None:
        self.known = options
        self.options: dict[str, Value] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.honored: dict[str, Value] = {}
        """Values of the variables that set an option, by name."""

    def add(self, variable: LaunchVariable, use: VariableUse, text: str) -> str | None:
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
        if use.read_for or use.install or use.passed:
            return None
        self.honored[variable.name] = value
        values = {str(use.sets): value, **(use.adds if value is not False else {})}
        problems = (self._take(option, variable.name, item) for option, item in values.items())
        return next(filter(None, problems), None)

    def _take(self, option: str, name: str, value: Value) -> str | None:
        before = self.options.get(option)
        if option in self.origins and before != value:
            return f"{name} is '{value}', but {self.origins[option]} is '{before}'; unset one of them"
        self.origins[option] = name
        self.options[option] = value
        return None


def _read(variable: LaunchVariable, use: VariableUse, text: str, options: Mapping[str, Option]) -> Value:
    if not use.values:
        return variable.value(text, options)
    if text.lower() not in use.values:
        raise ValueError(text)
    return use.values[text.lower()]


def _exclusions(variables: Iterable[LaunchVariable], honored: Mapping[str, Value]) -> Iterator[str]:
    for variable in variables:
        for other in variable.excludes:
            if honored.get(variable.name) and honored.get(other):
                yield f"{variable.name} and {other} are mutually exclusive; unset one of them"


def _not_accepted(variable: LaunchVariable, use: VariableUse, value: Value) -> str | None:
    written = str(value).lower()
    if written in use.accepts:
        return None
    return f"{variable.name} is '{written}'; it must be {' or '.join(use.accepts)}: {use.because}"


def _does_not_apply(variable: LaunchVariable, workload: str) -> str:
    fitting = dict.fromkeys(name for use in variable.uses if not use.refused for name in use.workloads)
    return f"{variable.name} does not apply to {workload}; it applies to {', '.join(fitting)}"


def near_misses(variables: Iterable[LaunchVariable], environ: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each name in ``environ`` that may be a misspelled variable."""
    by_letters = {_letters(variable.name): variable.name for variable in variables}
    for name in sorted(set(environ) - set(by_letters.values())):
        like = closest(_letters(name), by_letters, cutoff=LIKENESS)
        if near := [by_letters[letters] for letters in like if _is_near(name, letters)]:
            yield f"{name} is not a variable that llmb reads; did you mean {' or '.join(near)}?"


def _is_near(name: str, valid: str) -> bool:
    letters = _letters(name)
    long = len(valid) >= SHORTEST_INEXACT
    return letters == valid or (long and abs(len(letters) - len(valid)) <= MOST_LETTERS_MORE)


def _letters(name: str) -> str:
    """Return the name in upper case without underscores, because both are often misspelled."""
    return name.replace("_", "").upper()


@dataclass(frozen=True, slots=True)
class RequestedLaunch:
    """The option values of a job to launch; ``notes`` explain ignored variables and a change of the release."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]


def read_launch(
    catalogue: Catalogue,
    options: Mapping[str, Option],
    environ: Mapping[str, str],
    model: str,
    values: Mapping[str, Any],
    explicit: Mapping[str, Any],
) -> RequestedLaunch:
    """Return the job that a launch of ``model``, a workload with or without its size, requests.

    ``values`` are all options, with defaults; ``explicit`` are options set on the command line, which override
    variables. Raises UsageError if the model or a variable is invalid, or the size or the number of GPUs is missing.
    """
    workload, own_size = split_model(catalogue, model)
    size = explicit.get("size") or own_size
    strongest = {**explicit, "workload": workload, **({"size": size} if size else {})}
    framework, variables = values.get("framework"), documented_variables()
    ignored: dict[str, str] = {}
    if framework == SUITE:
        variables, ignored = _left_to_scripts(variables, environ, workload)
    reading = read_variables(variables, environ, workload, options, strongest, framework=bool(framework))
    chosen = {**values, **reading.options, **strongest}
    chosen["size"] = chosen.get("size") or _only_size(catalogue, workload)
    if chosen.get("scale") is None and chosen.get("nodes") is None:
        raise UsageError("the number of GPUs is not specified", do="set JOB_TOTAL_GPUS, or pass --scale or --nodes")
    notes = list(reading.notes)
    if release := _other_release(catalogue, chosen, reading.origins):
        chosen["release"] = release
        newest = _newest(catalogue, chosen)
        what = "nodes" if chosen.get("nodes") is not None else "GPUs"
        why = f"it is the newest whose document has a variable for the number of {what}"
        notes.append(f"release {release} is used instead of {newest}, because {why}")
    script = find_launch_script(workload, chosen["size"], chosen.get("release") or _newest(catalogue, chosen))
    unread = {*ignored} - script.reads if script else set[str]()
    notes += [f"{name} is not needed: the launch script of that release does not read it" for name in sorted(unread)]
    if arguments := [f"{name.lower()}={value}" for name, value in ignored.items() if name not in unread]:
        chosen["framework_arg"] = [*(chosen.get("framework_arg") or ()), *arguments]
    return RequestedLaunch(chosen, tuple(notes))


def _left_to_scripts(
    variables: Sequence[LaunchVariable], environ: Mapping[str, str], workload: str
) -> tuple[tuple[LaunchVariable, ...], dict[str, str]]:
    read = {name for script in launch_scripts() if script.workload == workload for name in script.reads}
    ignored = {item.name for item in variables if item.name in read and not item.option and item.name != TOKEN}
    ignored -= {item.name for item in variables if any(use.install for use in item.uses)}
    values = {name: environ[name] for name in sorted(ignored - CACHES) if environ.get(name)}
    return tuple(item for item in variables if item.name not in ignored), values


def _newest(catalogue: Catalogue, options: Mapping[str, Any]) -> str | None:
    releases = releases_of(find_workload(catalogue, options["workload"]), options["size"])
    return releases[-1] if releases else None


def _other_release(catalogue: Catalogue, options: Mapping[str, Any], origins: Mapping[str, str]) -> str | None:
    """Return the newest release whose document has a variable for the number of nodes or GPUs. None if no release has
    one, if the newest of all has one, or if the user chose a release."""
    option = "nodes" if options.get("nodes") is not None else "scale"
    counted = [
        item for item in documented_variables() if item.option == option and item.name == origins.get(option, item.name)
    ]
    releases = releases_of(find_workload(catalogue, options["workload"]), options["size"])
    matching = [release for release in releases if any(release in item.releases for item in counted)]
    return matching[-1] if matching and matching[-1] != releases[-1] and options.get("release") is None else None


def _only_size(catalogue: Catalogue, name: str) -> str:
    workload = find_workload(catalogue, name)
    sizes = [size for size in sizes_of(workload) if releases_of(workload, size)]
    if len(sizes) != 1:
        do = "set MODEL_SIZE, or pass --size"
        raise UsageError(f"the size of {name} is not specified", choices=sizes or sizes_of(workload), do=do)
    return sizes[0]
