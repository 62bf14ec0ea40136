# SPDX-License-Identifier: Apache-2.0
"""From what was found in a step to the figures of a case. Pure."""

from collections import Counter
from collections.abc import Iterable

from benchmarks.generated_code.capture import Graph
from benchmarks.generated_code.capture import Kernel as Launch
from benchmarks.generated_code.records import Block, Case, Direction, Kernel, Memory, Pass
from benchmarks.generated_code.step import Found

BLOCKS = "model/decoder."
"""Compiled code of blocks is called from here."""
SMALL = 0.01
"""Fraction of a hidden state, and bytes per parameter, below which an access does not matter."""
ACTIVATIONS = ("model/",)
ACCUMULATING = ("add_", "_foreach_add_", "addmm", "addmm_")


def case_of(found: Found, name: str, gpu_type: str) -> Case:
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
        block=block_of(found, unit),
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
        graph.accumulated_bytes * found.calls.get((graph.number, graph.backward), Counter()).total()
        for graph in found.graphs
    )
    return by_products + sum(
        size
        for place, size in found.per_micro_batch.items()
        if place.operator in ACCUMULATING and not place.function.startswith(ACTIVATIONS)
    )


def block_of(found: Found, unit: int) -> Block:
    """The mean over all layers."""
    numbers = {
        number
        for (number, backward), places in found.calls.items()
        if not backward and any(place.startswith(BLOCKS) for place in places)
    }

    def of(direction: Direction) -> Pass:
        chosen = [
            (graph, found.calls.get((graph.number, graph.backward), Counter()).total())
            for graph in found.graphs
            if graph.number in numbers and graph.backward == (direction == "backward")
        ]
        return pass_of(chosen, unit, found.recipe.model.layers)

    return Block(forward=of("forward"), backward=of("backward"))


def pass_of(graphs: Iterable[tuple[Graph, int]], unit: int, layers: int) -> Pass:
    called = [(graph, calls / layers) for graph, calls in graphs if calls]
    kernels = [(kernel_of(launch, unit), share) for graph, share in called for launch in graph.kernels]
    return Pass(
        u=sum(kernel.u * share for kernel, share in kernels),
        kernels=sum(share for _, share in kernels),
        products=sum(graph.products * share for graph, share in called),
        attentions=sum(graph.attentions * share for graph, share in called),
        uncoalesced_stores=sum(kernel.uncoalesced_stores * share for kernel, share in kernels),
        uncoalesced_loads=sum(kernel.uncoalesced_loads * share for kernel, share in kernels),
        list=tuple(kernel for kernel, _ in kernels),
    )


def kernel_of(launch: Launch, unit: int) -> Kernel:
    bad = [access.direction for access in launch.uncoalesced if access.bytes >= SMALL * unit]
    return Kernel(
        name=launch.name,
        u=launch.bytes / unit,
        ours=launch.ours,
        uncoalesced_stores=bad.count("store"),
        uncoalesced_loads=bad.count("load"),
    )
