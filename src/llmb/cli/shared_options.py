# SPDX-License-Identifier: Apache-2.0
"""Parameters for typer, most of them derived from options of records, and shell completion."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmb.base.errors import LlmbError, UsageError
from llmb.base.options import Option, build, options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.custom import USER_WORKLOAD, size_of_file
from llmb.catalogue.model_name import parse_model, split_model
from llmb.catalogue.records import OPEN_CHOICES, Dtype
from llmb.catalogue.resolve import CPU, ModelRequest, Request, sizes_of
from llmb.cli.root import say
from llmb.runs.folder import chosen_root

if TYPE_CHECKING:
    from llmb.jobs.job import Job

MOST_RUNS = 200


def completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes a name, or the last name of a list separated by commas."""
    return lambda incomplete: _begun(names(), incomplete)


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in dict.fromkeys(names) if str(name).lower().startswith(last.lower())]


def complete_size(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete sizes of the specified workload or, without one, of all workloads."""
    found = Catalogue().workloads
    given = str(ctx.params.get("workload") or ctx.params.get("workload_argument"))
    chosen = [found[given]] if given in found else found.values()
    return _begun((size for workload in chosen for size in sizes_of(workload)), incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Complete ids and labels of the latest runs and jobs and, after one letter, also names of run folders."""
    jobs = _latest_jobs()
    names = ["latest"] if jobs else []
    for job in jobs:
        names += [name for name in (job.id, job.job_id, job.label, job.name if incomplete else None) if name]
    return _begun(names, incomplete)


def _latest_jobs() -> list["Job"]:
    from llmb.jobs.history import read_history  # only completions need it
    from llmb.jobs.store import Filter

    try:
        with read_history(chosen_root(os.environ, Path.cwd()).path, lambda _: None) as store:
            return store.jobs(Filter(limit=MOST_RUNS))[::-1]
    except LlmbError:
        return []


COMPLETIONS: Mapping[str, Callable[..., list[str]]] = {
    "workload": completion(lambda: Catalogue().workloads),
    "size": complete_size,
    "dtype": completion(lambda: Dtype),
    "gpu_type": completion(lambda: [*Catalogue().gpus, CPU]),
    "release": completion(lambda: sorted({document.release for document in Catalogue().documents.values()})),
    "label": completion(lambda: [job.label for job in _latest_jobs() if job.label]),
}
"""Completion functions by option. Typer passes the parameters that a function declares."""

Maker = Callable[..., Any]
SHORT_PANELS = (None, "Selection")
"""Panels that ``--help`` shows; ``--help-all`` shows all of them."""
PLACES = ("workload", "size")
"""Options that may also be positional arguments."""
OBVIOUS = ("at least 0", "at least 1")
"""Limits that are not worth showing."""


def parameter(option: Option, *, envvar: bool = True, swept: bool = False) -> inspect.Parameter:
    """Return the typer parameter of an option. A limit that is not obvious is shown; all limits are checked later, with
    all other problems. With ``swept``, an option that may have several values is parsed as text."""
    is_limited = option.limit and not option.listed and option.limit not in OBVIOUS
    metavar = option.metavar or "FOLDER" if option.folder else f"N ({option.limit})" if is_limited else option.metavar
    if swept and option.swept:
        metavar = metavar or ("N" if option.type in (int, float) else None)
    info = typer.Option(
        *option.spellings,
        help=option.help,
        rich_help_panel=option.panel,
        envvar=option.envvar if envvar else None,
        metavar=metavar,
        hidden=option.panel not in SHORT_PANELS and not option.basic,
        autocompletion=COMPLETIONS.get(option.name),
        case_sensitive=False,
    )
    annotation, default = option.annotation, option.default
    if option.repeatable:
        annotation, default = list[str] | None, None
    elif option.listed or (swept and option.swept):
        annotation, default = str | None, None
    elif option.negates:
        annotation, default = bool, False
    return _keyword(option.name, default, Annotated[annotation, info])


def _keyword(name: str, default: object, annotation: Any) -> inspect.Parameter:  # noqa: ANN401 (an annotation)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def record_options(record: type, basic: Container[str] | None = None) -> Maker:
    """Return a function that makes ``record`` from its options; ``basic`` names the options of the short help."""
    options = options_of(record).values()
    shown = [
        one if basic is None else replace(one, basic=one.name in basic, panel=one.panel or "Statistics")
        for one in options
    ]
    return _maker(map(parameter, shown), lambda **values: build(record, values))


def value_options(options: Iterable[Option], *, envvar: bool = True, swept: bool = False) -> Maker:
    """Return a function that returns the options' values by name; without ``envvar``, it ignores the environment."""
    return _maker([parameter(option, envvar=envvar, swept=swept) for option in options], lambda **values: values)


def recipe_options() -> Maker:
    """Return a function that makes a request; workload and size may also be positional."""
    return selection_options(options_of(ModelRequest).values(), request_of)


def catalogue_for(request: ModelRequest, hardware: Path | None = None) -> Catalogue:
    """Return the catalogue, with the model of the request's file, if any; raise UsageError if the file is invalid."""
    if request.model_config is None:
        return Catalogue(hardware=hardware)
    from llmb.runs.huggingface.user_model import read_user_model  # few requests have such a file

    return Catalogue(hardware=hardware, own=read_user_model(Path(request.model_config)))


STATED = {name: name for name in ("workload", "size", "dtype", "gpu_type")} | {"scale": "layout.gpus"}
"""Options that describe the run of a log, each with its key in the run's configuration."""


def log_options() -> Maker:
    """Return a function that returns what the user states about logs, by key of a run's configuration."""
    panel = "What the logs do not report"
    texts = {name: f"The logs' {OPEN_CHOICES.get(name, name)}." for name in STATED} | {"scale": "Number of GPUs."}
    options = [replace(options_of(Request)[name], panel=panel, basic=True, help=texts[name]) for name in texts]
    parameters = (parameter(option, envvar=False).replace(default=None) for option in options)

    def stated(**values: str | None) -> dict[str, str]:
        if workload := values["workload"]:
            values["workload"], own = split_model(Catalogue(), workload.lower())
            values["size"] = only_value("size", own, values["size"])
        return {STATED[name]: text for name, text in values.items() if text}

    return _maker(parameters, stated)


def model_options() -> Maker:
    """Return a function that returns the workload and size; both may also be positional."""
    options = [options_of(Request)[name] for name in PLACES]
    return selection_options(options, lambda values: tuple(map(completed(values).get, PLACES)))


def selection_options(
    options: Iterable[Option], make: Callable[[dict[str, Any]], Any] = dict, *, swept: bool = False
) -> Maker:
    """Return a function that applies ``make`` to the values of options; workload and size may also be positional."""

    def maker(**values: Any) -> Any:  # noqa: ANN401 (whatever the options' types are)
        for name in PLACES:
            values[name] = only_value(name, values.pop(f"{name}_argument"), values[name])
        return make(values)

    flags = [parameter(option, swept=swept) for option in options]
    return _maker(
        [*map(_argument, PLACES), *(flag.replace(default=None) if flag.name in PLACES else flag for flag in flags)],
        maker,
    )


def _argument(name: str) -> inspect.Parameter:
    info = typer.Argument(metavar=name.upper(), help=f"The same as --{name}.", autocompletion=COMPLETIONS[name])
    return _keyword(f"{name}_argument", None, Annotated[str | None, info])


def _maker(parameters: Iterable[inspect.Parameter], make: Maker) -> Maker:
    make.__signature__ = inspect.Signature([*parameters])  # type: ignore[attr-defined]
    return make


def request_of(values: Mapping[str, Any]) -> ModelRequest:
    """Complete ``values`` and return the request that they describe; raise UsageError if a value is invalid."""
    return build(ModelRequest, completed(values))


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with separate workload and size, which may be one word or come from a model's file.

    Raise UsageError if one is missing, if they contradict the file, or if a name that has to be split is unknown."""
    workload, size = values["workload"], values["size"]
    if file := values.get("model_config"):
        own = {"workload": USER_WORKLOAD, "size": size_of_file(Path(file))}
        if others := [name for name in PLACES if values[name] not in (None, own[name])]:
            what = f"--model-config replaces workload and size, but the {others[0]} is '{values[others[0]]}'"
            raise UsageError(what, do=f"omit the {others[0]}, or --model-config")
        return {**values, **own}
    if workload is not None and size is not None and re.fullmatch("(pretrain|finetune|sft)_[^_]+", workload):
        return values  # a complete name without a size: the catalogue is not needed
    catalogue = Catalogue()
    if workload is None:
        do = "add --workload; see 'llmb list'"
        raise UsageError("the workload is not specified", choices=catalogue.workloads, do=do)
    return {**values, **dict(zip(PLACES, parse_model(catalogue, workload.lower(), size and size.lower()), strict=True))}


def only_value(name: str, placed: str | None, flagged: str | None) -> str | None:
    """Return the value of the argument or of the flag; raise UsageError if both are set and differ."""
    if placed and flagged and placed != flagged:
        raise UsageError(f"the {name} has two values: '{placed}' and --{name} {flagged}", do="pass only one")
    return placed or flagged


def takes(*makers: Maker) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the first parameters of a command with options.

    Each of these parameters receives the result of one of ``makers``, which is called with its options. A record with
    fields that are annotated as typer's options is also a maker."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parts = [list(inspect.signature(maker).parameters.values()) for maker in makers]
        own = list(inspect.signature(command).parameters.values())[len(makers) :]

        @functools.wraps(command)
        def with_options(**options: Any) -> None:  # noqa: ANN401 (whatever the options' types are)
            values = [
                maker(**{option.name: options.pop(option.name) for option in part})
                for maker, part in zip(makers, parts, strict=True)
            ]
            command(*values, **options)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in (*parts, own) for one in part]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {option.name: option.annotation for option in parameters}
        return with_options

    return decorate


def flags_of(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set on the command line, not by default or by an environment variable."""
    return {
        name: value for name, value in values.items() if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    }


def with_excluded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with ``--exclude`` resolved by ``excluded_here``."""
    text = values.get("exclude")
    return {**values, "exclude": excluded_here(text)} if text else {**values}


def excluded_here(text: str) -> str:
    """Return the list of nodes that ``--exclude`` selects, in the scheduler's syntax."""
    from llmb.launch.scheduler_lookup import read_cluster_site, scheduler_of
    from llmb.nodes.doctor.checked_nodes import excluded_nodes  # few jobs avoid nodes

    install = chosen_root(os.environ, Path.cwd()).path
    site = read_cluster_site(Catalogue(), install, os.environ)
    return excluded_nodes(text, install, scheduler_of(site), say)
