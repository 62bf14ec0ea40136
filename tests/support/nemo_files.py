# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint as NeMo 2 does: names, shapes and shards of Megatron-Core, in files of torch's own format.

As in Megatron-Core's ``TransformerBlock.sharded_state_dict``, layers are a dimension of one tensor, saved layer by
layer, or each has a name. Query, key and value are interleaved by query group as in NeMo's ``TransformFns.merge_qkv``.
"""

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from llmb.catalogue.records import Model

PADDING = 64
"""Rows that are added to the vocabulary."""


def nemo_tensors(model: Model, weights: Mapping[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """``weights`` have Hugging Face's names."""
    padding = torch.zeros(PADDING, model.hidden_size, dtype=next(iter(weights.values())).dtype)
    tensors = {
        "module.embedding.word_embeddings.weight": torch.cat([weights["model.embed_tokens.weight"], padding]),
        "module.output_layer.weight": torch.cat([weights["lm_head.weight"], padding]),
        "module.decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    layers = [_layer(model, weights, f"model.layers.{number}.") for number in range(model.layers)]
    for name in layers[0]:
        if stacked:
            tensors[f"module.decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            tensors |= {f"module.decoder.layers.{number}.{name}": layer[name] for number, layer in enumerate(layers)}
    return tensors


def _layer(model: Model, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    query, key, value = (weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    per_group = model.attention_heads // model.kv_heads * model.head_dim
    groups = [
        part
        for group in range(model.kv_heads)
        for part in (
            query[group * per_group : (group + 1) * per_group],
            key[group * model.head_dim : (group + 1) * model.head_dim],
            value[group * model.head_dim : (group + 1) * model.head_dim],
        )
    ]
    fc1 = torch.cat([weights[f"{prefix}mlp.gate_proj.weight"], weights[f"{prefix}mlp.up_proj.weight"]])
    return {
        "self_attention.linear_qkv.layer_norm_weight": weights[f"{prefix}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat(groups),
        "self_attention.linear_proj.weight": weights[f"{prefix}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": weights[f"{prefix}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": fc1,
        "mlp.linear_fc2.weight": weights[f"{prefix}mlp.down_proj.weight"],
    }


class ShardPlanner(DefaultSavePlanner):
    """Saves matrices in two shards of rows, and stacked tensors layer by layer, as two tensor-parallel ranks do."""

    def create_local_plan(self) -> SavePlan:
        whole = super().create_local_plan()
        items: list[WriteItem] = []
        for item in whole.items:
            tensor = self.state_dict[item.index.fqn]
            shards = _shards(tensor.shape) if isinstance(tensor, Tensor) else []
            items += [_shard(item, tensor, offsets, sizes) for offsets, sizes in shards] or [item]
        self.plan = SavePlan(items, planner_data=whole.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[write_item.index.fqn][box].clone()


def _shards(shape: torch.Size) -> list[tuple[list[int], list[int]]]:
    if len(shape) == 1:
        return [([0], [*shape])]
    if len(shape) == 2:
        half = shape[0] // 2
        return [([0, 0], [half, shape[1]]), ([half, 0], [shape[0] - half, shape[1]])]
    half = shape[1] // 2
    halves = ((0, half), (half, shape[1] - half))
    return [([layer, first, 0], [1, rows, shape[2]]) for layer in range(shape[0]) for first, rows in halves]


def _shard(item: WriteItem, tensor: Tensor, offsets: list[int], sizes: list[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape)
    return WriteItem(MetadataIndex(item.index.fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def nemo_config(model: Model) -> dict[str, Any]:
    """Settings as NeMo's ``context/model.yaml`` has them, defaults included."""
    scaling = model.rope_scaling
    scaled = (
        {
            "scale_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "old_context_len": scaling.original_max_position,
        }
        if scaling
        else {}
    )
    return {
        "_target_": f"nemo.collections.llm.gpt.model.llama.{'Llama31Config8B' if scaling else 'Llama3Config70B'}",
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.attention_heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": None,
        "layernorm_epsilon": model.norm_eps,
        "rotary_base": int(model.rope_theta),
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "num_moe_experts": None,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        **scaled,
    }


def write_nemo(folder: Path, model: Model, weights: Mapping[str, Tensor], *, stacked: bool) -> None:
    """``weights`` and ``context`` in ``folder``, with what NeMo keeps beside weights."""
    tensors = nemo_tensors(model, weights, stacked=stacked)
    extra = {"module.decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4": io.BytesIO(b"an object")}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        writer = FileSystemWriter(folder / "weights", thread_count=2)
        save({**tensors, **extra}, storage_writer=writer, planner=ShardPlanner(), no_dist=True)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "weights" / "metadata.json").write_text(json.dumps(backends))
    (folder / "weights" / "common.pt").write_bytes(b"not a pickle: nobody may read it")
    context = folder / "context"
    (context / "nemo_tokenizer").mkdir(parents=True)
    (context / "nemo_tokenizer" / "tokenizer.json").write_text("{}")
    target = "nemo.collections.llm.gpt.model.llama.LlamaModel"
    (context / "model.yaml").write_text(yaml.safe_dump({"_target_": target, "config": nemo_config(model)}))
