# SPDX-License-Identifier: Apache-2.0
"""From what was found in a step to the figures of a case. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.generated_code.kernels import Kernel as Launch
from benchmarks.generated_code.records import Block, Case, Direction, Kernel, Layers, Memory, Pass
from benchmarks.generated_code.step import Found
from benchmarks.generated_code.traffic import Owner, accumulates

OWNERS: Mapping[Layers, tuple[Owner, ...]] = {"dense": ("dense",), "experts": ("experts", "routed")}
SMALL = 0.01
"""Fraction of a hidden state, and bytes per parameter, below which an access does not matter."""


class Scale(NamedTuple):
    """unit: bytes of a hidden state. cache_bytes: of the GPU's L2 cache."""

    unit: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Ran:
    """Code that ran in a pass of one layer, on average. kernels: how often each. routed: by routed experts."""

    kernels: Sequence[tuple[Launch, float]]
    products: float
    attentions: float
    routed: bool


def case_of(found: Found, name: str, gpu_type: str, cache_bytes: int) -> Case:
    recipe, layout = found.recipe, found.recipe.layout
    unit = layout.mbs * layout.seq_len * recipe.model.hidden_size * 2
    per_parameter = {place: size / found.parameters for place, size in found.per_step.items()}
    by: dict[str, float] = {}
    for place, size in per_parameter.items():
        if size >= SMALL:
            by[f"{place.function} {place.operator}"] = size
    return Case(
        model=name,
        dtype=recipe.dtype,
        hidden_state_bytes=unit,
        blocks=tuple(blocks_of(found, Scale(unit, cache_bytes))),
        bytes_per_parameter=sum(by.values()),
        bytes_per_parameter_by=dict(sorted(by.items(), key=lambda each: -each[1])),
        accumulation_bytes_per_parameter=accumulation(found) / found.parameters,
        uncoalesced_copies=found.uncoalesced_copies / recipe.model.layers,
        memory=Memory(
            gpu_type=gpu_type,
            layers=recipe.model.layers,
            parameters=found.parameters,
            peak_gb=found.peak.bytes / 1e9,
            by_gb={place: size / 1e9 for place, size in Counter(found.peak.by).most_common() if size >= 1e8},
        ),
    )


def accumulation(found: Found) -> int:
    """By autograd or FSDP, and by products."""
    by_products = sum(
        graph.accumulated_bytes * found.calls.get((graph.number, graph.backward), 0) for graph in found.graphs
    )
    return by_products + sum(size for place, size in found.per_micro_batch.items() if accumulates(place))


def blocks_of(found: Found, scale: Scale) -> Iterator[Block]:
    """The mean over all layers of each kind that the model has."""
    model = found.recipe.model
    with_experts = sum(model.is_moe_layer(layer) for layer in range(model.layers))
    counts: dict[Layers, int] = {"dense": model.layers - with_experts, "experts": with_experts}
    for layers, count in counts.items():
        if count:
            forward, backward = (tuple(ran_in(found, layers, way, count)) for way in ("forward", "backward"))
            yield Block(
                layers=layers,
                forward=pass_of(forward, scale),
                backward=pass_of(backward, scale),
                routed_u=pass_of([each for each in (*forward, *backward) if each.routed], scale).u,
            )


def ran_in(found: Found, layers: Layers, direction: Direction, count: int) -> Iterator[Ran]:
    """``count``: of such layers."""
    for graph in found.graphs:
        calls = found.calls.get((graph.number, graph.backward), 0) / count
        owner = found.owners.get(graph.number)
        if calls and owner in OWNERS[layers] and graph.backward == (direction == "backward"):
            kernels = [(kernel, calls) for kernel in graph.kernels]
            yield Ran(kernels, graph.products * calls, graph.attentions * calls, owner == "routed")
    if layers == "experts":
        between = found.experts[direction]
        kernels = [(kernel, calls / count) for kernel, calls in between.kernels.items()]
        yield Ran(kernels, between.products / count, 0, routed=True)


def pass_of(parts: Sequence[Ran], scale: Scale) -> Pass:
    kernels = [(kernel_of(launch, scale), calls) for part in parts for launch, calls in part.kernels]
    return Pass(
        u=sum(kernel.u * calls for kernel, calls in kernels),
        cached_u=sum(kernel.cached_u * calls for kernel, calls in kernels),
        in_flight_mb=max((kernel.in_flight_mb for kernel, _ in kernels), default=0.0),
        kernels=sum(calls for _, calls in kernels),
        products=sum(part.products for part in parts),
        attentions=sum(part.attentions for part in parts),
        uncoalesced_stores=sum(kernel.uncoalesced_stores * calls for kernel, calls in kernels),
        uncoalesced_loads=sum(kernel.uncoalesced_loads * calls for kernel, calls in kernels),
        list=tuple(kernel for kernel, _ in kernels),
    )


def kernel_of(launch: Launch, scale: Scale) -> Kernel:
    bad = [access.direction for access in launch.uncoalesced if access.bytes >= SMALL * scale.unit]
    cached = launch.repeated if launch.in_flight <= scale.cache_bytes else 0
    return Kernel(
        name=launch.name,
        u=(launch.bytes + launch.repeated - cached) / scale.unit,
        cached_u=cached / scale.unit,
        in_flight_mb=launch.in_flight / 1e6,
        ours=launch.ours,
        uncoalesced_stores=bad.count("store"),
        uncoalesced_loads=bad.count("load"),
    )
