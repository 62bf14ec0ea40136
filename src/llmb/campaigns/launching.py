# SPDX-License-Identifier: Apache-2.0
"""The job that the reference suite's environment variables describe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmb.campaigns.job_request import job_options
from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.resolve import find_workload, releases_of, sizes_of
from llmb.catalogue.variables import read_variables
from llmb.errors import UsageError


@dataclass(frozen=True, slots=True)
class Launch:
    """``values`` are those of a job's options; ``notes`` list ignored variables with reasons."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]


def read_launch(
    catalogue: Catalogue, environ: Mapping[str, str], model: str, values: Mapping[str, Any], given: Mapping[str, Any]
) -> Launch:
    """The job of a launch of ``model``, a workload or a workload and a size.

    ``values`` are the command line's options with their defaults, ``given`` those specified there, which override the
    variables. Raises UsageError.
    """
    workload, own_size = split_model(catalogue, model)
    size = given.get("size") or own_size
    strongest = {**given, "workload": workload, **({"size": size} if size else {})}
    framework = bool(values.get("framework"))
    reading = read_variables(catalogue.variables, environ, workload, job_options(), strongest, framework=framework)
    found = {**values, **reading.options, **strongest}
    found["size"] = found.get("size") or _only_size(catalogue, workload)
    if found.get("scale") is None and found.get("nodes") is None:
        raise UsageError("the number of GPUs is not specified", do="set JOB_TOTAL_GPUS, or give --scale or --nodes")
    notes = list(reading.notes)
    if release := _other_release(catalogue, found, reading.origins):
        found["release"] = release
        newest = releases_of(find_workload(catalogue, workload), found["size"])[-1]
        notes.append(f"release {release}, whose document counts the GPUs this way; --release {newest} is the newest")
    return Launch(found, tuple(notes))


def _other_release(catalogue: Catalogue, found: Mapping[str, Any], origins: Mapping[str, str]) -> str | None:
    """The release of the only documents that define the number of GPUs as this launch does, unless it is the newest."""
    option = "nodes" if found.get("nodes") is not None else "scale"
    counted = [
        item for item in catalogue.variables if item.option == option and item.name == origins.get(option, item.name)
    ]
    releases = releases_of(find_workload(catalogue, found["workload"]), found["size"])
    own = [release for release in releases if any(release in item.releases for item in counted)]
    return own[-1] if own and own[-1] != releases[-1] and found.get("release") is None else None


def _only_size(catalogue: Catalogue, name: str) -> str:
    """The size, if the documents have only one. Raises UsageError."""
    workload = find_workload(catalogue, name)
    sizes = [size for size in sizes_of(workload) if releases_of(workload, size)]
    if len(sizes) != 1:
        raise UsageError(f"the size of {name} is not specified", choices=sizes, do="set MODEL_SIZE, or give --size")
    return sizes[0]
