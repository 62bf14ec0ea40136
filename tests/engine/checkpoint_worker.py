# SPDX-License-Identifier: Apache-2.0
"""One rank of a (data, tensor) parallel mesh that saves what a name gives, or names what it did not get back.

Arguments: "save" or "load", folder of the checkpoint with models.json, data and tensor parallel size,
rank.
"""

import hashlib
import json
from pathlib import Path

import torch
from cut_by_hand import cut_tensors
from ranks import CPU, joined, run, whole
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.engine.checkpoint.load import load_checkpoint
from llmb.engine.checkpoint.save import Staging, Writer
from llmb.engine.checkpoint.state import RANDOM, PartsSavePlanner, local_elements, shard_places, training_state
from llmb.engine.model.decoder import build_model
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks


def named_values(name: str, like: Tensor) -> Tensor:
    """The same whole tensor on every rank of every layout."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(like.dtype)


def place(values: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return values
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def main(action: str, folder: Path, dp: int, tp: int, rank: int) -> None:
    with joined(folder, rank, dp * tp, f"store-{action.split()[0]}-{dp}-{tp}"):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        ranks = Ranks(rank, dp * tp, CPU, mesh, fsdp=mesh["dp"], expert_mesh=mesh, expert_fsdp=mesh["dp"])
        training = Catalogue().workloads["pretrain_llama3.1"].training_for("tiny")
        wrong = []
        for number, fields in enumerate(json.loads((folder / "models.json").read_text())):
            decoder = build_model(Model(**fields))
            cut_tensors(decoder, mesh["tp"])
            for block in (*decoder.layers.values(), decoder):
                fully_shard(block, mesh=mesh["dp"])
            optimizer = build_optimizer(stage := TrainedStage(decoder), training)
            if action != "load":
                state = training_state([stage], [optimizer], ranks.device)
                for name, tensor in state.items():
                    if not name.startswith(RANDOM):
                        tensor.copy_(place(named_values(name, tensor), tensor))
                places = shard_places(state)
                writer, planner = Writer(folder / str(number) / "weights"), PartsSavePlanner(places)
                save(Staging().copy(local_elements(state, places), CPU), storage_writer=writer, planner=planner)
                continue
            load_checkpoint(folder / str(number), [stage], [optimizer], ranks)
            for name, tensor in training_state([stage], [optimizer], ranks.device).items():
                if not name.startswith(RANDOM) and not torch.equal(whole(tensor), named_values(name, tensor)):
                    wrong.append(f"{fields['model']} {name}")
        print("wrong:", wrong)


run(main)
