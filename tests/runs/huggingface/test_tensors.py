# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a file are which parameters, and what keeps a file from use."""

import pytest

from llmb.runs.huggingface.tensors import (
    StoredTensor,
    hugging_face_name,
    hugging_face_shape,
    match_tensors,
    stored_tensors,
    weights_formats,
)

LLAMA, LLAMA4, MIXTRAL, QWEN = (
    next(form for form in weights_formats() if form.model_type == name)
    for name in ("llama", "llama4_text", "mixtral", "qwen3")
)
GATE_UP = "layers.1.mlp.experts.gate_up_proj"
THEIR_GATE_UP = "model.layers.1.feed_forward.experts.gate_up_proj"
PARAMETERS = {"embed_tokens.weight": (8, 4), GATE_UP: (3, 4, 2, 5), "norm.weight": (4,), "lm_head.weight": (8, 4)}


def stored(prefix: str = "", dtype: str = "BF16") -> dict[str, StoredTensor]:
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        THEIR_GATE_UP: (3, 4, 10),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    return {prefix + name: StoredTensor("model.safetensors", shape, dtype) for name, shape in shapes.items()}


def test_all_but_the_head_are_below_model() -> None:
    assert hugging_face_name("layers.0.mlp.up_proj.weight", LLAMA) == "model.layers.0.mlp.up_proj.weight"
    assert hugging_face_name("lm_head.weight", LLAMA) == "lm_head.weight"


def test_parts_are_called_as_the_form_says() -> None:
    name = "layers.0.mlp.shared_expert.up_proj.weight"
    assert hugging_face_name(name, LLAMA4) == "model.layers.0.feed_forward.shared_expert.up_proj.weight"
    assert hugging_face_name("layers.3.mlp.router.weight", MIXTRAL) == "model.layers.3.block_sparse_moe.gate.weight"


def test_experts_may_have_tensors_of_their_own() -> None:
    experts = "model.layers.1.block_sparse_moe.experts"
    gate_up = stored_tensors(GATE_UP, (2, 4, 2, 5), MIXTRAL)
    assert list(gate_up.items()) == [(f"{experts}.{e}.{name}.weight", (5, 4)) for e in (0, 1) for name in ("w1", "w3")]
    down = stored_tensors("layers.1.mlp.experts.down_proj", (2, 5, 4), MIXTRAL)
    assert down == {f"{experts}.{e}.w2.weight": (4, 5) for e in (0, 1)}


def test_a_head_is_left_out_only_where_embeddings_are_tied() -> None:
    parameters = {"embed_tokens.weight": (8, 4)}
    found = {name: StoredTensor("a", (8, 4), "BF16") for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert match_tensors(parameters, found, QWEN, tied=True).left_out == ("lm_head.weight",)
    assert match_tensors(parameters, found, QWEN).problems == ("lm_head.weight is not a tensor of this model",)


def test_only_gate_and_up_of_experts_change_their_shape() -> None:
    assert hugging_face_shape(GATE_UP, (3, 4, 2, 5)) == (3, 4, 10)
    assert hugging_face_shape("layers.1.mlp.experts.down_proj", (3, 5, 4)) == (3, 5, 4)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_every_parameter_is_found(prefix: str) -> None:
    match = match_tensors(PARAMETERS, stored(prefix), LLAMA4)
    assert match.problems == ()
    assert match.left_out == ()
    assert match.sources[GATE_UP] == (f"{prefix}{THEIR_GATE_UP}",)
    assert match.sources["lm_head.weight"] == (f"{prefix}lm_head.weight",)


def test_the_vision_part_and_computed_tables_are_left_out() -> None:
    extra = ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
    table = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    found = stored("language_model.") | {name: StoredTensor("a", (7,), "I8") for name in (*extra, table)}
    match = match_tensors(PARAMETERS, found, LLAMA4)
    assert match.problems == ()
    assert set(match.left_out) == {*extra, table}


def test_a_vision_part_of_no_multimodal_model_is_not_expected() -> None:
    match = match_tensors(
        PARAMETERS, stored() | {"vision_model.class_embedding": StoredTensor("a", (7,), "F32")}, LLAMA4
    )
    assert match.problems == ("vision_model.class_embedding is not a tensor of this model",)


def test_every_problem_is_told() -> None:
    found = stored() | {"model.layers.0.self_attn.q_proj.bias": StoredTensor("a", (4,), "F32")}
    del found["lm_head.weight"]
    found["model.norm.weight"] = StoredTensor("a", (5,), "F32")
    found["model.embed_tokens.weight"] = StoredTensor("a", (8, 4), "F8_E4M3")
    assert match_tensors(PARAMETERS, found, LLAMA4).problems == (
        "model.embed_tokens.weight has the dtype F8_E4M3; supported: F32, BF16, F16",
        "model.norm.weight has the shape [5]; the model has [4]",
        "lm_head.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is not a tensor of this model",
    )
