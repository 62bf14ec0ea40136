# SPDX-License-Identifier: Apache-2.0
"""How data-parallel ranks shard the model. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal, NamedTuple, Self

from llmb.catalogue.records import Layout, Recipe, Record
from llmb.options.option import Option

DpSharding = Literal["full", "optimizer", "none"]
_option = partial(Option, panel="Parallelism")


def shares_parameters(recipe: Recipe) -> bool:
    """Whether several ranks use the same parameters."""
    layout = recipe.layout
    return layout.dp * layout.cp > 1 or (recipe.model.moe is not None and layout.edp > 1)


class Replicas(NamedTuple):
    """The number of replicas of parameters and optimizer state; the ranks of a group hold one replica together."""

    dense: int = 1
    experts: int = 1


class Parallelism(Record):
    """Parallelism options of a run in addition to its layout."""

    dp_sharding: Annotated[
        DpSharding | None,
        _option(
            help="What data-parallel ranks shard: 'full' parameters, gradients and optimizer state (ZeRO-3), "
            "'optimizer' all but the parameters within a step (ZeRO-1), 'none' nothing (DDP). Default: as in the "
            "recipe's document; without one optimizer where it is sure to fit or there is only one rank, else full."
        ),
    ] = None
    """What the ranks of DP x CP shard: parameters, gradients and optimizer state; only gradients and optimizer state;
    or nothing. None means what the published run shards; without one ``full`` or, if there is only one rank,
    ``optimizer``; there is nothing to shard then."""
    dp_shard_size: Annotated[
        int | None,
        _option(help="Shard within groups of N ranks of DP x CP, each group with a replica. Default: one group."),
    ] = None
    """Number of ranks that shard one replica; None means all."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether every rank holds parameters whole."""
        return self.dp_sharding in ("optimizer", "none")

    def replicas(self, layout: Layout) -> Replicas:
        """Replicas of dense parameters over the ranks of DP x CP, and of routed experts over those of EDP.

        With a shard size both have the same number: as in Megatron-LM, a group of neighboring ranks holds one replica.
        """
        replicas = layout.dp * layout.cp
        if self.dp_sharding == "none":
            return Replicas(replicas, layout.edp)
        if self.dp_shard_size is None:
            return Replicas()
        return Replicas(replicas // self.dp_shard_size, replicas // self.dp_shard_size)

    def settled(self, recipe: Recipe) -> Self:
        """With defaults for the options that are not specified."""
        shared = shares_parameters(recipe)
        published = recipe.published_way("parallelism.dp_sharding") if shared and self.dp_shard_size is None else None
        return self.model_copy(
            update={
                "dp_sharding": self.dp_sharding or published or ("full" if shared else "optimizer"),
            }
        )

    def problems(self, layout: Layout) -> Iterator[str]:
        """Why ``layout`` cannot run with these options, with the valid choices."""
        if self.dp_shard_size is not None:
            yield from _shard_size_problems(layout, self.dp_sharding or "full", self.dp_shard_size)
        if layout.pp > 1 and layout.vp == 1 and layout.ga < layout.pp:
            yield f"GA {layout.ga} is below PP {layout.pp}: 1F1B needs a micro-batch for every stage"


def _shard_size_problems(layout: Layout, sharding: DpSharding, size: int) -> Iterator[str]:
    valid = valid_shard_sizes(layout)
    if sharding == "none":
        yield f"--dp-shard-size is {size}, but --dp-sharding none does not shard; choose full or optimizer"
    elif size not in valid:
        ranks = f"DP x CP = {layout.dp} x {layout.cp} = {layout.dp * layout.cp}"
        experts = f" and the number of replicas EDP {layout.edp}" if layout.edp % (layout.dp * layout.cp) else ""
        yield f"--dp-shard-size is {size}; it must divide {ranks}{experts}: valid are {', '.join(map(str, valid))}"


def valid_shard_sizes(layout: Layout) -> list[int]:
    """Divisors of DP x CP; with expert parallelism, those for which the number of replicas divides EDP too."""
    replicas = layout.dp * layout.cp
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return [size for size in divisors if layout.edp % (replicas // size) == 0]
