# SPDX-License-Identifier: Apache-2.0
"""The decoder: embedding, blocks, final norm and head, or the share of them that one pipeline stage holds."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from llmb.catalogue.records import MixtureOfExperts, Model
from llmb.engine.model.attention import Attention, Masks, document_masks
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.loss import Head
from llmb.engine.model.moe import MoELayer, Routed
from llmb.engine.model.norms import LayerNorm1P, RMSNorm
from llmb.engine.model.rotary import Rotary, rotary_tables


class Block(nn.Module):
    """One layer: attention, then a feed-forward layer, each adding to the residual stream what it made of its norm."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = Attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = build_mlp(model)

    def forward(self, hidden: Tensor, rotary: Rotary, masks: Masks | None = None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, masks)
        update: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class Llama4Block(nn.Module):
    """``Block`` with the checkpoint's other name for the feed-forward layer."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = Attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.feed_forward = build_mlp(model)

    def forward(self, hidden: Tensor, rotary: Rotary, masks: Masks | None = None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, masks)
        update: Tensor = self.feed_forward(self.post_attention_layernorm(hidden))
        return hidden + update


class MoEBlock(nn.Module):
    """``Llama4Block`` with a mixture of experts, in three parts.

    Only the parts around the experts can be compiled: the experts' shapes depend on the tokens, and they gather their
    parameters apart from their block.
    """

    def __init__(self, model: Model, layer: int, experts: MixtureOfExperts) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = Attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.feed_forward = MoELayer(model.hidden_size, experts)

    def forward(self, hidden: Tensor, rotary: Rotary, masks: Masks | None = None) -> Tensor:
        hidden, routed = self.before_experts(hidden, rotary, masks)
        return self.after_experts(hidden, routed, self.run_experts(routed))

    def before_experts(self, hidden: Tensor, rotary: Rotary, masks: Masks | None) -> tuple[Tensor, Routed]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, masks)
        return hidden, self.feed_forward.dispatch(self.post_attention_layernorm(hidden))

    def run_experts(self, routed: Routed) -> Tensor:
        outputs: Tensor = self.feed_forward.experts(routed.rows, routed.counts)
        return outputs

    def after_experts(self, hidden: Tensor, routed: Routed, outputs: Tensor) -> Tensor:
        return hidden + self.feed_forward.combine(routed, outputs)


class Decoder(nn.Module):
    """A model, or one pipeline stage of it: parameters are named by their place in the whole model either way."""

    def __init__(self, model: Model, layers: Iterable[int], *, embedding: bool, head: bool) -> None:
        super().__init__()
        self.model = model
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if embedding else None
        self.layers = nn.ModuleDict({str(layer): build_block(model, layer) for layer in layers})
        self.norm = build_norm(model) if head else None
        self.lm_head = Head(model.hidden_size, model.vocab_size) if head else None

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> Tensor:
        """The loss where labels are given, else logits [batch, seq, vocab].

        tokens: [batch, seq] int64, or the hidden states of the stage before where there is no embedding. labels:
        [batch, seq] int64. positions: [seq] or [batch, seq], by default 0, 1, 2, ... A stage without a head returns
        hidden states.

        starts: where sequences are packed, the position at which the document of each token begins, for all positions
        of the whole sequences, [batch, whole seq] int64; ``positions`` is then [seq]. Each document is computed as it
        would be by itself. count: what the loss is divided by instead of its own number of labels.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        masks = None
        if starts is not None:
            places, positions = positions, positions - starts[:, positions]
            masks = document_masks(self.model, places, positions, starts.shape[1])
        rotary = rotary_tables(self.model, positions)
        hidden = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        for block in self.layers.values():
            hidden = block(hidden, rotary, masks)
        if self.norm is None or self.lm_head is None:
            return hidden
        result: Tensor = self.lm_head(self.norm(hidden), labels, count)
        return result


def build_model(model: Model) -> Decoder:
    """The whole model. Its values are meaningless until ``initialise`` or a checkpoint sets them."""
    return Decoder(model, range(model.layers), embedding=True, head=True)


def build_block(model: Model, layer: int) -> nn.Module:
    if model.moe and model.is_moe_layer(layer):
        return MoEBlock(model, layer, model.moe)
    return Llama4Block(model, layer) if model.architecture == "llama4" else Block(model, layer)


def build_norm(model: Model) -> nn.Module:
    norm = LayerNorm1P if model.architecture == "nemotron4" else RMSNorm
    return norm(model.hidden_size, model.norm_eps)


def build_mlp(model: Model) -> nn.Module:
    mlp = GatedMLP if model.gated_mlp else SquaredReluMLP
    return mlp(model.hidden_size, model.ffn_hidden_size)
