# SPDX-License-Identifier: Apache-2.0
"""What a run finds of its kernels before it trains: of whole ones and of broken ones, in Triton's interpreter."""

import pytest
import torch.distributed as dist
import triton
import triton.language as tl
from ranks import ranks_of

from llmb.base.errors import EnvironmentProblem
from llmb.engine import kernel_check
from llmb.engine.kernel_check import checks, compare_kernels, refuse_wrong
from llmb.engine.kernels import elementwise, fp8_cast_triton, rotary_triton

CASTS = ("cast_both_ways", "cast_into", "cast_activated", "cast_activation_gradient", "cast_rotated_gradient")
KINDS = {"pretrain_llama3.1": {*CASTS}, "pretrain_nemotron4": {*CASTS[2:]}}
"""Of the second model, those that compute otherwise there."""


@pytest.fixture(autouse=True)
def as_on_a_gpu_with_kernels(monkeypatch):
    """The interpreter takes a kernel as it is."""
    for module in (fp8_cast_triton, rotary_triton):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
        for name, operation in list(vars(module).items()):
            if hasattr(operation, "_init_fn"):
                monkeypatch.setattr(module, name, operation._init_fn)
    monkeypatch.setattr(elementwise, "has_kernel", lambda *_: True)


@pytest.fixture
def compared(tiny_plan, monkeypatch):
    """Finds how these kernels do in a model, each at the smallest of its shapes."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def compare(workload, kernels):
        plan = tiny_plan(workload, scale=1, dtype="fp8", compiled=True, overrides={"seq_len": 48})
        ranks = ranks_of(plan)

        def smallest(*arguments):
            found = {}
            for each in checks(*arguments):
                found[each.kernel] = min(each, found.get(each.kernel, each), key=lambda one: one.shape)
            return [each for name, each in found.items() if name in kernels]

        monkeypatch.setattr(kernel_check, "checks", smallest)
        return compare_kernels(plan, ranks)

    yield compare
    dist.destroy_process_group()


@pytest.mark.parametrize("workload", KINDS)
def test_kernels_that_compute_what_torch_does_are_right(workload, compared):
    found = compared(workload, KINDS[workload])
    assert {each.kernel for each in found} == KINDS[workload]
    assert all(each.right and each.difference < 0.5 for each in found)
    refuse_wrong(found, None)


@triton.jit
def lossy(tile, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):  # noqa: N803 (as it is called)
    """``saturated``, but for every fourth row."""
    kept = tl.where(tl.arange(0, tile.shape[0])[:, None] % 4 < 3, tile, 0.0)
    return tl.clamp(kept * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


def test_a_kernel_that_loses_values_ends_the_run(compared, monkeypatch):
    for module in (fp8_cast_triton, rotary_triton):
        monkeypatch.setattr(module, "saturated", lossy)
    found = compared("pretrain_llama3.1", {*CASTS})
    assert {each.kernel: each.right for each in found} == dict.fromkeys(CASTS, False)
    with pytest.raises(EnvironmentProblem, match=r"(?s)cast_activated, 48x448, on rank 0: .* than 12\.8\.93"):
        refuse_wrong(found, "12.8.93")
