# SPDX-License-Identifier: Apache-2.0
"""Parameters for typer, derived from the options that records declare."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from llmb.catalogue.resolve import Request
from llmb.options.option import Option, made, options_of

Maker = Callable[..., Any]


def parameter(option: Option, *, envvar: bool = True) -> inspect.Parameter:
    """The typer parameter of an option. Limits are shown, but checked later, with all other problems."""
    info = typer.Option(
        *option.spellings,
        help=option.help,
        rich_help_panel=option.panel,
        envvar=option.envvar if envvar else None,
        metavar=_metavar(option),
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


def _metavar(option: Option) -> str | None:
    if option.folder:
        return "FOLDER"
    if option.limit and not option.listed:
        return f"<{option.type.__name__}, {option.limit}>"
    return option.metavar


def record_options(record: type) -> Maker:
    """A function that makes ``record`` from its options."""
    return _maker(options_of(record).values(), lambda **values: made(record, values))


def value_options(options: Iterable[Option], *, envvar: bool = True) -> Maker:
    """A function that returns the options' values by name; without ``envvar`` it reads no environment variables."""
    return _maker(options, lambda **values: values, envvar=envvar)


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
    return takes(record_options(Request))(command)


def given_of(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options specified on the command line, not by a default or an environment variable."""
    return {
        name: value for name, value in values.items() if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    }
