# SPDX-License-Identifier: Apache-2.0
"""How ranks with the same parameters share them out. Pure."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from llmb.catalogue.records import Layout, Record

DpSharding = Literal["full", "optimizer", "none"]


class Copies(NamedTuple):
    """How many groups of ranks keep parameters and optimizer state, each group all of them."""

    dense: int = 1
    experts: int = 1


class Parallelism(Record):
    """What a run chooses beside its layout."""

    dp_sharding: DpSharding = "full"
    """What the ranks of DP x CP share out: parameters, gradients and optimizer state, or those but for the parameters
    within a step, or nothing."""
    dp_shard_size: int | None = None
    """Ranks that share one copy out; null for all."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay whole on every rank through a step."""
        return self.dp_sharding != "full"

    def copies(self, layout: Layout) -> Copies:
        """Copies of dense parameters over the ranks of DP x CP, and of routed experts over those of EDP.

        With a shard size both have as many: as in Megatron-LM, a group of neighbours keeps one copy of everything.
        """
        replicas = layout.dp * layout.cp
        if self.dp_sharding == "none":
            return Copies(replicas, layout.edp)
        if self.dp_shard_size is None:
            return Copies()
        return Copies(replicas // self.dp_shard_size, replicas // self.dp_shard_size)

    def problems(self, layout: Layout) -> Iterator[str]:
        """Why ``layout`` cannot run this way, with the valid choices."""
        if self.dp_shard_size is not None:
            yield from _shard_size_problems(layout, self.dp_sharding, self.dp_shard_size)


def _shard_size_problems(layout: Layout, sharding: DpSharding, size: int) -> Iterator[str]:
    valid = valid_shard_sizes(layout)
    if sharding == "none":
        yield f"--dp-shard-size is {size}, but --dp-sharding none shares nothing out; choose full or optimizer"
    elif size not in valid:
        ranks = f"DP x CP = {layout.dp} x {layout.cp} = {layout.dp * layout.cp}"
        experts = f", the copies EDP {layout.edp}" if layout.edp % (layout.dp * layout.cp) else ""
        yield f"--dp-shard-size is {size}; it must divide {ranks}{experts}: valid are {', '.join(map(str, valid))}"


def valid_shard_sizes(layout: Layout) -> list[int]:
    """Divisors of DP x CP; where experts are spread out, those whose number of copies divides EDP too."""
    replicas = layout.dp * layout.cp
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return [size for size in divisors if layout.edp % (replicas // size) == 0]
