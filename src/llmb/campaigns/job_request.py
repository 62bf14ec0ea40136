# SPDX-License-Identifier: Apache-2.0
"""The options of one job, the request that results from them, and the recipes that options select."""

import sys
from collections.abc import Mapping
from typing import Any

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.entry import ALL, Selection, Values
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.resolve import Request
from llmb.errors import UsageError
from llmb.jobspec.options import FrameworkChoices, framework_options
from llmb.options.option import Option, build, limit_problems, options_of
from llmb.options.text import convert
from llmb.runs.choices import Choices
from llmb.schedulers.lookup import all_schedulers, read_job_options
from llmb.site.site import Site


def job_options() -> Mapping[str, Option]:
    """Options of recipe, training, scheduler and framework, by name."""
    return options_of(Request, Choices, *(item.choices for item in all_schedulers()), FrameworkChoices)


def job_request(site: Site, values: Mapping[str, Any], environ: Mapping[str, str]) -> JobRequest:
    """The request that options define; missing ones have their defaults, or the values of the shell's variables.

    Raises UsageError.
    """
    return JobRequest(
        request=build(Request, values),
        choices=build(Choices, values),
        options=read_job_options(site, values, environ, sys.executable),
        framework=framework_options(build(FrameworkChoices, values)),
    )


def converted(texts: Mapping[str, Values]) -> dict[str, Any]:
    """Converts the values of options from text. Raises UsageError with all problems."""
    found, problems = {}, list[str]()
    for name, values in texts.items():
        try:
            found[name] = convert(_known(name), name, values)
        except UsageError as error:
            problems.append(error.what)
    if problems:
        raise UsageError("; ".join(problems))
    return found


def _known(name: str) -> Option:
    if name not in job_options():
        raise UsageError(f"this llmb has no option '{name}'")
    return job_options()[name]


def selection_of(values: Mapping[str, Any]) -> Selection:
    """The selection of options; values of lists are separated by commas. Raises UsageError."""
    fields: dict[str, Any] = {}
    for name, option in options_of(Selection).items():
        value = values.get(name)
        if option.listed and value is not None:
            fields["everything"] = fields.get("everything", False) or value == ALL
            fields[option.field] = convert(option, option.spelled, _items(option.spelled, value))
        elif value is not None:
            fields[option.field] = option.value(value)
    selection = Selection(**fields)
    if problems := list(limit_problems(selection)):
        raise UsageError("\n".join(problems))
    if selection.scales and (selection.max_scale is not None or selection.min_scale):
        raise UsageError(
            "--scale names the scales; --max-scale and --min-scale choose among them", do="remove one of them"
        )
    return selection


def single_model(catalogue: Catalogue, selection: Selection, repeats: int) -> tuple[str, str] | None:
    """Workload and size if the selection is one job, not a campaign. Raises UsageError for an unknown name."""
    if not selection.names_one or repeats != 1:
        return None
    workload, own_size = split_model(catalogue, selection.workloads[0])
    sizes = (own_size, *selection.sizes) if own_size else selection.sizes
    return (workload, sizes[0]) if len(sizes) == 1 else None


def _items(option: str, text: str) -> Values:
    if text == ALL:
        return ()
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise UsageError(f"{option} is '{text}'; it must be a name, or names separated by commas")
    return tuple(dict.fromkeys(items))
