# SPDX-License-Identifier: Apache-2.0
"""Which process groups a rank has. Each of them would have a communicator that takes memory of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from llmb.catalogue.catalogue import Catalogue, layout_of
from llmb.catalogue.records import Layout
from llmb.engine.data.batches import rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import add_gradients, do_step
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.mesh import DIMENSIONS, EXPERT_DIMENSIONS, Ranks, arrange, as_one
from llmb.engine.parallel.pipeline import build_passes, connect_lanes, lane
from llmb.engine.stages import prepare_stages
from llmb.launch.programs.engine.program import count_streams, shipped_variables
from llmb.runs.choices import Replicas
from llmb.runs.plan import Plan

CPU = torch.device("cpu")


@contextmanager
def fake_rank(layout: Layout, *, rank: int = 0, experts: bool = False) -> Iterator[Ranks]:
    """One of the ranks of a layout, without the others."""
    _clear_sharding_prop_cache()  # of meshes of ranks before this one
    dist.init_process_group("fake", rank=rank, world_size=layout.gpus, store=FakeStore())
    yield arrange(rank, CPU, layout, Replicas(), experts=experts)
    dist.destroy_process_group()


def groups() -> list[tuple[int, ...]]:
    """The ranks of each group that this process is in."""
    return [tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map]


def published() -> dict[str, tuple[Layout, bool]]:
    """Every published arrangement of ranks with two data-parallel replicas at most, and whether there are experts."""
    catalogue, found = Catalogue(), {}
    for workload in catalogue.workloads.values():
        for table in (one for one in workload.layouts if one.document in (None, *catalogue.published)):
            experts = catalogue.models[workload.model, table.size].moe is not None
            for row in table.rows:
                layout = layout_of(table, row)
                few = max(layout.tp * layout.pp * layout.cp * min(layout.dp, 2), layout.pp * layout.ep * layout.etp)
                layout = layout.model_copy(update={"gpus": few})
                sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp", "ep", "etp", "vp")}
                name = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"
                found[f"{name}{' experts' if experts else ''}"] = layout, experts
    return found


PUBLISHED = published()


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_group_is_made_twice_and_one_at_most_has_one_rank(name: str) -> None:
    layout, experts = PUBLISHED[name]
    with fake_rank(layout, rank=layout.gpus - 1, experts=experts) as ranks:
        as_one(ranks.mesh, "dp", "cp", "tp")  # of scales in FP8
        made = groups()
        assert len(set(made)) == len(made)
        assert len(made) <= (9 if experts else 8)
        assert sum(len(group) == 1 for group in made) <= 1
        if layout.pp > 1:
            connect_lanes(layout, ranks.mesh["pp"])
            pipelines = len(groups()) - len(made)
            assert pipelines == (0 if layout.pp * layout.vp == 2 else 1 if layout.vp == 1 else 3 + 2 * (layout.pp % 2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_meshes_have_the_ranks_of_the_layout(name: str) -> None:
    """With consecutive ranks in the dimensions that communicate most."""
    layout, experts = PUBLISHED[name]
    rank = layout.gpus - 1
    with fake_rank(layout, rank=rank, experts=experts) as ranks:
        for mesh, names in ((ranks.mesh, DIMENSIONS), (ranks.expert_mesh, EXPERT_DIMENSIONS)):
            numbers = torch.arange(layout.gpus).view(*(mesh[name].size() for name in names))
            for dim, name in enumerate(names):
                if experts or mesh is ranks.mesh:
                    assert mesh[name].size() == getattr(layout, name)
                expected = numbers.movedim(dim, -1).reshape(-1, numbers.shape[dim])[-1].tolist()
                assert mesh[name].mesh.tolist() == expected
                assert dist.get_process_group_ranks(mesh.get_group(name)) == expected
        both = numbers_of(layout)[-1].movedim(-1, 0)[-1].flatten().tolist()
        assert ranks.fsdp.mesh.tolist() == dist.get_process_group_ranks(ranks.fsdp.get_group()) == both


def numbers_of(layout: Layout) -> torch.Tensor:
    return torch.arange(layout.gpus).view(layout.pp, layout.dp, layout.cp, layout.tp)


@pytest.mark.parametrize("vp", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_a_rank_sends_and_receives_on_different_lanes(ranks: int, vp: int) -> None:
    for rank in range(ranks):
        stages = range(rank, ranks * vp, ranks)
        sent = {lane(stage, ranks) for stage in stages if stage < ranks * vp - 1}
        received = {lane(stage - 1, ranks) for stage in stages if stage > 0}
        assert not sent & received


class Communication(TorchDispatchMode):
    """What uses the stream of a group's communicator in a step, by group: all but synchronous collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | (kwargs or {})
        if function.namespace == "c10d" and named.get("asyncOp", named.get("async_op", True)):
            group = dist.ProcessGroup.unbox(named["process_group"]).group_name
        else:
            group = named.get("group_name")
        if group is not None:
            self.found.setdefault(group, set()).add(function._schema.name.partition("::")[2].rstrip("_"))
        return function(*args, **(kwargs or {}))


def be_static(_schedule: _PipelineSchedule, stages: list[Any], *_: object) -> None:
    """In the place of a vote, in which nobody else takes part; torch 2.11 has none."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@pytest.mark.parametrize("rank", range(4))
def test_an_interleaved_pipeline_sends_and_receives_in_different_groups(
    rank: int, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_PipelineSchedule, "_warmup_p2p", be_static, raising=False)
    plan = tiny_plan(scale=4, overrides={"pp": 4, "vp": 2, "layers": 8, "gbs": 8})
    with fake_rank(plan.recipe.layout, rank=rank) as ranks, Communication() as communication:
        stages = prepare_stages(plan, ranks)
        source = rank_data(build_data(plan), plan, ranks, varlen=False)
        add_gradients(build_passes(stages, plan, ranks), plan, source.step(0), 0, ranks)
    assert len(communication.found) == 4
    assert all(kinds in ({"send"}, {"recv"}) for kinds in communication.found.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rank_has_a_hardware_queue_for_each_stream(
    name: str, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step of a tiny model with the same kinds of groups."""
    monkeypatch.setattr(_PipelineSchedule, "_warmup_p2p", be_static, raising=False)
    layout, experts = PUBLISHED[name]
    dims = ("tp", "pp", "cp", "vp", *(("ep", "etp") if experts else ()))
    sizes = {dim: min(getattr(layout, dim), 4 - layout.pp % 2 if dim == "pp" else 2) for dim in dims}
    dp = min(layout.dp, 2)
    overrides = {**sizes, "layers": 2 * sizes["pp"] * sizes["vp"], "gbs": dp * sizes["pp"]}
    workload = "finetune_llama4-maverick" if experts else "pretrain_llama3.1"
    scale = sizes["tp"] * sizes["pp"] * sizes["cp"] * dp
    plan = tiny_plan(workload, scale, overrides=overrides, parallelism={"dp_sharding": "optimizer"})
    with fake_rank(plan.recipe.layout, rank=scale - 1, experts=experts) as ranks:
        stages = prepare_stages(plan, ranks)
        optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
        source, passes = rank_data(build_data(plan), plan, ranks, varlen=False), build_passes(stages, plan, ranks)
        with Communication() as communication:
            do_step(0, plan, passes, optimizers, source, ranks)
    recipe = plan.recipe.model_copy(update={"layout": layout})
    streams = count_streams(plan.model_copy(update={"recipe": recipe}))
    assert streams == 2 + len(communication.found) <= 9
    assert (streams > 8) == ("CUDA_DEVICE_MAX_CONNECTIONS" in shipped_variables("cuda", (), streams))
