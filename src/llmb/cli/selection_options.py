# SPDX-License-Identifier: Apache-2.0
"""The options that select the recipes of a campaign."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from llmb.campaigns.entry import Entry, Selection, Values
from llmb.campaigns.words import ALL, count
from llmb.errors import UsageError

_selection = partial(typer.Option, rich_help_panel="Selection")
COMMAND_LINE = "the command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What these options ask for."""

    selection: Selection
    repeats: int | None

    def entry(self, *, add_profile: bool) -> Entry:
        return Entry(where=COMMAND_LINE, selection=self.selection, repeats=self.repeats or 1, add_profile=add_profile)


def selection_options(
    *,
    workload: Annotated[
        str | None,
        _selection(
            "-w", "--workload", help="What is trained, or several with commas; see 'llmb list'. Default: everything."
        ),
    ] = None,
    size: Annotated[
        str | None, _selection("-s", "--size", "--model-size", help="Model size, or several. Default: all.")
    ] = None,
    dtype: Annotated[
        str | None,
        _selection(
            "-d", "--dtype", help="Precision, or several. Default: bf16 of one recipe (fp32 on a CPU), else all."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        _selection(
            "--scale",
            help="Number of GPUs, or several. Default: the smallest of one recipe, else all that are published.",
        ),
    ] = None,
    max_scale: Annotated[
        int | None, _selection("--max-scale", help="All scales up to N, and doublings of the largest.", min=1)
    ] = None,
    min_scale: Annotated[bool, _selection("--min-scale", help="The smallest scale of each recipe.")] = False,
    exact_scales: Annotated[bool, _selection("--exact-scales", help="Published scales, no doublings.")] = False,
    proxy: Annotated[bool, _selection("--proxy", help="Proxies: models of fewer layers, for few GPUs.")] = False,
    repeats: Annotated[
        int | None, _selection("-r", "--repeats", help="Runs of each recipe. Default: 1.", min=1)
    ] = None,
    gpu_type: Annotated[str | None, _selection("--gpu-type", help="GPU type of the catalogue, or cpu.")] = None,
    release: Annotated[
        str | None, _selection("--release", help="Release of the source document. Default: the newest.")
    ] = None,
) -> Asked:
    """Raises UsageError for scales that are no numbers and limits that exclude each other."""
    if scale is not None and (max_scale is not None or min_scale):
        raise UsageError("--scale names the scales; --max-scale and --min-scale choose among them", do="leave one out")
    return Asked(
        selection=Selection(
            workloads=_listed("--workload", workload),
            sizes=_listed("--size", size),
            dtypes=_listed("--dtype", dtype),
            scales=tuple(count("--scale", item) for item in _listed("--scale", scale)),
            max_scale=max_scale,
            min_scale=min_scale,
            exact_scales=exact_scales,
            proxy=proxy,
            everything=ALL in (workload, size, dtype, scale),
            gpu_type=gpu_type,
            release=release,
        ),
        repeats=repeats,
    )


def _listed(option: str, text: str | None) -> Values:
    if text is None or text == ALL:
        return ()
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise UsageError(f"{option} is '{text}'; it must be a name, or names with commas between them")
    return tuple(dict.fromkeys(items))
