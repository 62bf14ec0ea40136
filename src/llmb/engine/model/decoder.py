# SPDX-License-Identifier: Apache-2.0
"""The decoder, or one pipeline stage of it: embedding, blocks, final norm and head; and its initial weights."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from llmb.catalogue.records import MixtureOfExperts, Mlp, Model
from llmb.catalogue.records import Norm as NormName
from llmb.engine.model.adapter import adapter_deviation, is_of_adapter
from llmb.engine.model.attention import Attention, Documents, DocumentSegments, Rotary, document_masks, rotary_tables
from llmb.engine.model.layers import GatedMLP, LayerNorm1P, Norm, RMSNorm, SquaredReluMLP
from llmb.engine.model.linear import CastOnce, local_tensor
from llmb.engine.model.loss import Head
from llmb.engine.model.moe import MoELayer, Routed

EMBEDDING = "embed_tokens.weight"
NORMS: dict[NormName, type[Norm]] = {"rmsnorm": RMSNorm, "layernorm1p": LayerNorm1P}
MLPS: dict[Mlp, type[GatedMLP | SquaredReluMLP]] = {"swiglu": GatedMLP, "squared-relu": SquaredReluMLP}


class Block(nn.Module):
    """One layer: attention and a feed-forward layer. Not wrapped itself: FSDP's hooks must stay outside of compiled
    code."""

    def __init__(self, model: Model, layer: int, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = Attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = mlp
        self.stages: dict[str, Callable[..., Any]] = {"compute": self.compute}
        self.kept: Sequence[CastOnce] = ()

    def forward(self, hidden: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        for layer in self.kept:
            layer.keep_weight()
        output: Tensor = self.stages["compute"](hidden, rotary, documents)
        return output

    def wrap(self, stage: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.stages[stage] = wrapper(self.stages[stage])

    def compute(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, documents)
        update: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class MoEBlock(Block):
    """A block with a mixture of experts. ``run_experts`` cannot be compiled: its shapes depend on the tokens."""

    PARTS: ClassVar[tuple[str, ...]] = ("before_experts", *MoELayer.PARTS, "after_experts")
    mlp: MoELayer

    def __init__(self, model: Model, layer: int, experts: MixtureOfExperts) -> None:
        super().__init__(model, layer, MoELayer(model.hidden_size, experts))
        of_mlp = (getattr(self.mlp, part) for part in MoELayer.PARTS)
        self.stages |= dict(zip(self.PARTS, (self.before_experts, *of_mlp, self.after_experts), strict=True))

    def compute(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        hidden, routed = self.stages["before_experts"](hidden, rotary, documents)
        output: Tensor = self.stages["after_experts"](hidden, routed, *self.mlp.run(routed, self.stages))
        return output

    def before_experts(
        self, hidden: Tensor, rotary: Rotary, documents: Documents | None
    ) -> tuple[Tensor, list[Routed]]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, documents)
        return hidden, self.mlp.dispatch(self.post_attention_layernorm(hidden))

    def after_experts(
        self, hidden: Tensor, routed: list[Routed], outputs: list[Tensor], shared: Tensor | None
    ) -> Tensor:
        return hidden + self.mlp.combine(routed, outputs, shared)


class Decoder(nn.Module):
    """A model, or one of its pipeline stages, with the parameter names of the full model."""

    def __init__(self, model: Model, layers: Iterable[int], *, embedding: bool, head: bool) -> None:
        super().__init__()
        self.model = model
        self.embeds = embedding
        self.tables: Rotary | None = None
        has_embedding = embedding or (head and model.tied_embeddings)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if has_embedding else None
        self.layers = nn.ModuleDict({str(layer): build_block(model, layer) for layer in layers})
        self.norm = build_norm(model) if head else None
        self.lm_head = Head(model.hidden_size, model.vocab_size) if head else None
        self.tie()

    def tie(self) -> None:
        """Make the head use the embedding's matrix if the model ties them."""
        if self.model.tied_embeddings and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def replica(self) -> Tensor | None:
        """This stage's replica of the first stage's embedding, or None if it has no replica."""
        return None if self.embeds or self.embed_tokens is None else self.embed_tokens.weight

    def blocks(self) -> Iterator[Block]:
        return map(self.block, self.layers)

    def block(self, layer: str) -> Block:
        """Return the block with the name ``layer``, which is its number in the full model."""
        block = self.layers[layer]
        assert isinstance(block, Block)
        return block

    def moe_layers(self) -> dict[int, MoELayer]:
        """Return the MoE layers by their number in the full model."""
        layers = {int(number): getattr(block, "mlp", None) for number, block in self.layers.items()}
        return {number: layer for number, layer in layers.items() if isinstance(layer, MoELayer)}

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotations for ``positions``, and cache them for further calls with the same tensor."""
        if self.tables is None or self.tables.positions is not positions:
            self.tables = rotary_tables(self.model, positions)
        return self.tables

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving parameters to a device, such as by ``to_empty``, makes a new parameter for every module.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(
        self,
        tokens: Tensor,  # [batch, seq] int64; hidden states if the stage does not begin with the embedding
        labels: Tensor | None = None,  # [batch, seq] int64
        positions: Tensor | None = None,  # [seq] or [batch, seq], by default 0, 1, 2, ...
        starts: Tensor | None = None,  # where each token's document begins, [batch, full seq]; positions are then [seq]
        count: Tensor | float | None = None,  # divisor of the summed loss, by default the number of counted labels
        segments: DocumentSegments | None = None,  # for variable-length attention; without them, masks are used
    ) -> Tensor:
        """Return the loss if there are ``labels``, else logits [batch, seq, vocab]; without a head, hidden states."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        documents: Documents | None = segments
        if starts is not None:
            places, positions = positions, positions - starts[:, positions]
            documents = segments or document_masks(self.model, places, positions, starts.shape[1])
        rotary = self.rotary(positions)
        hidden = tokens
        if self.embeds and self.embed_tokens is not None:
            hidden = self.embed_tokens(tokens)
        for block in self.blocks():
            hidden = block(hidden, rotary, documents)
        if self.norm is None or self.lm_head is None:
            return hidden
        result: Tensor = self.lm_head(self.norm(hidden), labels, count)
        return result


def build_model(model: Model) -> Decoder:
    """Return the full model, with parameters that must still be initialized or loaded."""
    return Decoder(model, range(model.layers), embedding=True, head=True)


def build_block(model: Model, layer: int) -> Block:
    if model.moe and model.is_moe_layer(layer):
        return MoEBlock(model, layer, model.moe)
    mlp = MLPS[model.mlp](model.hidden_size, model.ffn_hidden_size, bias=model.mlp_bias)
    return Block(model, layer, mlp)


def build_norm(model: Model) -> Norm:
    return NORMS[model.norm](model.hidden_size, model.norm_eps)


BLOCK_ELEMENTS = 2**24
"""Maximum number of values drawn at a time, which limits the additional memory for a large parameter."""


def initial_values(module: Decoder, name: str, parameter: Tensor, seed: int) -> Tensor:
    """Return this rank's shard of a parameter's initial values in fp32, which do not depend on the layout."""
    if parameter.ndim == 1:
        value = 1.0 if isinstance(module.get_submodule(name.rpartition(".")[0]), RMSNorm) else 0.0
        return torch.full_like(local_tensor(parameter), value, dtype=torch.float32)
    # The shard is taken from standard normal values of the global shape.
    rows = _keep_shard(parameter, torch.arange(parameter.shape[0]), rows=True)
    values = _normal_rows(parameter.shape, rows, name, seed, parameter.device)
    return _keep_shard(parameter, values, rows=False).mul_(standard_deviation(name, parameter.shape, module.model))


def standard_deviation(name: str, shape: tuple[int, ...], model: Model) -> float:
    """Return a matrix's initial standard deviation: an adapter's, else as in GPT-2, smaller before residual sums."""
    if is_of_adapter(name):
        return adapter_deviation(name, shape)
    adds_to_residual = not {"o_proj", "down_proj"}.isdisjoint(name.split("."))
    return model.init_std / math.sqrt(2 * model.layers) if adds_to_residual else model.init_std


def _keep_shard(parameter: Tensor, full: Tensor, *, rows: bool) -> Tensor:
    """Return this rank's shard of ``full``: along dimension 0 if ``rows`` is True, else along the other dimensions."""
    if not isinstance(parameter, DTensor):
        return full
    placements: list[Placement] = [
        placement if (getattr(placement, "dim", None) == 0) is rows else Replicate()
        for placement in parameter.placements
    ]
    return distribute_tensor(full, parameter.device_mesh, placements, src_data_rank=None).to_local()


def _normal_rows(shape: torch.Size, rows: Tensor, name: str, seed: int, device: torch.device) -> Tensor:
    block_rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    rows = rows.to(device)
    values = torch.empty(len(rows), *shape[1:], device=device)
    blocks = rows // block_rows
    for block in sorted(set(blocks.tolist())):
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.randn(stop - start, *shape[1:], device=device, generator=generator)
        values[blocks == block] = drawn[rows[blocks == block] - start]
    return values
