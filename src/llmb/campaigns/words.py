# SPDX-License-Identifier: Apache-2.0
"""The words of a campaign file: what each key means and which values it takes. Pure."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmb.campaigns.entry import Entry, Selection, Values
from llmb.catalogue.variables import FLAGS, Variable
from llmb.errors import UsageError, did_you_mean

ALL = "all"
ENVIRONMENT = "env."
_COUNT = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What keys may be: the options of ``llmb submit`` by each of their names, and the documents' variables."""

    options: Mapping[str, str]
    """From each name, without dashes in front and with underscores, to the option."""
    repeatable: Collection[str] = ()
    """Options that take several values at once: these are not swept."""
    variables: Sequence[Variable] = ()

    def option(self, key: str, workload: str | None) -> str:
        """The option that ``key`` means; in capitals also a variable that sets one. Raises UsageError."""
        name = key.strip().lstrip("-").replace("-", "_").lower()
        if name in self.options:
            return self.options[name]
        for variable in self.variables:
            use = variable.use_for(workload) if workload else variable.uses[0]
            if variable.name == key.upper() and use and use.sets:
                return use.sets
        hint = did_you_mean(name, [*self.options, *_OWN_KEYS])
        raise UsageError(f"unknown key '{key}'{hint}", do="a key is an option of 'llmb submit'; see its --help")


@dataclass(slots=True)
class Draft:
    """An entry in the making: keys are added one by one, and what is wrong with them is kept."""

    words: Words
    where: str
    workloads: Values = ()
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the selection."""
    options: dict[str, Values] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    repeats: int = 1
    profile: bool = False
    add_profile: bool = False

    def set(self, key: str, values: Values) -> None:
        """Raises UsageError for a key that does not exist or a value that it cannot have."""
        if key.startswith(ENVIRONMENT):
            self.variables[key.removeprefix(ENVIRONMENT)] = single(key, values)
            return
        name = key.strip().lstrip("-").replace("-", "_").lower()
        name = _SYNONYMS.get(name, name)
        if name in ("sizes", "dtypes"):
            self._list(name, values)
        elif name == "scales":
            self._list(name, values, count)
        elif name == "max_scale":
            self.fields[name] = count(key, single(key, values))
        elif name in ("min_scale", "exact_scales", "proxy"):
            self.fields[name] = flag(key, single(key, values))
        elif name in ("gpu_type", "release"):
            self.fields[name] = single(key, values)
        elif name == "repeats":
            self.repeats = count(key, single(key, values))
        elif name == "profile":
            self.profile = flag(key, single(key, values))
        elif name == "add_profile":
            self.add_profile = flag(key, single(key, values))
        else:
            workload = self.workloads[0] if self.workloads else None
            self.options[self.words.option(key, workload)] = values

    def _list(self, name: str, values: Values, convert: Callable[[str, str], object] | None = None) -> None:
        if values == (ALL,):
            self.fields["everything"] = True
            self.fields.pop(name, None)
        else:
            self.fields[name] = tuple(convert(name, value) for value in values) if convert else values

    def entry(self) -> Entry:
        return Entry(
            where=self.where,
            selection=Selection(workloads=self.workloads, **self.fields),
            options=self.options,
            variables=self.variables,
            repeats=self.repeats,
            profile=self.profile,
            add_profile=self.add_profile,
            repeatable=frozenset(self.words.repeatable),
        )


_SYNONYMS = {
    "size": "sizes",
    "model_size": "sizes",
    "dtype": "dtypes",
    "scale": "scales",
    "job_total_gpus": "scales",
}
_OWN_KEYS = (
    "sizes",
    "dtypes",
    "scales",
    "max_scale",
    "min_scale",
    "exact_scales",
    "proxy",
    "gpu_type",
    "release",
    "repeats",
    "profile",
    "add_profile",
    "env.NAME",
)


def single(key: str, values: Values) -> str:
    if len(values) != 1:
        raise UsageError(f"{key} takes one value, not {len(values)}")
    return values[0]


def count(key: str, text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise UsageError(f"{key} is '{text}'; it must be a whole number of at least 1")
    return int(text)


def flag(key: str, text: str) -> bool:
    if text.lower() not in FLAGS:
        raise UsageError(f"{key} is '{text}'; it must be true or false")
    return FLAGS[text.lower()]
