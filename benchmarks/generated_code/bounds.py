# SPDX-License-Identifier: Apache-2.0
"""The largest figures that are allowed, from bounds.yaml."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from benchmarks.generated_code.records import Case, Document, Layers
from llmb.catalogue.records import Dtype, Record

FILE = Path(__file__).with_name("bounds.yaml")


class Bound(Record):
    """The largest figures of a case; see ``Case`` for their meaning. experts_u: of layers with experts."""

    u: float
    experts_u: float = 0.0
    uncoalesced_stores: float
    uncoalesced_loads: float
    uncoalesced_copies: float
    bytes_per_parameter: float


FIELDS: Mapping[Layers, str] = {"dense": "u", "experts": "experts_u"}
"""The bound of each kind of layers."""
Bounds = dict[str, dict[Dtype, Bound]]


class _File(Record):
    bounds: Bounds


def read_bounds(path: Path = FILE) -> Bounds:
    """By model and dtype."""
    return _File.model_validate(yaml.safe_load(path.read_text())).bounds


def exceeded(document: Document, bounds: Bounds) -> list[str]:
    """What is larger than allowed, one line each. Models without bounds have none."""
    return [problem for case in document.cases for problem in problems(case, bounds)]


def problems(case: Case, bounds: Bounds) -> Iterator[str]:
    bound = bounds.get(case.model, {}).get(case.dtype)
    if bound is None:
        return
    for name, figure in figures(case):
        allowed = float(getattr(bound, name))
        if figure > allowed:
            yield f"{case.model} {case.dtype} on {case.memory.gpu_type}: {name} is {figure:.2f}, allowed {allowed:g}"


def figures(case: Case) -> Iterator[tuple[str, float]]:
    """By the fields of ``Bound``."""
    for block in case.blocks:
        yield FIELDS[block.layers], block.u
        yield "uncoalesced_stores", block.total("uncoalesced_stores")
        yield "uncoalesced_loads", block.total("uncoalesced_loads")
    yield "uncoalesced_copies", case.uncoalesced_copies
    yield "bytes_per_parameter", case.bytes_per_parameter
