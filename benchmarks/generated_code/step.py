# SPDX-License-Identifier: Apache-2.0
"""The engine's own training step of a one-GPU recipe, alone or on one of several ranks, with fake tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers what collectives do with fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.generated_code.capture import Graph, Recorder
from benchmarks.generated_code.launches import not_launching
from benchmarks.generated_code.pretend import GPU, fake_tensors, on_the_host, replace
from benchmarks.generated_code.records import Direction
from benchmarks.generated_code.traffic import Between, Owner, Place, Traffic, Use, calling_owner, following_resizes
from llmb.catalogue.records import Recipe
from llmb.engine import loop
from llmb.engine.data.batches import MicroBatch
from llmb.engine.data.steps import Figures, StepData
from llmb.engine.model.decoder import MoEBlock
from llmb.engine.model.moe import Routed
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel import pipeline
from llmb.engine.parallel.mesh import arrange
from llmb.engine.precision import experts
from llmb.engine.precision.experts import expert_products, expert_weight_gradients
from llmb.runs.choices import Choices
from llmb.runs.parallelism import Parallelism
from llmb.runs.plan import EnginePlan, make_plan

MICRO_BATCHES = 3
"""One more than the typical one."""


@dataclass(frozen=True, slots=True)
class Found:
    """calls: of each graph in a micro-batch. owners: by number. per_step, per_micro_batch: bytes outside of
    compiled code; those of a step that do not grow with its micro-batches, and those of each further micro-batch.
    experts: outside of compiled code, in a micro-batch."""

    graphs: list[Graph]
    calls: Mapping[tuple[int, bool], int]
    owners: Mapping[int, Owner]
    per_step: Mapping[Place, int]
    per_micro_batch: Mapping[Place, int]
    peak: Use
    uncoalesced_copies: int
    experts: Mapping[Direction, Between]
    parameters: int
    recipe: Recipe


def run_step(recipe: Recipe, gpus: int = 1) -> Found:
    """Compiles, and counts in a second step. ``pretend_gpu`` must have been called; works once in a process.

    gpus: data-parallel ranks, which share the optimizer's work; the others are not there.
    """
    short, plan = planned(recipe, 1, gpus), planned(recipe, MICRO_BATCHES, gpus)
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    layout = plan.recipe.layout
    ranks = arrange(0, GPU, layout, plan.parallelism.replicas(layout))
    recorder, traffic = Recorder(), Traffic()
    calls: Counter[tuple[int, bool]] = Counter()
    owners: dict[int, Owner] = {}

    def enter(graph: Graph) -> None:
        calls[graph.number, graph.backward] += 1
        if not graph.backward:
            owners[graph.number] = calling_owner()
        traffic.enter(graph)

    with ExitStack() as stack:
        for context in (engine_without_data(traffic), recorder.recording(), not_launching(traffic.launch)):
            stack.enter_context(context)
        mode = stack.enter_context(fake_tensors())
        with on_the_host(mode):
            stages = loop.prepare_stages(plan, ranks)
            optimizers = [build_optimizer(stage, recipe.training) for stage in stages]
        loop.do_step(0, short, loop.build_passes(stages, short, ranks), optimizers, NoData(short), ranks)
        # Everything is compiled, and the optimizers have their state.
        recorder.enter, recorder.leave = enter, traffic.leave
        traffic.counts = True
        traffic.marks.clear()
        traffic.keep("parameters", [list(stage.parameters()) for stage in stages])
        traffic.keep("masters", [stage.masters for stage in stages])
        traffic.keep("state of the optimizer", optimizers)
        traffic.keep("other state", stages)
        stack.enter_context(traffic)
        stack.enter_context(following_resizes(traffic))
        loop.do_step(1, plan, loop.build_passes(stages, plan, ranks), optimizers, NoData(plan), ranks)
    _, second, third, _ = traffic.marks
    each = third - second
    return Found(
        recorder.graphs,
        {graph: count // MICRO_BATCHES for graph, count in calls.items()},
        owners,
        dict(traffic.bytes - Counter({place: MICRO_BATCHES * size for place, size in each.items()})),
        each,
        traffic.peak,
        traffic.uncoalesced_copies,
        traffic.experts,
        sum(parameter.numel() for stage in stages for parameter in stage.own_parameters()),
        recipe,
    )


def planned(recipe: Recipe, micro_batches: int, gpus: int) -> EnginePlan:
    layout = recipe.layout.model_copy(update={"gbs": gpus * recipe.layout.mbs * micro_batches, "gpus": gpus})
    # The host then knows how many rows each expert gets, and does not ask the device.
    balanced, parallelism = recipe.model.moe is not None, Parallelism(dp_sharding="optimizer")
    choices = Choices(steps=2, window="all", force_load_balancing=balanced, parallelism=parallelism)
    return make_plan(recipe.model_copy(update={"layout": layout, "packing": None}), choices, device="cuda")


@contextmanager
def engine_without_data(traffic: Traffic) -> Iterator[None]:
    """Parameters have no values to set, and batches are on the device already. Meshes hold numbers of ranks."""
    build = pipeline.build_stages
    flatten = DeviceMesh._flatten

    def on_host(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return flatten(*args, **named)

    def on_meta(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily(), torch.device("meta"):
            return build(*args, **named)

    replace(DeviceMesh, "_flatten", on_host)
    replace(loop, "build_stages", on_meta)
    replace(loop, "initialize", lambda *_args, **_named: None)
    replace(loop, "on_device", lambda batches, _device: marking(batches, traffic))
    replace(MoEBlock, "run_experts", noting(MoEBlock.run_experts, traffic))
    # Not as operators, so that the product of each expert is seen, and any copy of its operands.
    for operator in (expert_products, expert_weight_gradients):
        replace(experts, operator._init_fn.__name__, operator._init_fn)
    yield


def noting(run_experts: Callable[[MoEBlock, Routed], Tensor], traffic: Traffic) -> Callable[[MoEBlock, Routed], Tensor]:
    """Says when routed experts begin and end, forward and backward."""

    def become(direction: Direction | None) -> Callable[[object], None]:
        return lambda _gradient: setattr(traffic, "within", direction)

    def noted(block: MoEBlock, routed: Routed) -> Tensor:
        traffic.within = "forward"
        outputs = run_experts(block, routed)
        traffic.within = None
        outputs.register_hook(become("backward"))
        routed.rows.register_hook(become(None))
        return outputs

    return noted


def marking(batches: Iterable[MicroBatch], traffic: Traffic) -> Iterator[MicroBatch]:
    """Marks the beginning of each micro-batch, and the end of the last."""
    for batch in batches:
        traffic.mark()
        yield batch
    traffic.mark()


class NoData:
    """Micro-batches of the right shape."""

    def __init__(self, plan: EnginePlan) -> None:
        self.layout = plan.recipe.layout

    def step(self, number: int) -> StepData:  # noqa: ARG002 (every step has the same)
        shape = (self.layout.mbs, self.layout.seq_len)
        tokens, labels = (torch.empty(shape, dtype=torch.int64, device=GPU) for _ in range(2))
        batches = [MicroBatch(tokens, labels, None)] * self.layout.ga
        return StepData(Figures(self.layout.ga * self.layout.mbs * self.layout.seq_len, 1, 0, 0), batches)
