# SPDX-License-Identifier: Apache-2.0
"""The messages and products that predictions assume are those of the engine's own step, for each way of parallelism."""

from collections import Counter

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.engine.program import count_rank
from llmb.prediction.work import PassWork, RankWork
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import AccountJob, CollectiveCount, countable

GROUPS = {"dp_cp": "dp", "world": "dp"}
LAYOUTS = {
    "TP and CP": ("pretrain_llama3.1", {"tp": 2, "cp": 2}),
    "PP": ("pretrain_llama3.1", {"pp": 2, "vp": 2}),
    "EP": ("pretrain_mixtral", {"ep": 2, "gbs": 16}),
}
UNPREDICTED = 0.005
"""Part of bytes and FLOPs that are not predicted: norms, maxima of logits, shapes of what stages exchange; routers."""


def planned(workload: str, sizes: dict[str, int]) -> EnginePlan:
    request = Request(
        workload=workload, size="tiny", dtype="bf16", gpu_type="h100", scale=8, overrides=Overrides(**sizes)
    )
    choices = Choices(compiled=False, parallelism=Parallelism(dp_sharding="optimizer"))
    return countable(make_plan(resolve(Catalogue(), request), choices, device="cuda"))[0]


def predicted(plan: EnginePlan) -> tuple[Counter[tuple[str, str]], float]:
    """Bytes of the messages of rank 0 in a step, and FLOPs of its products."""
    work, layout = RankWork(plan, None), plan.recipe.layout
    parts: list[tuple[PassWork, int]] = [(each, count) for kind, count in work.stages[0] for each in work.layer(kind)]
    parts += [(each, 1) for each in work.first()]
    if layout.pp == 1:
        parts += [(each, 1) for each in work.last()]
    messages: Counter[tuple[str, str]] = Counter()
    for part, count in parts:
        for message in part.messages:
            messages[message.group, message.kind] += int(count * layout.ga * message.number * message.size)
    for message in work.of_step(work.parameters(0)):
        messages[message.group.removesuffix("_replicas"), message.kind] += int(message.number * message.size)
    if layout.pp > 1:
        passed = work.between_stages()
        # Before the first stage there is none that a gradient could be sent to.
        messages["pp", "send"] += int(layout.ga * (passed.number - 1) * passed.size)
    flops = sum(count * layout.ga * part.flops.get("bf16", 0.0) for part, count in parts)
    return messages, flops


def counted(collectives: tuple[CollectiveCount, ...]) -> Counter[tuple[str, str]]:
    """Without what is received, which another rank sent, and sums of a few numbers."""
    found: Counter[tuple[str, str]] = Counter()
    for each in collectives:
        group = each.group.split()[0]
        if each.kind not in ("recv", "all_reduce"):
            found[GROUPS.get(group, group), each.kind] += each.bytes
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("name", ["TP and CP", pytest.param("PP", marks=pytest.mark.measured), "EP"])
def test_messages_and_products_are_those_of_the_engine(name: str) -> None:
    plan = planned(*LAYOUTS[name])
    account = count_rank(AccountJob(plan=plan, rank=0))
    messages, flops = predicted(plan)
    assert flops == pytest.approx(account.flops_by_kind["bf16"], rel=UNPREDICTED)
    assert messages == pytest.approx(counted(account.collectives), rel=UNPREDICTED)
    if LAYOUTS[name][0] == "pretrain_llama3.1":
        assert flops == account.flops_by_kind["bf16"]
