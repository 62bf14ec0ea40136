# SPDX-License-Identifier: Apache-2.0
"""Initial weights that depend only on a parameter's name, not on the ranks or layers that exist."""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from llmb.catalogue.records import Model
from llmb.engine.model.adapter import adapter_deviation, is_of_adapter
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.local_shard import local_tensor
from llmb.engine.model.norms import RMSNorm

BLOCK_ELEMENTS = 2**24
"""Values drawn from one generator: limits the additional memory for a large parameter."""


@torch.no_grad()
def initialize(module: Decoder, model: Model, seed: int) -> None:
    """Set every parameter: matrices from a normal distribution, norms to the identity.

    A value depends on the seed, the parameter's full name and its global shape, and on the type of the device.
    A sharded parameter (DTensor) gets its shard of the same values, without communication.
    """
    parts = dict(module.named_parts())
    for name, values in module.named_values():
        parameter = module.get_parameter(name)
        initial = _initial_shard(module, model, name, parameter.detach(), seed)
        part = parts.get(name)
        local_tensor(values).copy_(initial if part is None else initial.flatten()[part.start : part.stop])
    module.round_masters()


def _initial_shard(module: Decoder, model: Model, name: str, parameter: Tensor, seed: int) -> Tensor:
    """This rank's shard of a parameter's values, fp32."""
    if parameter.ndim > 1:
        return _normal_shard(parameter, name, seed).mul_(standard_deviation(name, parameter.shape, model))
    owner = module.get_submodule(name.rpartition(".")[0])
    return torch.full_like(local_tensor(parameter), 1.0 if isinstance(owner, RMSNorm) else 0.0, dtype=torch.float32)


def standard_deviation(name: str, shape: tuple[int, ...], model: Model) -> float:
    """Smaller for matrices that add to the residual stream, whose variance grows with depth (GPT-2)."""
    if is_of_adapter(name):
        return adapter_deviation(name, shape)
    adds_to_residual = not {"o_proj", "down_proj"}.isdisjoint(name.split("."))
    return model.init_std / math.sqrt(2 * model.layers) if adds_to_residual else model.init_std


def _normal_shard(parameter: Tensor, name: str, seed: int) -> Tensor:
    """This rank's shard of standard normal values of the parameter's global shape, fp32."""
    rows = _keep_shard(parameter, torch.arange(parameter.shape[0]), rows=True)
    values = _normal_rows(parameter.shape, rows, name, seed, parameter.device)
    return _keep_shard(parameter, values, rows=False)


def _keep_shard(parameter: Tensor, full: Tensor, *, rows: bool) -> Tensor:
    """This rank's shard of ``full`` by the parameter's placements that shard dimension 0 (or the others)."""
    if not isinstance(parameter, DTensor):
        return full
    placements: list[Placement] = [
        placement if (getattr(placement, "dim", None) == 0) is rows else Replicate()
        for placement in parameter.placements
    ]
    return distribute_tensor(full, parameter.device_mesh, placements, src_data_rank=None).to_local()


def _normal_rows(shape: torch.Size, rows: Tensor, name: str, seed: int, device: torch.device) -> Tensor:
    """The given rows (along dimension 0) of a tensor of that shape, drawn in blocks of rows."""
    block_rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    rows = rows.to(device)
    values = torch.empty(len(rows), *shape[1:], device=device)
    blocks = rows // block_rows
    for block in sorted(set(blocks.tolist())):
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        generator = _generator(seed, name, block, device)
        drawn = torch.randn(stop - start, *shape[1:], device=device, generator=generator)
        values[blocks == block] = drawn[rows[blocks == block] - start]
    return values


def _generator(seed: int, name: str, block: int, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
