# SPDX-License-Identifier: Apache-2.0
"""One rank of a (data, tensor) parallel mesh: names the parameters whose shard is not that of the unsharded values.

Arguments: backend ("gloo", or "fake" where no other process answers), folder with models.json and room for the
rendezvous, rank, data and tensor parallel size.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from cut_by_hand import cut_tensors, tensor_dimension
from ranks import joined, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.catalogue.records import Model
from llmb.engine.model import decoder as initialize_module
from llmb.engine.model.decoder import build_model
from llmb.engine.parallel.exchange import TrainedStage


def expected_shard(full: Tensor, name: str, mesh: DeviceMesh) -> Tensor:
    """Tensor parallelism cuts first; FSDP cuts what that leaves, along dimension 0."""
    dimension = tensor_dimension(name)
    if dimension is not None:
        full = full.chunk(mesh["tp"].size(), dimension)[mesh["tp"].get_local_rank()]
    return full.chunk(mesh["dp"].size(), 0)[mesh["dp"].get_local_rank()]


def differing(model: Model, mesh: DeviceMesh) -> list[str]:
    whole = build_model(model)
    TrainedStage(whole).initialize(7)
    with torch.device("meta"):
        sharded = build_model(model)
    cut_tensors(sharded, mesh["tp"])
    for block in (*sharded.layers.values(), sharded):
        fully_shard(block, mesh=mesh["dp"])
    sharded.to_empty(device="cpu")
    TrainedStage(sharded).initialize(7)
    values = whole.state_dict()
    return [
        f"{model.model} {name}"
        for name, parameter in sharded.named_parameters()
        if not torch.equal(parameter.to_local(), expected_shard(values[name], name, mesh))
    ]


def main(backend: str, folder: Path, dp: int, tp: int, rank: int) -> None:
    if backend == "fake":
        dist.init_process_group(backend, rank=rank, world_size=dp * tp, store=FakeStore())
        compare(folder, dp, tp)
        return
    with joined(folder, rank, dp * tp):
        compare(folder, dp, tp)


def compare(folder: Path, dp: int, tp: int) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    models = [Model(**fields) for fields in json.loads((folder / "models.json").read_text())]
    found = []
    for initialize_module.BLOCK_ELEMENTS in (2**24, 1000):
        found += [name for model in models for name in differing(model, mesh)]
    print("differing:", found)


run(main)
