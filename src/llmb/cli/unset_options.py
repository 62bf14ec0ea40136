# SPDX-License-Identifier: Apache-2.0
"""Saves the time that typer spends on options that have nothing to convert."""

from typing import Any


def skip_unset_options(command: Any) -> None:  # noqa: ANN401 (typer keeps its command types private)
    """Lets options without a value, or with text for a value, pass as they are, in a command or all those of a group.

    typer (0.29) builds a pydantic adapter for every option of a command that runs, also for those that have nothing to
    convert; that is a tenth of the time of ``llmb show``.
    """
    get_params = command.get_params

    def params_of(ctx: Any) -> list[Any]:  # noqa: ANN401
        return skipped_if_unset(get_params(ctx))

    command.get_params = params_of
    for child in getattr(command, "commands", {}).values():
        skip_unset_options(child)


def skipped_if_unset(parameters: list[Any]) -> list[Any]:
    """The same parameters of a command, ``--help`` included."""
    for parameter in parameters:
        if not (parameter.required or parameter.multiple or parameter.nargs != 1):
            _skip_if_unset(parameter)
    return parameters


def _skip_if_unset(parameter: Any) -> None:  # noqa: ANN401
    if "process_value" in vars(parameter):
        return
    convert = parameter.process_value
    is_text = getattr(getattr(parameter, "type_descriptor", None), "annotation", None) is str

    def process_value(ctx: Any, value: Any) -> Any:  # noqa: ANN401
        if value is not None and not (is_text and isinstance(value, str)):
            return convert(ctx, value)
        return parameter.callback(ctx, parameter, value) if parameter.callback else value

    parameter.process_value = process_value
