# SPDX-License-Identifier: Apache-2.0
"""Converts layers of a model to FP8."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.local_shard import Linear
from llmb.engine.model.moe import Experts
from llmb.engine.parallel.data_parallel import is_sharded
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.experts import Fp8Stack
from llmb.engine.precision.layer_scales import LayerScales
from llmb.engine.precision.linear import Fp8Linear
from llmb.engine.precision.scaling import Scales
from llmb.errors import EnvironmentProblem
from llmb.runs.fp8_product import ProductDtype, fp8_product
from llmb.runs.plan import EnginePlan

CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products."""


def apply_fp8(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks, *, keep_weights: bool) -> None:
    """Changes attention and feed-forward layers in place, after expert parallelism and before tensor parallelism.

    ``keep_weights`` keeps cast weights for a step, for parameters that stay gathered that long. Raises
    EnvironmentProblem if a GPU has no FP8 and emulation was not requested.
    """
    if plan.fp8_recipe is None:
        return
    product_dtype = fp8_product(plan.device, emulate=plan.emulate_fp8).dtype
    if product_dtype == "fp8":
        check_device(ranks.device)
    group = ranks.mesh["dp", "cp", "tp"]._flatten("stage").get_group()
    found = [layer for stage in stages for block in fp8_blocks(stage, plan) for layer in layers_of(block)]
    scales = Scales(len(found), ranks.device, group, delayed=plan.fp8_recipe == "delayed")
    # With current scaling, the scale of an updated weight is known only when all ranks have updated theirs.
    scales.cast_by_update = scales.delayed and not is_sharded(plan.recipe.model, ranks)
    for number, layer in enumerate(found):
        replaced = layer.replace(LayerScales(scales, number), product_dtype)
        if keep_weights:
            layer.gathered.register_forward_pre_hook(partial(_keep_weight, replaced))


def check_device(device: torch.device) -> None:
    """Raises EnvironmentProblem for a GPU without FP8."""
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        found = ".".join(map(str, capability))
        raise EnvironmentProblem(
            f"{torch.cuda.get_device_name(device)} has no FP8: its compute capability is {found}; 8.9 is required",
            do="train with --dtype bf16, or add --emulate-fp8",
        )


def fp8_blocks(stage: Decoder, plan: EnginePlan) -> list[nn.Module]:
    """All blocks; with current scaling the first and the last one of the model stay in bf16."""
    ends = () if plan.fp8_recipe == "delayed" else (0, stage.model.layers - 1)
    return [block for number, block in stage.layers.items() if int(number) not in ends]


class Layer(NamedTuple):
    """One matrix, or one stack of matrices, to be computed in FP8."""

    gathered: nn.Module
    """A layer before whose forward pass the matrix is gathered."""
    replace: Callable[[LayerScales, ProductDtype], Fp8Linear | Fp8Stack]


def layers_of(block: nn.Module) -> Iterator[Layer]:
    for module in block.modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters(recurse=False):
                yield Layer(module, partial(_replace_stack, module, name))
        else:
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    yield Layer(block, partial(_replace_linear, module, name, child))


def _replace_linear(
    owner: nn.Module, name: str, whole: Linear, layer_scales: LayerScales, product_dtype: ProductDtype
) -> Fp8Linear:
    layer = Fp8Linear(whole, layer_scales, product_dtype=product_dtype)
    owner.add_module(name, layer)
    return layer


def _replace_stack(experts: Experts, name: str, layer_scales: LayerScales, product_dtype: ProductDtype) -> Fp8Stack:
    stack = Fp8Stack(experts, name, layer_scales, product_dtype=product_dtype)
    experts.add_module(f"{name}_product", stack)
    experts.needs_known_counts = True
    experts.multiply = partial(_multiply, experts)  # type: ignore[method-assign]
    return stack


def _multiply(experts: Experts, name: str, rows: Tensor, _counts: Tensor, known: list[int] | None) -> Tensor:
    product: Tensor = experts.get_submodule(f"{name}_product")(rows, known)
    return product


def _keep_weight(layer: Fp8Linear | Fp8Stack, _module: nn.Module, _inputs: object) -> None:
    """Outside compiled code."""
    layer.keep_weight()


def fp8_layers(modules: Iterable[nn.Module]) -> list[Fp8Linear | Fp8Stack]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, Fp8Linear | Fp8Stack)]
