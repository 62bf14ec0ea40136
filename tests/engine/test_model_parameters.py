# SPDX-License-Identifier: Apache-2.0
"""Parameter counts: of the models as built, and from their records alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.throughput import parameter_count
from llmb.engine.model.decoder import build_model
from llmb.runs.huggingface.model_config import config_of

PUBLISHED_BILLIONS = {
    ("llama3.1", "8b"): (8.03, 8.03),
    ("llama3.1", "70b"): (70.55, 70.55),
    ("llama3.1", "405b"): (405.85, 405.85),
    ("llama3", "70b"): (70.55, 70.55),
    ("nemotron4", "15b"): (15.63, 15.63),
    ("nemotron4", "340b"): (341.03, 341.03),
    ("llama4-maverick", "400b"): (400.71, 17.18),
    ("qwen3", "0.6b"): (0.60, 0.60),
    ("qwen3", "8b"): (8.19, 8.19),
    ("mixtral", "8x7b"): (46.70, 12.88),
}


def built_without_memory(model):
    with torch.device("meta"):
        return build_model(model)


@pytest.mark.parametrize("key", PUBLISHED_BILLIONS, ids="-".join)
def test_full_size_models_have_the_published_number_of_parameters(key):
    model = Catalogue().models[key]
    total, active = parameter_count(model)
    assert sum(p.numel() for p in built_without_memory(model).parameters()) == total
    assert (round(total / 1e9, 2), round(active / 1e9, 2)) == PUBLISHED_BILLIONS[key]


@settings(max_examples=30)
@given(
    name=st.sampled_from(["llama", "llama-biased", "nemotron4", "llama4", "qwen2", "qwen3-tied", "mixtral"]),
    layers=st.integers(1, 7),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([8, 24]),
    experts=st.integers(1, 5),
    interleave=st.integers(1, 3),
)
def test_the_count_from_the_record_is_that_of_the_model(models, name, layers, kv_heads, head_dim, experts, interleave):
    model = models[name].model_copy(update={"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim})
    top_k = min(model.moe.top_k, experts) if model.moe else 0
    if model.moe:
        sizes = {
            "experts": experts,
            "top_k": top_k,
            "interleave": interleave,
            "shared_ffn_hidden_size": model.moe.shared_ffn_hidden_size and 40,
        }
        model = model.model_copy(update={"moe": model.moe.model_copy(update=sizes)})
    named = dict(built_without_memory(model).named_parameters())
    idle = sum(p.numel() // experts * (experts - top_k) for n, p in named.items() if ".experts." in n)
    total = sum(p.numel() for p in named.values())
    assert parameter_count(model) == (total, total - idle)


TRAINABLE = [key for key, model in Catalogue().models.items() if model.other_parts is None]


@pytest.mark.parametrize("key", TRAINABLE, ids="-".join)
def test_transformers_counts_as_many_parameters(key):
    """Of the models that it builds from our configuration, without memory."""
    model = Catalogue().models[key]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(model, "bf16")))
    assert theirs.num_parameters() == parameter_count(model)[0]
