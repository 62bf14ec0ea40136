# SPDX-License-Identifier: Apache-2.0
"""Expands entries of campaigns into single jobs, largest first."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, NamedTuple

from llmb.base.errors import UsageError, did_you_mean, unknown
from llmb.base.options import WORD, Option, convert, limit_problems, options_of
from llmb.base.shown_text import counted, listed
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import (
    CPU,
    Request,
    ScaleChoices,
    find_workload,
    gpu_types_of,
    is_tiny,
    listed_scales,
    resolve,
    sizes_of,
)
from llmb.launch.documents.variables import LaunchVariable

Values = tuple[str, ...]
_selection = partial(Option, panel="Selection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects recipes; an empty field selects all or, for a single recipe, the default."""

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
            name="size",
            flags=("-s", "--model-size", "--size"),
            help="Model size, or several. Default: the file's, else all that llmb's engine trains (tiny only on CPUs).",
            form=WORD,
        ),
    ] = ()
    dtypes: Annotated[
        Values,
        _selection(
            name="dtype",
            flags=("-d", "--dtype"),
            help="Precision, or several. Default: the file's, else fp32 on CPUs, usually bf16 for one recipe, or all.",
            form=WORD,
        ),
    ] = ()
    scales: Annotated[
        tuple[int, ...],
        _selection(
            name="scale",
            flags=("-n", "--gpus", "--scale"),
            help="Number of GPUs, or several. Default: the file's, else the smallest for a single recipe, or all.",
            minimum=1,
        ),
    ] = ()
    max_scale: Annotated[
        int | None, _selection(help="Omit scales above N; without a file, double the largest up to N.", minimum=1)
    ] = None
    min_scale: Annotated[bool, _selection(help="Include only the smallest scale of each recipe.")] = False
    exact_scales: Annotated[bool, _selection(help="Include only published scales, without doublings.")] = False
    proxy: Annotated[bool, _selection(help="Include only proxies: models with fewer layers, for few GPUs.")] = False
    """True to select only proxies, at their own scales."""
    everything: bool = False
    """True if an empty field selects all values even for a single recipe, rather than the default."""
    gpu_type: Annotated[
        str | None, _selection(help="GPU type, or cpu. Default: from file, settings, machine or recipe.", form=WORD)
    ] = None
    release: Annotated[str | None, _selection(help="Release. Default: the file's, else as for 'llmb run'.")] = None

    @property
    def names_one(self) -> bool:
        """Return True if a workload is named without lists or filters; dtype and scale then have defaults."""
        limits = (self.max_scale, self.min_scale, self.exact_scales, self.proxy, self.everything)
        lists = (self.workloads, self.sizes, self.dtypes, self.scales)
        return bool(self.workloads) and all(len(items) <= 1 for items in lists) and not any(limits)

    @property
    def names_recipes(self) -> bool:
        """Return True if the recipes are named, not only filtered, so that it is an error if any cannot run."""
        sized = bool(self.sizes) or all("_" in name.partition("_")[2] for name in self.workloads)
        return self.names_one or (bool(self.workloads) and sized and bool(self.dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Recipes, and values of the options of ``llmb submit`` by name; several values of an option are swept."""

    where: str
    """File and line, or the command line."""
    selection: Selection
    options: Mapping[str, Values] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the workers."""
    repeats: Annotated[
        int, _selection(flags=("-r", "--repeats"), help="Runs of each recipe. Default: the file's, else 1.", minimum=1)
    ] = 1
    profile: Annotated[bool, Option(help="Profile every run.")] = False
    add_profile: Annotated[bool, Option(help="Add one profiled run of each recipe.")] = False
    repeatable: frozenset[str] = frozenset()
    """Options that accept several values at once and are therefore not swept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedJob:
    """One job of a campaign, before its recipe is resolved; the request specifies dtype, GPU type and scale."""

    where: str
    request: Request
    proxy: bool
    named: bool = True
    """True if the recipe was named, not only selected by filters, so that it is an error if the job cannot run."""
    options: Mapping[str, Values] = field(default_factory=dict)
    """One value per option, except for options that accept several at once."""
    variables: Mapping[str, str] = field(default_factory=dict)
    repeat: int = 1
    profiled: bool = False

    @property
    def scale(self) -> int:
        return self.request.scale or 1

    @property
    def recipe(self) -> str:
        request = self.request
        return f"{request.workload} {request.size} {request.dtype} on {request.scale} {request.gpu_type}"


ALL = "all"
ENVIRONMENT = "env."
WORKLOAD = "workload"
"""The option for workloads, which is not a key of campaign files, because they name workloads in other ways."""


def entry_options() -> dict[str, Option]:
    """Return the options that entries declare, except the workload; some, such as dtype, replace options of a job."""
    return {name: option for name, option in options_of(Entry).items() if name != WORKLOAD}


@dataclass(frozen=True, slots=True)
class Keys:
    """The options of campaign files by key, without leading dashes and with underscores, and the variables of the
    reference documents."""

    options: Mapping[str, Option]
    variables: Sequence[LaunchVariable] = ()

    def option(self, key: str, workload: str | None) -> Option:
        """Return the option that ``key`` names or that the variable ``key`` sets; raise UsageError for another key."""
        name = key.strip().lstrip("-").replace("-", "_").lower()
        if name in self.options:
            return self.options[name]
        for variable in self.variables:
            use = variable.use_for(workload) if workload else variable.uses[0]
            if variable.name == key.upper() and use and use.sets and use.sets in self.options:
                return self.options[use.sets]
        hint = did_you_mean(name, [*self.options, f"{ENVIRONMENT}NAME"])
        raise UsageError(f"unknown key '{key}'{hint}", do="use an option of 'llmb submit --help-all', or env.NAME")


def campaign_keys(options: Iterable[Option], variables: Sequence[LaunchVariable]) -> Keys:
    """Return the keys for a job's ``options`` and for the options of entries, which take precedence."""
    listed = [option for option in options if option.name != WORKLOAD]
    by_key = {key: option for option in (*listed, *entry_options().values()) for key in option.keys}
    return Keys(by_key, variables)


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
        """Set the values of a key; raise UsageError if it is unknown, or for an invalid value of an entry's option."""
        if key.startswith(ENVIRONMENT):
            self.variables[key.removeprefix(ENVIRONMENT)] = str(convert(Option(), key, values))
            return
        option = self._option(key)
        declared = entry_options().get(option.name)
        if declared is None:
            self.options[option.name] = values
            self.repeatable.update({option.name} if option.repeatable else ())
        elif declared.listed and values == (ALL,):
            self.fields["everything"] = True
            self.fields.pop(declared.field, None)
        else:
            self.fields[declared.field] = convert(declared, key, values)

    def set_text(self, key: str, text: str) -> None:
        """Set a key from text, split at commas if the option may have several values; raise UsageError if no value is
        left, and the errors of ``set``."""
        option = None if key.startswith(ENVIRONMENT) else self._option(key)
        listed = option is not None and (option.listed or option.swept)
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


MOST_JOBS = 10_000
MOST_RECIPES = 3
"""The maximum number of recipes to name in one line of a report."""


@dataclass(slots=True)
class Expansion:
    """The jobs that entries expand to. ``problems`` are errors; ``left_out`` are reported, but are not errors."""

    jobs: list[SelectedJob] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.jobs) + len(self.left_out) + len(self.problems)


class _Recipe(NamedTuple):
    """The scales of a model in one dtype; ``alone`` is True if the entry selects only this model."""

    request: Request
    listed: ScaleChoices
    alone: bool


def expand(catalogue: Catalogue, entries: Sequence[Entry], gpu_type: str | None) -> Expansion:
    """Expand ``entries`` into jobs, the largest scale first.

    Within a scale, each recipe runs once before the next repeat. Every second round is in reverse order, because of
    drift. If an entry selects several models, jobs below the smallest scale of a
    model are left out. ``gpu_type`` is the cluster's GPU type.
    """
    expansion = Expansion()
    for entry in entries:
        before = expansion.size
        try:
            _check(entry)
            for recipe in _recipes(catalogue, entry, gpu_type):
                _add_jobs(entry, recipe, expansion)
            if expansion.size == before:
                do = "omit limits such as --proxy, or choose from 'llmb list'; sizes the engine lacks must be named"
                raise UsageError("no recipe has the requested size, scale and GPU type", do=do)
        except UsageError as error:
            expansion.problems.append(f"{entry.where}: {problem_text(error)}")
        if len(expansion.jobs) > MOST_JOBS:
            break  # each further entry would add its jobs and report the same problem
    types = dict.fromkeys(str(job.request.gpu_type) for job in expansion.jobs)
    if gpu_type is None and len(types) > 1 and not all(entry.selection.gpu_type for entry in entries):
        do = "pass --gpu-type, or set gpu_type in cluster_config.yaml"
        expansion.problems.append(f"the cluster's GPU type is not specified: {' or '.join(types)}; {do}")
    expansion.jobs = _in_turn(expansion.jobs)
    return expansion


def _in_turn(jobs: Sequence[SelectedJob]) -> list[SelectedJob]:
    def turn(placed: tuple[int, SelectedJob]) -> tuple[int, int, int]:
        place, job = placed
        return -job.scale, job.repeat, place if job.repeat % 2 else -place

    return [job for _, job in sorted(enumerate(jobs), key=turn)]


def problem_text(error: UsageError) -> str:
    """Format the problem, the valid values and the advice on one line."""
    head, *items = (line.strip().removeprefix("- ") for line in error.what.splitlines())
    parts = [
        " ".join([head, "; ".join(items)]).strip(),
        error.choices and f"valid: {', '.join(error.choices)}",
        error.do,
    ]
    return "; ".join(part for part in parts if part)


def grouped(refusals: Iterable[tuple[SelectedJob, str]]) -> list[str]:
    """Return a line, with some of the recipes, for each place and reason why jobs cannot run."""
    groups: dict[tuple[str, str], list[str]] = {}
    for job, reason in refusals:
        recipes = groups.setdefault((job.where, reason), [])
        if job.recipe not in recipes:
            recipes.append(job.recipe)
    return [f"{where}: {listed(recipes, MOST_RECIPES)}: {reason}" for (where, reason), recipes in groups.items()]


def _check(entry: Entry) -> None:
    if problems := list(limit_problems(entry)):
        raise UsageError("; ".join(problems))
    combinations = math.prod(len(values) for name, values in entry.options.items() if name not in entry.repeatable)
    if entry.repeats * combinations > MOST_JOBS:
        swept = f" of {combinations:,} combinations" if combinations > 1 else ""
        raise UsageError(f"{counted(entry.repeats, 'repeat')}{swept} would be more than {MOST_JOBS:,} jobs")
    if entry.profile and entry.add_profile:
        raise UsageError("profile and add_profile are mutually exclusive; set only one")


def _recipes(catalogue: Catalogue, entry: Entry, site_gpu_type: str | None) -> Iterator[_Recipe]:
    selection = entry.selection
    gpu_type = selection.gpu_type or site_gpu_type
    models = list(_models(catalogue, selection, gpu_type))
    alone = len(models) == 1
    for workload, size in models:
        gpu = gpu_type or gpu_types_of(catalogue.workloads[workload], size)[0]
        request = Request(workload=workload, size=size, gpu_type=gpu, release=selection.release)
        for dtype in selection.dtypes or _default_dtypes(catalogue, selection, request, alone=alone):
            recipe = replace(request, dtype=dtype)
            listed = listed_scales(catalogue, recipe)  # of the release that has this dtype
            if dtype not in listed:
                raise unknown("dtype", dtype, listed)
            yield _Recipe(recipe, listed[dtype], alone)


def _models(catalogue: Catalogue, selection: Selection, gpu_type: str | None) -> Iterator[tuple[str, str]]:
    """Yield the selected workloads and sizes; by default all for the GPU type except ``tiny``, or ``tiny`` on a CPU."""
    models = [split_model(catalogue, name) for name in selection.workloads]
    workloads: list[tuple[str, str | None]] = models or [(name, None) for name in catalogue.workloads]
    every_size = dict.fromkeys(size for name, _ in workloads for size in sizes_of(find_workload(catalogue, name)))
    for size in selection.sizes:
        if size not in every_size:
            raise unknown("size", size, every_size)
    for name, own_size in workloads:
        workload = catalogue.workloads[name]
        for size in sizes_of(workload):
            is_named = size == own_size if own_size else size in selection.sizes
            selected = is_named and size in (selection.sizes or (size,))
            fits = gpu_type in (None, *gpu_types_of(workload, size)) and catalogue.is_trainable(workload, size)
            if selected or (not own_size and not selection.sizes and fits and is_tiny(size) == (gpu_type == CPU)):
                yield name, size


def _default_dtypes(catalogue: Catalogue, selection: Selection, request: Request, *, alone: bool) -> Sequence[str]:
    listed = listed_scales(catalogue, request)
    if alone and selection.names_one:
        return [resolve(catalogue, replace(request, scale=next(iter(selection.scales), None))).dtype]
    return ["fp32"] if request.gpu_type == CPU and "fp32" in listed else sorted(listed, key=[*Dtype].index)


def _add_jobs(entry: Entry, recipe: _Recipe, expansion: Expansion) -> None:
    listed, request = recipe.listed, recipe.request
    smallest = min(listed.full or listed.proxies)
    for scale in scales_of(entry.selection, listed, alone=recipe.alone):
        name = f"{request.workload} {request.size} {request.dtype}"
        if not recipe.alone and scale < smallest and scale not in listed.proxies:
            expansion.left_out.append(f"{entry.where}: {name} has no layout below {smallest} GPUs")
        elif entry.selection.proxy and scale not in listed.proxies:
            proxies = ", ".join(map(str, listed.proxies)) or "none"
            expansion.problems.append(f"{entry.where}: {name} has no proxy for {scale} GPUs; valid: {proxies}")
        else:
            proxy = scale in listed.proxies and scale not in listed.full
            expansion.jobs.extend(_jobs(entry, request, scale, proxy=proxy))
        if len(expansion.jobs) > MOST_JOBS:
            raise UsageError(f"there are more than {MOST_JOBS:,} jobs", do="split them into several campaigns")


def scales_of(selection: Selection, listed: ScaleChoices, *, alone: bool = False) -> list[int]:
    """Return the scales that a selection requests for a recipe, smallest first, even those that the recipe lacks."""
    limit, is_single = selection.max_scale, alone and selection.names_one
    if selection.scales:
        return sorted({scale for scale in selection.scales if limit is None or scale <= limit})
    offered = list(listed.proxies if selection.proxy or (is_single and not listed.full) else listed.full)
    if limit is not None:
        doubles = not (selection.proxy or selection.exact_scales or listed.above_largest == "refuse")
        while doubles and offered and offered[-1] * 2 <= limit:
            offered.append(offered[-1] * 2)
        offered = [scale for scale in offered if scale <= limit]
    return offered[:1] if selection.min_scale or is_single else offered


def swept(options: Mapping[str, Values], repeatable: Collection[str] = ()) -> Iterator[dict[str, Values]]:
    """Yield every combination of the options' values; the last option varies fastest."""
    lists = [[values] if name in repeatable else [(value,) for value in values] for name, values in options.items()]
    for combination in product(*lists):
        yield dict(zip(options, combination, strict=True))


def _jobs(entry: Entry, request: Request, scale: int, *, proxy: bool) -> Iterator[SelectedJob]:
    repeats = [(number, entry.profile) for number in range(1, entry.repeats + 1)]
    if entry.add_profile:
        repeats.append((entry.repeats + 1, True))
    for options, (number, profiled) in product(swept(entry.options, entry.repeatable), repeats):
        yield SelectedJob(
            where=entry.where,
            request=replace(request, scale=scale),
            proxy=proxy,
            named=entry.selection.names_recipes,
            options=options,
            variables=entry.variables,
            repeat=number,
            profiled=profiled,
        )


def narrowed(catalogue: Catalogue, jobs: Iterable[SelectedJob], selection: Selection) -> list[SelectedJob]:
    """Return the jobs that match a selection's models, dtypes and scales; raise UsageError for an unknown model."""
    models = [split_model(catalogue, name) for name in selection.workloads]
    selected = [job for job in jobs if _is_meant(job, selection, models)]
    if selection.exact_scales:
        selected = [job for job in selected if _is_published(catalogue, job)]
    if not selection.min_scale:
        return selected
    smallest: dict[tuple[str, ...], int] = {}
    for job in selected:
        smallest[_model(job)] = min(job.scale, smallest.get(_model(job), job.scale))
    return [job for job in selected if job.scale == smallest[_model(job)]]


def _model(job: SelectedJob) -> tuple[str, ...]:
    return job.request.workload, job.request.size, str(job.request.dtype)


def _is_meant(job: SelectedJob, selection: Selection, models: Sequence[tuple[str, str | None]]) -> bool:
    workload, size, dtype = _model(job)
    is_model = not models or any(workload == name and own_size in (None, size) for name, own_size in models)
    lists = ((selection.sizes, size), (selection.dtypes, dtype), (selection.scales, job.scale))
    listed = all(not allowed or value in allowed for allowed, value in lists)
    small = selection.max_scale is None or job.scale <= selection.max_scale
    return is_model and listed and small and (job.proxy or not selection.proxy)


def _is_published(catalogue: Catalogue, job: SelectedJob) -> bool:
    listed = listed_scales(catalogue, job.request)[str(job.request.dtype)]
    return job.scale in (*listed.full, *listed.proxies)
