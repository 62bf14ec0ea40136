# SPDX-License-Identifier: Apache-2.0
"""What the command line or one part of a file requests, before expansion into jobs, and the keys of files. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from llmb.catalogue.resolve import Request
from llmb.errors import UsageError, did_you_mean
from llmb.options.option import WORD, Option, convert, options_of
from llmb.reference_suite.variables import LaunchVariable

Values = tuple[str, ...]
_selection = partial(Option, panel="Selection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects recipes; an empty field selects all."""

    workloads: Annotated[
        Values,
        _selection(
            name="workload",
            flags=("-w", "--workload"),
            help="Workload, or several separated by commas; see 'llmb list'. Default: all.",
            form=WORD,
        ),
    ] = ()
    """Workloads, or a workload and a size in one word, as in ``pretrain_llama3.1_8b``."""
    sizes: Annotated[
        Values,
        _selection(
            name="size", flags=("-s", "--model-size", "--size"), help="Model size, or several. Default: all.", form=WORD
        ),
    ] = ()
    dtypes: Annotated[
        Values,
        _selection(
            name="dtype",
            flags=("-d", "--dtype"),
            help="Precision, or several. Default: bf16 of one recipe (fp32 on a CPU), else all.",
            form=WORD,
        ),
    ] = ()
    scales: Annotated[
        tuple[int, ...],
        _selection(
            name="scale",
            flags=("-n", "--gpus", "--scale"),
            help="Number of GPUs, or several. Default: the smallest of one recipe, else all that are published.",
            minimum=1,
        ),
    ] = ()
    max_scale: Annotated[
        int | None, _selection(help="All scales up to N, and doublings of the largest.", minimum=1)
    ] = None
    """Doublings of the largest published scale are included up to this one."""
    min_scale: Annotated[bool, _selection(help="The smallest scale of each recipe.")] = False
    """Only the smallest scale of each recipe."""
    exact_scales: Annotated[bool, _selection(help="Published scales, no doublings.")] = False
    """Published scales only, no doublings."""
    proxy: Annotated[bool, _selection(help="Proxies: models of fewer layers, for few GPUs.")] = False
    """Proxies, at their own scales, and nothing else."""
    everything: bool = False
    """For a single recipe, an empty field also means all values instead of the default."""
    gpu_type: Annotated[str | None, _selection(help="GPU type of the catalogue, or cpu.", form=WORD)] = None
    release: Annotated[str | None, _selection(help="Release of the reference document. Default: the newest.")] = None

    @property
    def names_one(self) -> bool:
        """True for one recipe: dtype and scale, if not specified, are its defaults."""
        limits = (self.max_scale, self.min_scale, self.exact_scales, self.proxy, self.everything)
        lists = (self.workloads, self.sizes, self.dtypes, self.scales)
        return bool(self.workloads) and all(len(items) <= 1 for items in lists) and not any(limits)

    @property
    def names_recipes(self) -> bool:
        """Workloads, sizes and dtypes are all named, so a missing one is an error."""
        sized = bool(self.sizes) or all("_" in name.partition("_")[2] for name in self.workloads)
        return self.names_one or (bool(self.workloads) and sized and bool(self.dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Recipes and how they are run. ``options`` are those of ``llmb submit`` by name; several values are swept."""

    where: str
    """File and line, or the command line."""
    selection: Selection
    options: Mapping[str, Values] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers' environment."""
    repeats: Annotated[
        int, _selection(flags=("-r", "--repeats"), help="Runs of each recipe. Default: 1.", minimum=1)
    ] = 1
    profile: Annotated[bool, Option(help="Every run is profiled.")] = False
    add_profile: Annotated[bool, Option(help="Add one profiled run of each recipe.")] = False
    repeatable: frozenset[str] = frozenset()
    """Options that take several values at once: they are not swept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedJob:
    """One job of a campaign, before its recipe is resolved: the request names dtype, GPU type and scale."""

    where: str
    request: Request
    proxy: bool
    named: bool = True
    """The job was named, not selected as one of all."""
    options: Mapping[str, Values] = field(default_factory=dict)
    """One value each, except for options that take several at once."""
    variables: Mapping[str, str] = field(default_factory=dict)
    repeat: int = 1
    profiled: bool = False

    @property
    def scale(self) -> int:
        return self.request.scale or 1

    @property
    def recipe(self) -> str:
        asked = self.request
        return f"{asked.workload} {asked.size} {asked.dtype} on {asked.scale} {asked.gpu_type}"


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
