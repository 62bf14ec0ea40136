# SPDX-License-Identifier: Apache-2.0
"""The decoder: embedding, blocks, final norm and head, or the part of them in one pipeline stage."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from llmb.catalogue.records import MixtureOfExperts, Mlp, Model
from llmb.catalogue.records import Norm as NormName
from llmb.engine.model.attention import Attention, Documents, Rotary, document_masks, rotary_tables
from llmb.engine.model.biases import BiasedAttention, BiasedGatedMLP, BiasedSquaredReluMLP
from llmb.engine.model.documents import DocumentSegments
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.linear import GradientSum, KeptWeight
from llmb.engine.model.local_shard import local_tensor
from llmb.engine.model.loss import Head
from llmb.engine.model.moe import MoELayer, Routed
from llmb.engine.model.norms import LayerNorm1P, Norm, RMSNorm
from llmb.engine.parallel.exchange import BlockEntry, Bucket, OwnPart, Reduction, Unit
from llmb.engine.typed_autograd import apply

EMBEDDING = "embed_tokens.weight"
NORMS: dict[NormName, type[Norm]] = {"rmsnorm": RMSNorm, "layernorm1p": LayerNorm1P}
MLPS: dict[Mlp, type[GatedMLP | SquaredReluMLP]] = {"swiglu": GatedMLP, "squared-relu": SquaredReluMLP}
BIASED_MLPS: dict[Mlp, type[GatedMLP | SquaredReluMLP]] = {
    "swiglu": BiasedGatedMLP,
    "squared-relu": BiasedSquaredReluMLP,
}


class Staged(nn.Module):
    """A block whose forward pass consists of stages: methods, each of which is compiled, recomputed or timed whole.

    The module itself is not replaced for that: parameters keep their names, and what FSDP does before and after the
    module stays outside, where the compiler cannot reorder it.

    exchanged: its parameters that other ranks update, too, and what sums their gradients. kept: its layers whose
    weights are cast once for a step, without those of routed experts, which FSDP gathers later.
    """

    STAGES: ClassVar[tuple[str, ...]] = ("compute",)

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in self.STAGES}
        self.exchanged: tuple[Unit, Reduction] | None = None
        self.kept: Sequence[KeptWeight] = ()

    def forward(self, hidden: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        output: Tensor = self.stages["compute"](self.enter(hidden), rotary, documents)
        return output

    def enter(self, hidden: Tensor) -> Tensor:
        """Everything that comes before a block computes, in its order: other ranks' updates arrive, weights are cast.

        Outside of compiled code, and before any part of the block reads a parameter.
        """
        if self.exchanged is not None:
            self.exchanged[0].await_updates()
        for layer in self.kept:
            layer.keep_weight()
        if self.exchanged is None:
            return hidden
        entered: Tensor = apply(BlockEntry, hidden, *self.exchanged)
        return entered

    def wrap(self, stage: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.stages[stage] = wrapper(self.stages[stage])


class Block(Staged):
    """One layer: attention, then a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = build_attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = build_mlp(model)

    def compute(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, documents)
        update: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class MoEBlock(Staged):
    """``Block`` with a mixture of experts, in four parts, which are stages of their own.

    Only the parts around the experts can be compiled: the experts' shapes depend on the tokens, and their
    parameters are gathered separately from the block.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("before_experts", "run_experts", "run_shared_expert", "after_experts")
    STAGES = ("compute", *PARTS)

    def __init__(self, model: Model, layer: int, experts: MixtureOfExperts) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = build_attention(model, layer)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = MoELayer(model.hidden_size, experts)

    def compute(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        hidden, routed = self.stages["before_experts"](hidden, rotary, documents)
        outputs = self.stages["run_experts"](routed)
        # While other ranks send outputs; its gradient, while they get those of outputs.
        shared = self.stages["run_shared_expert"](routed.hidden)
        output: Tensor = self.stages["after_experts"](hidden, routed, self.mlp.experts.complete(outputs), shared)
        return output

    def before_experts(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> tuple[Tensor, Routed]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, documents)
        return hidden, self.mlp.dispatch(self.post_attention_layernorm(hidden))

    def run_experts(self, routed: Routed) -> Tensor:
        return self.mlp.run_experts(routed)

    def run_shared_expert(self, hidden: Tensor) -> Tensor | None:
        return self.mlp.run_shared_expert(hidden)

    def after_experts(self, hidden: Tensor, routed: Routed, outputs: Tensor, shared: Tensor | None) -> Tensor:
        return hidden + self.mlp.combine(routed, outputs, shared)


class Decoder(nn.Module):
    """A model, or one pipeline stage of it: parameter names are those of the full model either way.

    ``embeds``: it begins with the embedding. Tied embedding and head are one parameter, with the name of the embedding;
    a last stage that is not the first has a replica of it, see ``parallel.pipeline``.

    ``masters``: the fp32 values of parameters that are rounded from them, and sharded like them. ``buckets``: trained
    parameters that other ranks hold, too. ``reduction``: what sums their gradients, if there are any.
    ``outer``: those outside of blocks. ``gradient_sums``: the gradients that products add to. ``tables``: the rotations
    of the latest positions.
    """

    def __init__(self, model: Model, layers: Iterable[int], *, embedding: bool, head: bool) -> None:
        super().__init__()
        self.model = model
        self.embeds = embedding
        self.masters: dict[nn.Parameter, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.reduction: Reduction | None = None
        self.outer: Unit | None = None
        self.gradient_sums: list[GradientSum] = []
        self.tables: Rotary | None = None
        has_embedding = embedding or (head and model.tied_embeddings)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if has_embedding else None
        self.layers = nn.ModuleDict({str(layer): build_block(model, layer) for layer in layers})
        self.norm = build_norm(model) if head else None
        self.lm_head = Head(model.hidden_size, model.vocab_size) if head else None
        self.tie()

    def tie(self) -> None:
        """Makes the head use the embedding's matrix if the model ties them."""
        if self.model.tied_embeddings and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters except the replica of another stage's embedding."""
        copied = self.embed_tokens is not None and not self.embeds
        return (item for name, item in self.named_parameters() if not (copied and name == EMBEDDING))

    def parts(self) -> dict[Tensor, OwnPart | None]:
        """The parameters of which each rank updates a part, and this rank's part, if it has one."""
        split = [bucket for bucket in self.buckets if bucket.parts is not None]
        own = {part.parameter: part for bucket in split for part in bucket.parts or ()}
        return {parameter: own.get(parameter) for bucket in split for parameter in bucket.parameters}

    def named_parts(self) -> Iterator[tuple[str, OwnPart | None]]:
        """``parts`` by the names of the parameters."""
        parts = self.parts()
        return ((name, parts[each]) for name, each in self.named_parameters() if each in parts)

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """Names of all parameters and what holds their values in full: the master, or else the parameter itself.

        Of those of which each rank updates a part, the values of this rank's, [elements].
        """
        parts = dict(self.named_parts())
        for name, parameter in self.named_parameters():
            part = parts.get(name)
            if part is not None:
                yield name, part.values
            elif name not in parts:
                yield name, self.masters.get(parameter, parameter.detach())

    def blocks(self) -> Iterator[Staged]:
        return map(self.block, self.layers)

    def block(self, layer: str) -> Staged:
        """By its name, the number of the layer in the full model."""
        block = self.layers[layer]
        assert isinstance(block, Staged)
        return block

    def await_updates(self) -> None:
        """Before any parameter is read outside of a forward pass: other ranks' updates arrive."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def rotary(self, positions: Tensor) -> Rotary:
        """Computed once for the positions that all micro-batches have, which are one tensor."""
        if self.tables is None or self.tables.positions is not positions:
            self.tables = rotary_tables(self.model, positions)
        return self.tables

    @torch.no_grad()
    def round_masters(self) -> None:
        """Sets the parameters from their masters, after these were written. A collective of ranks that hold them."""
        for parameter, master in self.masters.items():
            local_tensor(parameter).copy_(local_tensor(master))
        for bucket in self.buckets:
            bucket.round_parts()
            bucket.begin_gather()
            bucket.finish_gather()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving parameters to a device, such as by ``to_empty``, makes a new parameter for every module.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        count: Tensor | float | None = None,
        segments: DocumentSegments | None = None,
    ) -> Tensor:
        """The loss if labels are given, else logits [batch, seq, vocab].

        tokens: [batch, seq] int64, or the hidden states of the previous stage if it has no embedding. labels:
        [batch, seq] int64. positions: [seq] or [batch, seq], by default 0, 1, 2, ... A stage without a head returns
        hidden states.

        starts: for packed sequences, the position at which the document of each token begins, for all positions of the
        full sequences, [batch, full seq] int64; ``positions`` is then [seq]. Each document is computed as if it were
        alone: by masks, or without them if the ``segments`` of its documents are given. count: divisor of the loss, by
        default its number of labels.
        """
        if self.outer is not None:
            self.outer.await_updates()
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
    """The full model. Its values are undefined until ``initialize`` or a checkpoint sets them."""
    return Decoder(model, range(model.layers), embedding=True, head=True)


def build_block(model: Model, layer: int) -> nn.Module:
    if model.moe and model.is_moe_layer(layer):
        return MoEBlock(model, layer, model.moe)
    return Block(model, layer)


def build_attention(model: Model, layer: int) -> Attention:
    biased = model.qkv_bias or model.attention_output_bias
    return BiasedAttention(model, layer) if biased else Attention(model, layer)


def build_norm(model: Model) -> Norm:
    return NORMS[model.norm](model.hidden_size, model.norm_eps)


def build_mlp(model: Model) -> GatedMLP | SquaredReluMLP:
    return (BIASED_MLPS if model.mlp_bias else MLPS)[model.mlp](model.hidden_size, model.ffn_hidden_size)
