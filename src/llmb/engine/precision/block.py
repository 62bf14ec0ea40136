# SPDX-License-Identifier: Apache-2.0
"""Blocks that add, normalize and cast in one pass over memory, forward and backward.

For delayed scaling, without adapters and tensor parallelism, which need what is between: the output of the attention's
last matrix and what norms compute are never stored alone. Parameters and modules are those of other blocks.
"""

from torch import Tensor, nn

from llmb.engine.model.attention import Documents
from llmb.engine.model.decoder import Block, MoEBlock, Staged
from llmb.engine.model.joined import Joined
from llmb.engine.model.norms import Norm
from llmb.engine.model.rotary import Rotary
from llmb.engine.precision.linear import CastInput, Fp8GatedMLP, Fp8Joined, Fp8Linear, Fp8SquaredReluMLP, operands
from llmb.engine.precision.norm_autograd import Fp8Norm, Fp8ProductNorm, Results
from llmb.engine.precision.product import Cast
from llmb.engine.precision.scaling import INPUT, Factor
from llmb.engine.typed_autograd import apply

Product = Fp8Linear | Fp8Joined


class Fp8Block(Block):
    """``whole``, whose modules it takes."""

    def __init__(self, whole: Block) -> None:
        Staged.__init__(self)
        take_modules(self, whole)

    def with_attention(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> tuple[Tensor, CastInput]:
        assert isinstance(self.mlp, Fp8GatedMLP | Fp8SquaredReluMLP)
        attention, first = self.self_attn, self.mlp.first
        hidden, normalized = normalized_for(attention.qkv, self.input_layernorm, hidden)
        attended = attention.attended(normalized, rotary, documents)  # type: ignore[arg-type]
        arguments = norm_arguments(first, self.post_attention_layernorm)
        assert isinstance(attention.o_proj, Fp8Linear)
        found: Results = apply(Fp8ProductNorm, *operands(attention.o_proj, attended), hidden, *arguments)
        return with_cast(found, first)


class Fp8MoEBlock(MoEBlock):
    """Only what is before attention: a router takes what the second norm computes."""

    def __init__(self, whole: MoEBlock) -> None:
        Staged.__init__(self)
        take_modules(self, whole)

    def with_attention(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        hidden, normalized = normalized_for(self.self_attn.qkv, self.input_layernorm, hidden)
        update: Tensor = self.self_attn(normalized, rotary, documents)
        return hidden + update


def take_modules(block: nn.Module, whole: nn.Module) -> None:
    """Blocks have nothing but modules."""
    for name, module in whole.named_children():
        block.add_module(name, module)


def normalized_for(product: Joined, norm: Norm, hidden: Tensor) -> tuple[Tensor, CastInput]:
    """The hidden states, and these normalized, cast for ``product``."""
    assert isinstance(product, Fp8Joined)
    found: Results = apply(Fp8Norm, hidden, *norm_arguments(product, norm))
    return with_cast(found, product)


def norm_arguments(product: Product, norm: Norm) -> tuple[object, ...]:
    """For the functions of ``norm_autograd``."""
    return *norm.operands(), input_factor(product).scale


def with_cast(found: Results, product: Product) -> tuple[Tensor, CastInput]:
    hidden, stands, values, transposed, amax = found
    return hidden, CastInput(stands, Cast(values, transposed, input_factor(product).inverse, amax))


def input_factor(product: Product) -> Factor:
    return product.layers[0].factors[INPUT]
