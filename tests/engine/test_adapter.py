# SPDX-License-Identifier: Apache-2.0
"""Adapters: what is trained, with which values they begin, and that they compute what peft computes."""

import math
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from llmb.catalogue.records import ADAPTED, Lora, Model
from llmb.catalogue.throughput import parameter_count, trainable_parameters
from llmb.engine.model.adapter import Dropout, TokenKeys
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.transformations import apply_lora
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.huggingface.tensors import targets_of
from llmb.runs.plan import Plan

TOLERANCE = 1e-4
SPLIT = ("qkv-split", "qv", "attention", "all-linear")
TARGETS = ("qkv", *SPLIT)


def lora_of(targets: str) -> Lora:
    return Lora(rank=4, alpha=12, dropout=0, targets=targets)


def adapted(model: Model, lora: Lora, seed: int = 1) -> Decoder:
    """With adapters whose B is not zero, as after some training."""
    decoder = build_model(model)
    apply_lora(decoder, lora, torch.float32)
    TrainedStage(decoder).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(decoder).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder


def trained(decoder: Decoder) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def theirs(model: Model, decoder: Decoder, lora: Lora) -> nn.Module:
    """peft's model with the same weights and adapters; a fused A is that of all three projections."""
    base = LlamaForCausalLM(LlamaForCausalLM.config_class(**config_of(model, "fp32"), attn_implementation="eager"))
    own = {name: parameter for name, parameter in decoder.named_parameters() if "adapter." not in name}
    base.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": own[name] for name in own})
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(ADAPTED[lora.targets]))
    wrapped = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(of_peft_name(dict(decoder.named_parameters()), name))
    return wrapped


def of_peft_name(ours: dict[str, Tensor], name: str) -> Tensor:
    """What peft calls base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight."""
    path, _, part = name.removeprefix("base_model.model.model.").partition(".lora_")
    owner, _, layer = path.rpartition(".")
    own, fused = f"{path}.adapter.{part[0].lower()}.weight", f"{owner}.qkv_adapter."
    if own in ours:
        return ours[own]
    return ours[f"{fused}a.weight" if part[0] == "A" else f"{fused}b.{layer}.weight"]


# Of peft, which uses what transformers 5 calls otherwise.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("targets", TARGETS)
def test_loss_and_gradients_are_those_of_peft(targets: str, models: dict[str, Model]) -> None:
    model, lora = models["llama"], lora_of(targets)
    decoder = adapted(model, lora)
    other = theirs(model, decoder, lora)
    tokens = torch.randint(model.vocab_size, (2, 65), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    loss = decoder(inputs, labels)
    logits = other(inputs).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert abs(loss.item() - expected.item()) <= TOLERANCE
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in trained(decoder).items()}
    # The gradient of a shared A is the sum of what its three projections contribute.
    found = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None
            found[key_of(gradients, name)] += parameter.grad
    for name, gradient in gradients.items():
        assert gradient is not None
        assert (found[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize("targets", TARGETS)
def test_targets_follow_from_the_adapted_layers(targets: str) -> None:
    assert targets_of(ADAPTED[targets], shared=targets == "qkv") == targets
    assert targets_of(["q_proj", "down_proj"], shared=False) is None


def key_of(gradients: dict[str, Tensor], name: str) -> str:
    of_name = of_peft_name(gradients, name)
    return next(key for key, gradient in gradients.items() if gradient is of_name)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", ["llama", "nemotron4", "qwen3-tied"])
def test_parameters_are_counted_from_the_record_as_they_are_built(
    name: str, targets: str, models: dict[str, Model]
) -> None:
    model, lora = models[name], lora_of(targets)
    with torch.device("meta"):
        decoder = build_model(model)
    apply_lora(decoder, lora, torch.bfloat16)
    assert sum(parameter.numel() for parameter in trained(decoder).values()) == trainable_parameters(model, lora)
    frozen = [parameter for parameter in decoder.parameters() if not parameter.requires_grad]
    assert sum(parameter.numel() for parameter in frozen) == parameter_count(model)[0]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trained(decoder).values()} == {torch.float32}


def test_all_parameters_are_trainable_without_adapters(models: dict[str, Model]) -> None:
    assert trainable_parameters(models["mixtral"], None) == parameter_count(models["mixtral"])[0]


def test_training_begins_with_the_outputs_of_the_base(models: dict[str, Model]) -> None:
    model, lora = models["llama"], lora_of("all-linear")
    base, decoder = build_model(model), build_model(model)
    apply_lora(decoder, lora, torch.float32)
    TrainedStage(base).initialize(3)
    TrainedStage(decoder).initialize(3)
    tokens = torch.arange(32).view(1, -1)
    assert torch.equal(decoder(tokens), base(tokens))
    values = dict(decoder.named_parameters())
    a = values["layers.0.mlp.down_proj.adapter.a.weight"]
    assert a.std().item() == pytest.approx(math.sqrt(2 / (4 + 256)), rel=0.1)  # Xavier's
    assert not values["layers.0.mlp.down_proj.adapter.b.weight"].any()


def test_what_is_frozen_stays_as_it_is_and_has_no_optimizer_state(
    models: dict[str, Model], tiny_plan: Callable[..., Plan]
) -> None:
    model, lora = models["qwen3-tied"], lora_of("all-linear")
    decoder = adapted(model, lora)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    optimizer = build_optimizer(TrainedStage(decoder), tiny_plan("finetune_llama3").recipe.training)
    tokens = torch.arange(64).view(1, -1)
    losses = []
    for _ in range(5):
        loss = decoder(tokens, tokens.roll(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    names = trained(decoder)
    assert set(optimizer.state) == set(names.values())
    changed = {name for name, parameter in decoder.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(names)


def test_dropout_keeps_the_mean_and_depends_on_sample_position_layer_and_seed() -> None:
    tokens, other = TokenKeys(), TokenKeys()
    positions = torch.arange(64)
    tokens.set(range(8, 10), positions, 64)
    other.set(range(9, 10), positions[32:], 64)
    ones = torch.ones(2, 64, 512)
    dropped = Dropout(0.25, "layers.0", 1, tokens)(ones)
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert dropped.mean().item() == pytest.approx(1, abs=0.01)
    for dim in (0, 1, 2):  # no row, column or feature is dropped as a whole
        assert ((dropped == 0).float().mean(dim) > 0.9).sum() < 0.1 * dropped.sum(dim).numel()
    assert torch.equal(Dropout(0.25, "layers.0", 1, other)(ones[1:, 32:]), dropped[1:, 32:])
    for name, seed in (("layers.1", 1), ("layers.0", 2)):
        agreeing = (Dropout(0.25, name, seed, tokens)(ones) == dropped).float().mean().item()
        assert agreeing == pytest.approx(0.25**2 + 0.75**2, abs=0.01)
