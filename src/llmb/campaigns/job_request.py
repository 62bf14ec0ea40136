# SPDX-License-Identifier: Apache-2.0
"""The options of one job, and the request that results from them."""

import sys
from collections.abc import Mapping
from typing import Any

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.entry import Values
from llmb.catalogue.resolve import Request
from llmb.errors import UsageError
from llmb.jobspec.options import FrameworkChoices, framework_options
from llmb.options.option import Option, made, options_of
from llmb.options.text import convert
from llmb.runs.choices import Choices
from llmb.schedulers.lookup import QUEUE, find_scheduler


def job_options() -> Mapping[str, Option]:
    """Options of recipe, training, scheduler and framework, by name."""
    return options_of(Request, Choices, find_scheduler(QUEUE).choices, FrameworkChoices)


def job_request(values: Mapping[str, Any], environ: Mapping[str, str]) -> JobRequest:
    """The request that options define; missing ones have their defaults, or the values of the shell's variables.

    Raises UsageError.
    """
    return JobRequest(
        request=made(Request, values),
        choices=made(Choices, values),
        options=find_scheduler(QUEUE).asked(values, environ, sys.executable),
        framework=framework_options(made(FrameworkChoices, values)),
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
