# SPDX-License-Identifier: Apache-2.0
"""Steps on the device ``meta``, whose tensors have no values: if the host can run them, it waits for nothing."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmb.catalogue.records import Model
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.model.moe import Experts
from llmb.engine.optimizer import gradient_norm
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.precision.apply import fp8_step, layers_of
from llmb.engine.precision.experts import fused_fp8_products
from llmb.engine.precision.scaling import LayerScales, Scales
from llmb.engine.timing import ExpertLoadCounter
from llmb.engine.transformations import set_routing

DEVICE = torch.device("meta")
RANKS: Any = SimpleNamespace(
    rank=0, world_size=1, device=DEVICE, alone=False, mesh={"pp": SimpleNamespace(size=lambda: 1)}
)


class Waits(TorchDispatchMode):
    """Lists the operations that copy from the host, which waits for them; those that copy to it fail by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        # A tensor of the host without dimensions is a number, and a parameter of a kernel.
        if len({tensor.device.type for tensor in tensors if tensor.ndim or "copy" in str(function)}) > 1:
            self.found.append(str(function))
        return result


def moe_model(models: dict[str, Model], family: str) -> Decoder:
    with DEVICE:
        return build_model(models[f"{family} tiny"]).bfloat16()


def in_fp8(model: Decoder, *, delayed: bool) -> None:
    layers = [layer for block in model.layers.values() for layer in layers_of(block)]
    scales = Scales(len(layers), DEVICE, None, delayed=delayed)  # type: ignore[arg-type]
    for number, layer in enumerate(layers):
        layer.replace(LayerScales(scales, number), "fp8")
    if delayed:
        for module in model.modules():
            if isinstance(module, Experts):
                module.products = fused_fp8_products


def step(model: Decoder) -> Waits:
    """Passes of two micro-batches, with what is counted and computed in them and after them."""
    tokens, labels = (torch.zeros(1, 64, dtype=torch.int64, device=DEVICE) for _ in range(2))
    load = ExpertLoadCounter([model], RANKS)
    with Waits() as waits:
        with fp8_step([TrainedStage(model)], 0):
            for _ in range(2):
                model(tokens, labels, count=64.0).backward()
        gradient_norm([(parameter.grad, 1) for parameter in model.parameters() if parameter.grad is not None])
        load.of_step()
    return waits


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values cannot be reduced over ranks."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_arguments, **_options: None)


@pytest.mark.parametrize(
    ("family", "dtype", "routing"),
    [
        ("llama4-maverick", "bf16", "capacity"),
        pytest.param("llama4-maverick", "delayed", "forced balance", marks=pytest.mark.slow),
        pytest.param("mixtral", "current", "capacity", marks=pytest.mark.slow),
    ],
)
def test_where_experts_have_equally_many_rows_the_host_waits_for_nothing(
    models: dict[str, Model], family: str, dtype: Literal["bf16", "delayed", "current"], routing: str
) -> None:
    model = moe_model(models, family)
    capacity = routing == "capacity"
    plan: Any = SimpleNamespace(
        force_load_balancing=not capacity,
        capacity_factor=1.0 if capacity else None,
        compute_path=SimpleNamespace(overlaps_dispatch=True, dispatch_parts=1),
    )
    set_routing(model, plan, RANKS)
    if dtype != "bf16":
        in_fp8(model, delayed=dtype == "delayed")
    assert step(model).found == []


@pytest.mark.parametrize("dtype", ["bf16", "delayed"])
def test_routing_by_tokens_waits_in_fp8_alone(models: dict[str, Model], dtype: str) -> None:
    model = moe_model(models, "mixtral")
    if dtype == "bf16":
        assert step(model).found == []
        return
    in_fp8(model, delayed=True)
    with pytest.raises(NotImplementedError, match="meta"):
        step(model)


def test_copies_from_the_host_are_seen() -> None:
    with Waits() as waits:
        torch.ones(3).to(DEVICE)
    assert waits.found == ["aten._to_copy.default"]
