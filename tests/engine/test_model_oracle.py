# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients equal those of the Hugging Face models with the same weights, prepared ones included."""

import warnings

import pytest
import torch
from published_models import write_published
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.model.decoder import build_model
from llmb.runs.checkpoints.prepared_data import prepared_folders
from llmb.setup.prepare.base_weights import CheckpointRequest, prepare_checkpoint

ALL = [
    *("llama", "llama-scaled", "nemotron4", "llama4", "qwen2", "qwen3", "qwen3-tied", "mixtral"),
    *("qwen3-moe", "llama-biased", "nemotron4-biased"),
]
TINY = [(f"{name} tiny", 128) for name in ("llama3.1", "llama3", "nemotron4", "llama4-maverick", "qwen3", "mixtral")]
TINY.append(("qwen3 tiny-moe", 128))
TOLERANCE = 1e-5


def hugging_face(model) -> nn.Module:
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_seq_len,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "eager",
    }
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    if model.norm == "layernorm1p":
        rope["partial_rotary_factor"] = model.rotary_fraction
        common |= {"intermediate_size": model.ffn_hidden_size, "norm_eps": model.norm_eps, **biases}
        return NemotronForCausalLM(NemotronConfig(**common, rope_parameters=rope))
    if model.chunked_attention:
        chunked = model.chunked_attention
        return Llama4ForCausalLM(
            Llama4TextConfig(
                **common,
                intermediate_size=model.moe.ffn_hidden_size,
                intermediate_size_mlp=model.ffn_hidden_size,
                rms_norm_eps=model.norm_eps,
                rope_parameters=rope,
                num_local_experts=model.moe.experts,
                num_experts_per_tok=model.moe.top_k,
                interleave_moe_layer_step=model.moe.interleave,
                use_qk_norm=False,
                no_rope_layer_interval=chunked.global_every,
                attention_chunk_size=chunked.chunk_size,
                attn_temperature_tuning=True,
                floor_scale=int(chunked.floor_scale),
                attn_scale=chunked.attn_scale,
            )
        )
    common |= {"intermediate_size": model.ffn_hidden_size, "rms_norm_eps": model.norm_eps}
    if model.moe and model.qk_norm:
        experts = {"num_experts": model.moe.experts, "num_experts_per_tok": model.moe.top_k}
        experts |= {"moe_intermediate_size": model.moe.ffn_hidden_size, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, rope_parameters=rope))
    if model.moe:
        experts = {"num_local_experts": model.moe.experts, "num_experts_per_tok": model.moe.top_k}
        return MixtralForCausalLM(MixtralConfig(**common, **experts, rope_parameters=rope))
    if model.qk_norm:
        return Qwen3ForCausalLM(Qwen3Config(**common, rope_parameters=rope))
    if model.qkv_bias and not model.attention_output_bias:
        return Qwen2ForCausalLM(Qwen2Config(**common, rope_parameters=rope))
    scaling = model.rope_scaling
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return LlamaForCausalLM(LlamaConfig(**common, **biases, rope_parameters=rope))


def by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("model."): parameter for name, parameter in module.named_parameters()}


def as_theirs(model, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names and in the shapes that the Hugging Face model has in memory."""
    if model.chunked_attention:
        return {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in ours.items()}
    turned = {name: tensor.flatten(2).mT if ".experts." in name else tensor for name, tensor in ours.items()}
    names = {".mlp.router.": ".mlp.gate.", "_bias.bias": "_proj.bias"}
    for ours_, theirs in names.items():
        turned = {name.replace(ours_, theirs): tensor for name, tensor in turned.items()}
    return turned


def copy_weights(model, source: nn.Module, target: nn.Module) -> None:
    sources, targets = as_theirs(model, by_name(source)), by_name(target)
    assert sources.keys() == targets.keys()
    with torch.no_grad():
        for name, parameter in targets.items():
            parameter.copy_(sources[name].reshape(parameter.shape))


def gradients(model, ours: nn.Module) -> dict[str, Tensor]:
    found = as_theirs(model, {name: parameter.grad for name, parameter in by_name(ours).items()})
    return {f"gradient of {name}": gradient for name, gradient in found.items()}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of the reference; an expert without tokens has a gradient of zero."""
    size = float(theirs.detach().norm())
    return float((ours - theirs.view_as(ours)).detach().norm()) / (size or 1.0)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, f"{worst} differs by {errors[worst]:.2e}"


@pytest.mark.parametrize(("name", "seq"), [*((name, 80) for name in ALL), ("llama4", 96), *TINY])
def test_logits_and_every_gradient_equal_hugging_face(name, seq, models, randomised):
    """Of Llama 4, with a part of a chunk at the end and with whole chunks."""
    model = models[name]
    ours, theirs = randomised(model), hugging_face(model)
    copy_weights(model, ours, theirs)
    tokens, labels = torch.randint(0, model.vocab_size, (2, 2, seq), generator=torch.Generator().manual_seed(2))

    their_logits = theirs(tokens).logits
    their_loss = functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    their_loss.backward()
    our_loss = ours(tokens, labels)
    our_loss.backward()

    assert_same(
        {"logits": ours(tokens), "loss": our_loss} | gradients(model, ours),
        {"logits": their_logits, "loss": their_loss} | {f"gradient of {n}": p.grad for n, p in by_name(theirs).items()},
    )


def test_a_difference_is_reported_with_the_name_of_the_worst_parameter():
    theirs = {"a": torch.ones(4), "b": torch.ones(4)}
    with pytest.raises(AssertionError, match=r"b differs by 5\.00e-01"):
        assert_same({"a": torch.ones(4) * 1.1, "b": torch.ones(4) * 1.5}, theirs)


MAVERICK = "finetune_llama4-maverick"


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("workload", ["finetune_llama3", pytest.param(MAVERICK, marks=pytest.mark.slow)])
def test_logits_of_prepared_bf16_weights_are_those_of_transformers(workload, tmp_path):
    model = find_model(Catalogue(), workload, "tiny")
    theirs, notes = write_published(model, tmp_path / "source", torch.bfloat16), []
    request = CheckpointRequest(
        workload=workload, size="tiny", source=tmp_path / "source", processes=1, largest_file_bytes=500_000
    )
    folders = prepared_folders(tmp_path, workload)
    prepared = prepare_checkpoint(Catalogue(), request, folders, lambda *_: None, notes.append)
    assert prepared.made
    assert prepared.checkpoint.record.weights_dtypes == ("bf16",)
    assert any("tensors that the model does not have are skipped: multi_modal_projector" in note for note in notes) is (
        workload != "finetune_llama3"
    )
    decoder = build_model(model)
    state = {MODEL + name: parameter.detach() for name, parameter in decoder.named_parameters()}
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        load(state, storage_reader=TensorReader(prepared.checkpoint.path / "weights"), no_dist=True)
    tokens = torch.randint(0, model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, decoder(tokens)
    assert float(expected.abs().max()) > 0.1
    assert float((expected - found).abs().max()) < 1e-4
