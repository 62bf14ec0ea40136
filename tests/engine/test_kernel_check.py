# SPDX-License-Identifier: Apache-2.0
"""What every rank finds before it trains; see also ``kernels/interpreted_kernel_check.py``."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmb.engine.kernel_check import compare_kernels, difference_of, refuse_wrong
from llmb.engine.parallel.mesh import arrange
from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "comparison_worker.py"


def test_all_ranks_leave_out_attention_that_is_wrong_on_one_and_end_for_a_wrong_kernel(
    run_ranks: Callable[..., list[str]], tiny_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Of two ranks of context parallelism, each of which has spans of its own."""
    plan = tiny_plan(scale=2, dtype="fp8", overrides={"cp": 2, "layers": 1})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    printed = run_ranks(WORKER, 2, tmp_path, 1)
    *told, found = printed[0].splitlines()
    assert [found] == printed[1].splitlines()
    first = json.loads(found)
    flash, math = first["attention"]["trials"]
    assert (flash["backend"], math["backend"], first["attention"]["backend"]) == ("flash", "math", "math")
    assert flash["problem"].startswith("on rank 1, its gradient of keys differs by ")
    assert (flash["distance"], math["distance"]) == (None, None)
    assert set(told) == {f"llmb: attention backend flash computes wrong results for this run: {flash['problem']}"}
    wrong = [each for each in first["kernels"] if not each["right"]]
    casts = {"cast_both_ways", "cast_both_ways of gradients"}
    assert {(each["kernel"], each["rank"]) for each in wrong} == {(kernel, 1) for kernel in casts}
    assert {each["rank"] for each in first["kernels"] if each["right"]} == {0}
    assert "cast_both_ways, 128x128, on rank 1: " in first["problem"]
    assert "a different version of ptxas than 12.8.93" in first["problem"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_rounding_is_no_difference_and_a_lost_value_is(dtype: torch.dtype) -> None:
    """One in a thousand values, in any format that kernels write; and NaN is never right."""
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1)).abs() + 1
    expected = exact.to(dtype)
    assert difference_of(iter([(expected, expected)])) == 0
    rounded_up = (exact * (1 + torch.finfo(torch.bfloat16 if dtype is torch.float32 else dtype).eps / 2)).to(dtype)
    assert 0 < difference_of(iter([(expected, expected), (rounded_up, expected)])) <= 1
    for value in (0.0, math.nan):
        lossy = expected.clone()
        lossy[500] = value
        assert not difference_of(iter([(lossy, expected), (expected, expected)])) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ["pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"])
def test_the_kernels_of_a_gpu_are_right(
    workload: str, needs: Callable[[str, bool, str], None], tiny_plan: Callable[..., Plan]
) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=device)
    try:
        plan = tiny_plan(workload, scale=1, dtype="fp8", compiled=True).model_copy(update={"device": "cuda"})
        ranks = arrange(0, device, plan.recipe.layout, plan.parallelism.replicas(plan.recipe.layout))
        found = compare_kernels(plan, ranks)
    finally:
        dist.destroy_process_group()
    assert {"cast_both_ways", "cast_rotated_gradient"} <= {one.kernel for one in found}
    refuse_wrong(found, None)


FOLDER_WORKER = Path(__file__).parent / "shared_folder_worker.py"


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (("saved", "saved"), ""),
        (("saved", "other"), "checkpoints cannot be saved: .probe-rank1 of another node is not visible on"),
        (("saved", "file/saved"), "checkpoints cannot be saved: rank 1 on"),
    ],
)
def test_every_node_has_to_reach_the_same_folder(
    tmp_path: Path,
    tiny_plan: Callable[..., Plan],
    run_ranks: Callable[..., list[str]],
    folders: tuple[str, str],
    said: str,
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "plan.json").write_text(tiny_plan(save_checkpoint=True).model_dump_json())
    places = [tmp_path / name for name in folders]
    one, other = run_ranks(FOLDER_WORKER, 2, tmp_path, ",".join(map(str, places)))
    assert one.partition("\n  where")[0] == other.partition("\n  where")[0]
    assert (said in one) if said else one == ""
    assert not [path for place in places if place.is_dir() for path in place.iterdir()]
