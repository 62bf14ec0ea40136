# SPDX-License-Identifier: Apache-2.0
"""Parameters for typer, most of them derived from the options that records declare."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import named_model
from llmb.catalogue.resolve import Request
from llmb.cli import completion
from llmb.errors import UsageError
from llmb.options.option import Option, build, options_of

Maker = Callable[..., Any]
SHORT_PANELS = (None, "Selection")
"""Panels of ``--help``; ``--help-all`` shows all."""
PLACES = ("workload", "size")
"""Options that may also be given by their place."""


def parameter(option: Option, *, envvar: bool = True) -> inspect.Parameter:
    """The typer parameter of an option. Limits are shown, but checked later, with all other problems."""
    info = typer.Option(
        *option.spellings,
        help=option.help,
        rich_help_panel=option.panel,
        envvar=option.envvar if envvar else None,
        metavar=_metavar(option),
        hidden=option.panel not in SHORT_PANELS and not option.basic,
        autocompletion=completion.OPTIONS.get(option.name),
        case_sensitive=False,
    )
    annotation, default = option.annotation, option.default
    if option.repeatable:
        annotation, default = list[str] | None, None
    elif option.listed:
        annotation, default = str | None, None
    elif option.negates:
        annotation, default = bool, False
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


OBVIOUS = ("at least 0", "at least 1")
"""Limits that go without saying."""


def _metavar(option: Option) -> str | None:
    if option.folder:
        return "FOLDER"
    return (
        f"N ({option.limit})" if option.limit and not option.listed and option.limit not in OBVIOUS else option.metavar
    )


def record_options(record: type) -> Maker:
    """A function that makes ``record`` from its options."""
    return _maker(options_of(record).values(), lambda **values: build(record, values))


def value_options(options: Iterable[Option], *, envvar: bool = True) -> Maker:
    """A function that returns the options' values by name; without ``envvar`` it reads no environment variables."""
    return _maker(options, lambda **values: values, envvar=envvar)


def recipe_options() -> Maker:
    """A function that makes a Request; workload and size may be given without their flags."""
    return _by_place(options_of(Request).values(), lambda **values: request_of(values))


def request_of(values: dict[str, Any]) -> Request:
    """Raises UsageError without workload and size, which may be in one word."""
    return build(Request, _completed(values))


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    if _is_complete(values["workload"], values["size"]):
        return values
    return values | dict(zip(PLACES, _model(values["workload"], values["size"]), strict=True))


def model_options() -> Maker:
    """A function that returns workload and size, both of which may be given without their flags."""
    named = options_of(Request)
    options = [named[name] for name in PLACES]
    return _by_place(options, lambda **values: tuple(map(_completed(values).get, PLACES)))


def selection_options(options: Iterable[Option]) -> Maker:
    """A function that returns the values of options that select recipes, whose workload and size may be arguments."""
    return _by_place(options, lambda **values: values)


def _by_place(options: Iterable[Option], make: Maker) -> Maker:
    def maker(**values: Any) -> Any:  # noqa: ANN401 (whatever the options' types are)
        for name in PLACES:
            values[name] = given_once(name, values.pop(f"{name}_argument"), values[name])
        return make(**values)

    flags = [parameter(option) for option in options]
    flags = [flag.replace(default=None) if flag.name in PLACES else flag for flag in flags]
    maker.__signature__ = inspect.Signature([*map(_argument, PLACES), *flags])  # type: ignore[attr-defined]
    return maker


def _argument(name: str) -> inspect.Parameter:
    info = typer.Argument(metavar=name.upper(), help=f"The same as --{name}.", autocompletion=completion.OPTIONS[name])
    return inspect.Parameter(
        f"{name}_argument", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info]
    )


def _is_complete(workload: str | None, size: str | None) -> bool:
    """True if neither is missing, nor the workload may have a size in its name; others need the catalogue."""
    return workload is not None and size is not None and "_" not in workload.partition("_")[2]


def given_once(name: str, placed: str | None, flagged: str | None) -> str | None:
    """The value that was given by place or by flag. Raises UsageError if there are two."""
    if placed and flagged and placed != flagged:
        raise UsageError(f"the {name} has two values: '{placed}' and --{name} {flagged}", do="give one of them")
    return placed or flagged


def _model(name: str | None, size: str | None) -> tuple[str, str]:
    """Workload and size, which may be in one word. Raises UsageError with the names that are possible."""
    catalogue = Catalogue()
    if name is None:
        do = "give it with --workload; see 'llmb list'"
        raise UsageError("the workload is not specified", choices=catalogue.workloads, do=do)
    return named_model(catalogue, name.lower(), size and size.lower())


def _maker(options: Iterable[Option], make: Maker, *, envvar: bool = True) -> Maker:
    def maker(**values: Any) -> Any:  # noqa: ANN401 (whatever the options' types are)
        return make(**values)

    found = [parameter(option, envvar=envvar) for option in options]
    maker.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return maker


def takes(*makers: Maker) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces the first parameters of a command, which are results of makers, by the options of the makers."""

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

        shared = [option for part in parts for option in part]
        parameters = [*shared, *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {option.name: option.annotation for option in parameters}
        return with_options

    return decorate


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command on a recipe."""
    return takes(recipe_options())(command)


def given_of(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options specified on the command line, not by a default or an environment variable."""
    return {
        name: value for name, value in values.items() if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    }
