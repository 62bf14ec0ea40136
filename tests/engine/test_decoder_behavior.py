# SPDX-License-Identifier: Apache-2.0
"""Properties that any decoder has, whatever it is compared with."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from llmb.engine.model.attention import Attention, rotary_tables
from llmb.engine.model.decoder import EMBEDDING, Decoder, build_model
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.transformations import apply_compile, apply_recompute

ALL = ["llama", "llama-scaled", "nemotron4", "llama4", "qwen3", "qwen3-tied", "mixtral"]


def random_tokens(model, seq, batch=2):
    return torch.randint(0, model.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("changed", [1, 31, 32, 63, 79])
@pytest.mark.parametrize("name", ALL)
def test_a_later_token_never_changes_earlier_logits(name, changed, models, randomised):
    decoder, tokens = randomised(models[name]), random_tokens(models[name], 80)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % models[name].vocab_size
    with torch.no_grad():
        before, after = decoder(tokens), decoder(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-4, atol=1e-4)
    assert (after[:, changed] - before[:, changed]).abs().max() > 1e-2


@pytest.mark.parametrize("seq", [48, 80, 96])
def test_chunked_layers_see_their_own_chunk_and_global_layers_see_everything(seq, models):
    model = models["llama4"]
    chunk = model.chunked_attention.chunk_size
    for layer in range(model.layers):
        torch.manual_seed(layer)
        attention = Attention(model, layer)
        hidden = torch.randn(1, seq, model.hidden_size, requires_grad=True)
        attention(hidden, rotary_tables(model, torch.arange(seq)))[:, chunk + 5].sum().backward()
        reach = hidden.grad[0].abs().amax(-1).nonzero().flatten().tolist()
        first = 0 if layer == 3 else chunk
        assert reach == list(range(first, chunk + 6))


def test_a_sequence_within_one_chunk_is_plain_causal_attention(models, randomised):
    model = models["llama4"]
    unchunked = model.model_copy(
        update={"chunked_attention": model.chunked_attention.model_copy(update={"chunk_size": 1000})}
    )
    tokens = random_tokens(model, 32)
    with torch.no_grad():
        assert torch.equal(randomised(model)(tokens), randomised(unchunked)(tokens))


@pytest.mark.parametrize("name", ALL)
def test_positions_can_be_given_per_sequence(name, models, randomised):
    decoder, tokens = randomised(models[name]), random_tokens(models[name], 24)
    with torch.no_grad():
        expected = decoder(tokens)
        assert torch.equal(decoder(tokens, positions=torch.arange(24).expand(2, 24)), expected)
        assert not torch.allclose(decoder(tokens, positions=torch.arange(24) * 3), expected, atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_stages_after_one_another_are_the_whole_model(name, models, randomised):
    model = models[name]
    whole, tokens = randomised(model), random_tokens(model, 80)
    stages = [
        Decoder(model, [], embedding=True, head=False),
        Decoder(model, [0, 1, 2], embedding=False, head=False),
        Decoder(model, [3], embedding=False, head=True),
    ]
    hidden, names = tokens, []
    for stage in stages:
        own = stage.state_dict().keys()
        names += own
        stage.load_state_dict({name: value for name, value in whole.state_dict().items() if name in own})
        with torch.no_grad():
            hidden = stage(hidden)
    assert set(names) == set(whole.state_dict())
    assert {name for name in names if names.count(name) > 1} == ({EMBEDDING} if model.tied_embeddings else set())
    with torch.no_grad():
        assert torch.equal(hidden, whole(tokens))


@pytest.mark.parametrize("name", ALL)
def test_bf16_parameters_give_bf16_activations_and_an_fp32_loss_near_the_fp32_one(name, models):
    model = models[name]
    decoder, tokens = build_model(model), random_tokens(model, 96)
    TrainedStage(decoder).initialize(0)
    exact = decoder(tokens, tokens)
    decoder.to(torch.bfloat16)
    loss = decoder(tokens, tokens)
    loss.backward()
    assert decoder(tokens).dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    assert loss.ndim == 0
    assert abs(loss - exact) < 0.02
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


@pytest.mark.parametrize("name", ALL)
def test_ignored_labels_do_not_count(name, models, randomised):
    decoder, tokens = randomised(models[name]), random_tokens(models[name], 24)
    labels = tokens.clone()
    labels[:, 12:] = -100
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens, labels), decoder(tokens[:, :12], tokens[:, :12]))


@pytest.mark.parametrize("name", ALL)
def test_a_model_built_without_memory_gives_the_same_loss_once_it_has_values(name, models):
    model = models[name]
    tokens = random_tokens(model, 48)
    direct = build_model(model)
    with torch.device("meta"):
        lazy = build_model(model)
    assert all(parameter.is_meta for parameter in lazy.parameters())
    assert not list(lazy.buffers())
    lazy.to_empty(device="cpu")
    for decoder in (direct, lazy):
        TrainedStage(decoder).initialize(5)
    assert torch.equal(direct(tokens, tokens), lazy(tokens, tokens))


@pytest.mark.parametrize("name", ALL)
def test_a_forward_pass_on_the_meta_device_has_the_right_shape(name, models):
    with torch.device("meta"):
        decoder = build_model(models[name]).to(torch.bfloat16)
        tokens = torch.zeros(2, 80, dtype=torch.int64)
    assert decoder(tokens).shape == (2, 80, 512)
    assert decoder(tokens, tokens).shape == ()


@pytest.mark.parametrize(
    "recompute", ["none", *(pytest.param(parts, marks=pytest.mark.slow) for parts in ("selective", "full"))]
)
@pytest.mark.parametrize(
    ("name", "layer", "graphs"),
    [
        ("llama", 0, 1),
        ("mixtral", 0, 3),
        *(
            pytest.param(*block, marks=pytest.mark.slow)
            for block in (("nemotron4", 0, 1), ("llama4", 0, 1), ("llama4", 1, 5), ("llama4", 3, 5), ("qwen3", 0, 1))
        ),
    ],
)
def test_each_kind_of_block_is_one_graph_for_the_compiler_but_for_experts(
    name, layer, graphs, recompute, models, randomised
):
    """Blocks with experts are three: before them, their activation, after them; and two of a shared expert."""
    torch.compiler.reset()
    model = models[name]
    decoder = randomised(model).to(torch.bfloat16)
    decoder.layers = torch.nn.ModuleDict({str(layer): decoder.layers[str(layer)]})
    block, counter = decoder.layers[str(layer)], CompileCounter()
    hidden = torch.randn(1, 96, model.hidden_size).to(torch.bfloat16)
    rotary = rotary_tables(model, torch.arange(96))
    with torch.no_grad():
        expected = block(hidden, rotary)
        if recompute == "selective":
            apply_recompute(decoder, recompute, by_part=True)
        apply_compile(decoder, backend=counter)
        if recompute == "full":
            apply_recompute(decoder, recompute)
        torch.testing.assert_close(block(hidden, rotary), expected)
        block(hidden, rotary)
    assert counter.frame_count == graphs
    assert not counters["graph_break"]
