# SPDX-License-Identifier: Apache-2.0
"""What the eight ranks of a node call in the documents' layouts: groups in the same order, and messages that follow
from the layout alone. No GPU is there: groups and tensors are fake, the calls are the engine's own."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_account import WORKER, disorder
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.engine.parallel.mesh import arrange, as_one
from llmb.runs.choices import Choices, Replicas
from llmb.runs.plan import EnginePlan, make_plan

NODE = 8
GA, LAYERS = 2, 2
HARDWARE_QUEUES = 8
"""Of CUDA by default. A communicator has a stream; computation and copies take one each."""
Message = tuple[str, int]
"""Its kind and its bytes."""
WORLD = tuple(range(NODE))


class Case(NamedTuple):
    """A document's layout of one node, or a part of one on more nodes."""

    workload: str
    size: str
    sizes: dict[str, int]
    data_parallel: int
    splits: list[list[tuple[int, ...]]]
    """How all ranks are split into groups, in the order in which they are created."""


ALONE = [(rank,) for rank in range(NODE)]
CASES = {
    # CP 2, as in the document: neighbors share a sequence, and every other rank has the same part of another one.
    "8b": Case(
        *("pretrain_llama3.1", "8b", {}, 4), [ALONE, [(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]]
    ),
    "405b": Case(*("pretrain_llama3.1", "405b", {"tp": 8, "pp": 1, "vp": 1, "cp": 1}, 1), [ALONE]),
    "maverick": Case(*("finetune_llama4-maverick", "400b", {"tp": 1, "pp": 1, "vp": 1, "ep": 8, "etp": 1}, 8), [ALONE]),
}


def planned(case: Case, dtype: str) -> EnginePlan:
    sizes = {"layers": LAYERS, "gbs": GA * case.data_parallel, **case.sizes}
    overrides = Overrides(**sizes)
    request = Request(
        workload=case.workload, size=case.size, dtype=dtype, gpu_type="h100", scale=NODE, overrides=overrides
    )
    choices = Choices(compiled=False, synthetic=case.workload.startswith("finetune"))
    return make_plan(resolve(Catalogue(), request), choices, device="cuda")


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_split_the_world_alike_and_in_the_same_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's ranks split the communicator of all, which every one of them has to do with the same arguments."""
    case = CASES[name]
    plan = planned(case, "bf16")
    calls: list[list[tuple[int, ...]]] = []

    def split(parent: dist.ProcessGroup, parts: list[list[int]], group_desc: str) -> dist.ProcessGroup:
        assert parent.size() == NODE
        calls.append([tuple(part) for part in parts])
        own, _ = dist.new_subgroups_by_enumeration(parts, group_desc=group_desc)
        return own

    monkeypatch.setattr(dist, "split_group", split)
    for rank in range(NODE):
        dist.init_process_group("fake", rank=rank, world_size=NODE, store=FakeStore())
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", rank)
        experts = plan.recipe.model.moe is not None
        ranks = arrange(rank, torch.device("cpu"), plan.recipe.layout, Replicas(), experts=experts)
        as_one(ranks.mesh, "dp", "cp", "tp")  # of scales in FP8
        made = [tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map]
        dist.destroy_process_group()
        assert calls == case.splits
        assert made == [WORLD, *(next(part for part in parts if rank in part) for parts in case.splits)]
        assert len(made) + 2 <= HARDWARE_QUEUES
        calls.clear()


def expected(name: str, plan: EnginePlan) -> Counter[tuple[tuple[int, ...], Message]]:
    """The messages of rank 0 in a step, by the ranks of their group."""
    messages = {"8b": with_cp, "405b": with_tp, "maverick": with_ep}[name](plan)
    messages[WORLD, ("all_reduce", 8)] += 1  # the gradients' norm
    if plan.fp8_recipe:
        messages[WORLD, ("all_reduce", LAYERS * 7 * 3 * 4)] += 1  # largest values of 7 products' three operands
    return messages


def weights(plan: EnginePlan) -> tuple[int, int]:
    """Parameters of attention with the layer's two norms, and those of embedding, head and the last norm."""
    model = plan.recipe.model
    heads = model.head_dim * (2 * model.attention_heads + 2 * model.kv_heads)
    return model.hidden_size * (heads + 2), model.hidden_size * (2 * model.vocab_size + 1)


def updated(*parameters: int) -> Counter[tuple[tuple[int, ...], Message]]:
    """ZeRO-1 reduces the gradients of a layer to pieces, and gathers its updated parameters: in bf16, once a step."""
    return Counter((WORLD, (kind, 2 * each)) for each in parameters for kind in ("reduce_scatter", "all_gather"))


def with_cp(plan: EnginePlan) -> Counter[tuple[tuple[int, ...], Message]]:
    """Keys and values of the sequence are gathered, and their gradients scattered, once per layer and micro-batch."""
    model, layout = plan.recipe.model, plan.recipe.layout
    attention, ends = weights(plan)
    messages = updated(*[attention + 3 * model.hidden_size * model.ffn_hidden_size] * LAYERS, ends)
    both = 2 * 2 * layout.seq_len * model.kv_heads * model.head_dim
    for kind in ("all_gather", "reduce_scatter"):
        messages[(0, 1), (kind, both)] += GA * LAYERS
    return messages


def with_tp(plan: EnginePlan) -> Counter[tuple[tuple[int, ...], Message]]:
    """Attention and MLP each gather the sequence and scatter their results, and the gradients the other way round; the
    shards that they keep are gathered again for the gradients of weights. Embedding and head do half of that."""
    model, layout = plan.recipe.model, plan.recipe.layout
    hidden = 2 * layout.seq_len * model.hidden_size
    of_layers = hidden // 2 if plan.fp8_recipe else hidden  # gradients are gathered in FP8, too
    messages: Counter[tuple[tuple[int, ...], Message]] = Counter()
    messages[WORLD, ("reduce_scatter", hidden)] += GA * (LAYERS * (2 + 2) + 2)
    messages[WORLD, ("all_gather", of_layers)] += GA * LAYERS * (2 + 2 + 2)
    messages[WORLD, ("all_gather", hidden)] += GA * 2
    # Each rank's largest logit and sum of exponentials of each token, in fp32.
    messages[WORLD, ("all_gather", 2 * 4 * NODE * layout.seq_len)] += GA
    messages[WORLD, ("all_reduce", 2 * model.hidden_size)] += 2 * LAYERS + 1  # norms see a part of the sequence
    return messages


def with_ep(plan: EnginePlan) -> Counter[tuple[tuple[int, ...], Message]]:
    """Rows go to the experts of another rank and back, their gradients too. With EP 8, no rank shares an expert."""
    model, layout = plan.recipe.model, plan.recipe.layout
    moe = model.moe
    assert moe is not None
    assert moe.shared_ffn_hidden_size is not None
    attention, ends = weights(plan)
    dense = attention + 3 * model.hidden_size * model.ffn_hidden_size
    routed = attention + model.hidden_size * (3 * moe.shared_ffn_hidden_size + moe.experts)
    messages = updated(dense, routed, ends)
    messages[WORLD, ("all_to_all", 2 * layout.seq_len * moe.top_k * model.hidden_size)] += GA * 4
    return messages


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("8b", "bf16", marks=pytest.mark.slow),
        pytest.param("8b", "fp8", marks=pytest.mark.measured),
        pytest.param("405b", "bf16", marks=pytest.mark.measured),
        pytest.param("405b", "fp8", marks=pytest.mark.slow),
        pytest.param("maverick", "bf16", marks=pytest.mark.slow),
    ],
)
def test_the_messages_of_a_step_follow_from_the_layout(
    name: str, dtype: str, run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    plan = planned(CASES[name], dtype)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    sequences = [json.loads(printed)["sequence"] for printed in run_ranks(WORKER, NODE, tmp_path, "fake")]
    assert disorder(sequences) == []
    messages = Counter((tuple(each["members"]), (each["kind"], each["bytes"])) for each in sequences[0])
    assert messages == expected(name, plan)
    of_each = [{tuple(each["members"]) for each in sequence} for sequence in sequences]
    assert all(len(groups) + 2 <= HARDWARE_QUEUES for groups in of_each)
    assert len({len(sequence) for sequence in sequences}) == 1
