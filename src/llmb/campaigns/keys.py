# SPDX-License-Identifier: Apache-2.0
"""The keys of a campaign file: the options of ``llmb submit``, by each of their names. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmb.campaigns.entry import Entry, Selection, Values
from llmb.errors import UsageError, did_you_mean
from llmb.options.option import Option, options_of
from llmb.options.text import convert
from llmb.reference_suite.variables import LaunchVariable

ALL = "all"
ENVIRONMENT = "env."
WORKLOAD = "workload"
"""Not keys: files name workloads in other ways."""


def entry_options() -> dict[str, Option]:
    """Keys of a file's entries, in addition to the options of a job."""
    return {name: option for name, option in options_of(Entry).items() if name != WORKLOAD}


@dataclass(frozen=True, slots=True)
class Keys:
    """Maps each key, without leading dashes and with underscores, to its option; also the variables of the reference
    documents."""

    options: Mapping[str, Option]
    variables: Sequence[LaunchVariable] = ()

    def option(self, key: str, workload: str | None) -> Option:
        """The option of ``key``, which may also be a variable that sets one. Raises UsageError."""
        name = key.strip().lstrip("-").replace("-", "_").lower()
        if name in self.options:
            return self.options[name]
        for variable in self.variables:
            use = variable.use_for(workload) if workload else variable.uses[0]
            if variable.name == key.upper() and use and use.sets and use.sets in self.options:
                return self.options[use.sets]
        hint = did_you_mean(name, [*self.options, f"{ENVIRONMENT}NAME"])
        raise UsageError(f"unknown key '{key}'{hint}", do="a key is an option of 'llmb submit'; see its --help")


def campaign_keys(options: Iterable[Option], variables: Sequence[LaunchVariable]) -> Keys:
    """The keys of a job's ``options`` and of entries; the latter take precedence."""
    listed = [option for option in options if option.name != WORKLOAD]
    found = {key: option for option in (*listed, *entry_options().values()) for key in option.keys}
    return Keys(found, variables)


@dataclass(slots=True)
class Draft:
    """Builds an entry from its keys."""

    keys: Keys
    where: str
    workloads: Values = ()
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the entry and of its selection."""
    options: dict[str, Values] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    repeatable: set[str] = field(default_factory=set)

    def set(self, key: str, values: Values) -> None:
        """Raises UsageError for an unknown key or an invalid value."""
        if key.startswith(ENVIRONMENT):
            self.variables[key.removeprefix(ENVIRONMENT)] = str(convert(Option(), key, values))
            return
        option = self._option(key)
        own = entry_options().get(option.name)
        if own is None:
            self.options[option.name] = values
            self.repeatable.update({option.name} if option.repeatable else ())
        elif own.listed and values == (ALL,):
            self.fields["everything"] = True
            self.fields.pop(own.field, None)
        else:
            self.fields[own.field] = convert(own, key, values)

    def set_text(self, key: str, text: str) -> None:
        """Sets a key from text; values of a list are separated by commas."""
        listed = not key.startswith(ENVIRONMENT) and self._option(key).listed
        values = tuple(part for part in text.split(",") if part) if listed else (text,)
        if not values:
            raise UsageError(f"{key} is empty")
        self.set(key, values)

    def _option(self, key: str) -> Option:
        return self.keys.option(key, self.workloads[0] if self.workloads else None)

    def entry(self) -> Entry:
        selecting = {option.field for option in options_of(Selection).values()} | {"everything"}
        selection = {name: value for name, value in self.fields.items() if name in selecting}
        return Entry(
            where=self.where,
            selection=Selection(workloads=self.workloads, **selection),
            options=self.options,
            variables=self.variables,
            repeatable=frozenset(self.repeatable),
            **{name: value for name, value in self.fields.items() if name not in selecting},
        )
