# SPDX-License-Identifier: Apache-2.0
"""The selection of the command line: one job or a campaign."""

from collections.abc import Mapping
from typing import Any

from llmb.campaigns.entry import Selection, Values
from llmb.campaigns.keys import ALL
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.errors import UsageError
from llmb.options.option import limit_problems, options_of
from llmb.options.text import convert


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
