# SPDX-License-Identifier: Apache-2.0
"""The options that decide one job, as a campaign file or an environment variable gives them: by name, as text."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.models import OptionInfo

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.entry import Values
from llmb.campaigns.words import Words, single
from llmb.catalogue.variables import FLAGS, Variable
from llmb.cli.framework_options import framework_options
from llmb.cli.options import recipe_options
from llmb.cli.slurm_options import slurm_options
from llmb.cli.training_options import training_options
from llmb.errors import UsageError

Maker = Callable[..., Any]
SELECTING = ("workload", "size", "dtype", "scale", "gpu_type", "release")
"""Options that name a recipe."""
_MAKERS: tuple[Maker, ...] = (recipe_options, training_options, slurm_options, framework_options)
_NUMBERS: Mapping[type, tuple[re.Pattern[str], str]] = {
    int: (re.compile(r"-?\d{1,12}", re.ASCII), "a whole number"),
    float: (re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", re.ASCII | re.IGNORECASE), "a number"),
}


def parameters() -> dict[str, inspect.Parameter]:
    """The options of one job, by name."""
    return {name: option for maker in _MAKERS for name, option in inspect.signature(maker).parameters.items()}


def job_words(variables: Sequence[Variable]) -> Words:
    """The keys of campaign files: each option by its parameter's name, and as the command line spells it."""
    options: dict[str, str] = {}
    for name, parameter in parameters().items():
        if name not in SELECTING:
            options.update({spelled.lstrip("-").replace("-", "_"): name for spelled in _spellings(parameter)})
            options[name] = name
    repeatable = frozenset(name for name, parameter in parameters().items() if _type_of(parameter) is list)
    return Words(options=options, repeatable=repeatable, variables=variables)


def option_name(name: str) -> str:
    """As the command line spells an option."""
    known = parameters()
    return _spellings(known[name])[-1] if name in known else f"--{name.replace('_', '-')}"


def converted(name: str, values: Values) -> object:
    """What the command line would make of ``values``. Raises UsageError."""
    known = parameters()
    if name not in known:
        raise UsageError(f"this llmb has no option '{name}'")
    parameter = known[name]
    wanted = _type_of(parameter)
    if wanted is list:
        return list(values)
    text = single(name, values)
    if wanted is bool:
        if text.lower() not in FLAGS:
            raise UsageError(f"{name} is '{text}'; it must be true or false")
        return FLAGS[text.lower()]
    if wanted in _NUMBERS:
        form, valid = _NUMBERS[wanted]
        if not form.fullmatch(text):
            raise UsageError(f"{name} is '{text}'; it must be {valid}")
        lowest = _info(parameter).min
        if lowest is not None and float(text) < lowest:
            raise UsageError(f"{name} is '{text}'; it must be at least {lowest:g}")
        return wanted(text)
    choices = get_args(wanted) if get_origin(wanted) is Literal else ()
    if choices and text not in choices:
        raise UsageError(f"{name} is '{text}'", choices=choices)
    return text


def job_request(options: Mapping[str, Any]) -> JobRequest:
    """What a job's options ask for; those that are left out have their defaults. Raises UsageError."""
    made = []
    for maker in _MAKERS:
        own = inspect.signature(maker).parameters
        given = {name: options.get(name, option.default) for name, option in own.items()}
        made.append(maker(**given))
    request, choices, slurm, framework = made
    return JobRequest(request=request, choices=choices, options=slurm, framework=framework)


def values_of(*makers: Maker, without: Sequence[str] = (), plain: bool = False) -> Callable[..., dict[str, Any]]:
    """A maker with the options of ``makers`` that gives their values by name. ``plain`` ones heed no variable."""
    found = [
        _without_variable(parameter) if plain else parameter
        for maker in makers
        for name, parameter in inspect.signature(maker).parameters.items()
        if name not in without
    ]

    def values(**given: Any) -> dict[str, Any]:  # noqa: ANN401 (whatever the options' types are)
        return given

    values.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return values


def _without_variable(parameter: inspect.Parameter) -> inspect.Parameter:
    info = copy(_info(parameter))
    info.envvar = None
    return parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], info])


def _info(parameter: inspect.Parameter) -> OptionInfo:
    return next(item for item in parameter.annotation.__metadata__ if isinstance(item, OptionInfo))


def _spellings(parameter: inspect.Parameter) -> list[str]:
    info = _info(parameter)
    written = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str) and text[:1] == "-"]
    # Of a pair such as --compile/--no-compile the first is the option, and false the other.
    return [text.partition("/")[0] for text in written] or [f"--{parameter.name.replace('_', '-')}"]


def _type_of(parameter: inspect.Parameter) -> Any:  # noqa: ANN401
    """Without null, which stands for none given, and of a list only that it is one."""
    wanted = get_args(parameter.annotation)[0]
    if get_origin(wanted) in (Union, UnionType):
        (wanted,) = (item for item in get_args(wanted) if item is not NoneType)
    return list if get_origin(wanted) is list else wanted


JOB = values_of(*_MAKERS, without=SELECTING)
"""The options of one job but for those that name its recipe."""


def given_of(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that the command line has, and no default or variable of the shell."""
    return {
        name: value for name, value in values.items() if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    }
