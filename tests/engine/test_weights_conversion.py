# SPDX-License-Identifier: Apache-2.0
"""Weights arrive bit for bit, in bounded pieces; files that do not hold just the model are refused before any write."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load

from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.huggingface import chunks, weights_export
from llmb.engine.huggingface.chunks import chunks_of
from llmb.engine.huggingface.safetensors_files import open_files
from llmb.engine.huggingface.weights_export import export_weights, stored_parts
from llmb.engine.huggingface.weights_import import import_weights, parameter_shapes
from llmb.engine.model.decoder import build_model
from llmb.errors import EnvironmentProblem, UsageError
from llmb.huggingface.formats import format_of
from llmb.runs.conversion import ExportJob, ImportJob

FILE = "model.safetensors"
NAMES = ["llama", "nemotron4", "llama4", "qwen3", "qwen3-tied", "mixtral"]


def values(model, dtype=torch.float32):
    """Values of every parameter, by the engine's names, that ``dtype`` can hold."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(dtype).float()
        for name, shape in parameter_shapes(model).items()
    }


def hugging_face(model, weights, dtype=torch.float32):
    return {
        stored: part.to(dtype)
        for name, tensor in weights.items()
        for stored, part in stored_parts(name, tensor, format_of(model))
    }


def import_here(model, source, folder, on_progress=lambda done, total: None):
    job = ImportJob(source=str(source), files=(FILE,), folder=str(folder), model=model)
    with warnings.catch_warnings(action="ignore"):  # torch says that there is one process only
        return import_weights(job, on_progress)


def export_here(model, checkpoint, folder, dtype="fp32", largest=10**9, on_progress=lambda done, total: None):
    folder.mkdir()
    job = ExportJob(
        checkpoint=str(checkpoint), folder=str(folder), model=model, dtype=dtype, largest_file_bytes=largest
    )
    with warnings.catch_warnings(action="ignore"):
        export_weights(job, on_progress)


def read_weights(folder, model):
    state = {MODEL + name: torch.empty(shape) for name, shape in parameter_shapes(model).items()}
    with warnings.catch_warnings(action="ignore"):
        load(state, storage_reader=TensorReader(folder / "weights"), no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 200))
def test_chunks_are_whole_rows_that_cover_the_parameter_once(rows, width, largest):
    found = list(chunks_of("a", (rows, width), largest))
    assert [row for chunk in found for row in range(chunk.first, chunk.end)] == list(range(rows))
    assert all((chunk.end - chunk.first) * width * 4 <= largest or chunk.end == chunk.first + 1 for chunk in found)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_the_built_model(models, name):
    built = {path: tuple(parameter.shape) for path, parameter in build_model(models[name]).named_parameters()}
    assert parameter_shapes(models[name]) == built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_every_dtype_become_the_same_fp32_values(models, name, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 60_000)
    expected, told = values(models[name], dtype), []
    save_file(hugging_face(models[name], expected, dtype), tmp_path / FILE)
    assert import_here(models[name], tmp_path, tmp_path, lambda *bytes_: told.append(bytes_)).left_out == ()
    assert_same(read_weights(tmp_path, models[name]), expected)
    assert len(list((tmp_path / "weights").glob("*.distcp"))) > len(expected)
    total = sum(4 * tensor.numel() for tensor in expected.values())
    assert told[-1] == (total, total)
    assert told == sorted(told)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_rounds_each_weight_to_the_nearest(models, name, tmp_path):
    expected = values(models[name])
    save_file(hugging_face(models[name], expected), tmp_path / FILE)
    import_here(models[name], tmp_path, tmp_path)
    export_here(models[name], tmp_path, tmp_path / "out", dtype="bf16", largest=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "out" / file)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert_same(found, hugging_face(models[name], expected, torch.bfloat16))


def test_a_head_beside_a_tied_embedding_is_left_out_only_where_it_is_equal(models, tmp_path):
    model = models["qwen3-tied"]
    expected = values(model)
    tensors = hugging_face(model, expected)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / FILE)
    assert import_here(model, tmp_path, tmp_path / "same").left_out == ("lm_head.weight",)
    assert_same(read_weights(tmp_path / "same", model), expected)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / FILE)
    assert_refused(model, tmp_path, "lm_head.weight is not equal to model.embed_tokens.weight")


def test_one_file_needs_no_index(models, tmp_path):
    expected, told = values(models["llama"]), []
    save_file(hugging_face(models["llama"], expected), tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    export_here(models["llama"], tmp_path, tmp_path / "out", on_progress=lambda *bytes_: told.append(bytes_))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", FILE]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}
    assert_same(load_file(tmp_path / "out" / FILE), hugging_face(models["llama"], expected))
    total = sum(tensor.nbytes for tensor in expected.values())
    assert told == [(0, total), (total, total)]


def test_metadata_is_read_once_whatever_the_number_of_files(models, tmp_path, monkeypatch):
    save_file(hugging_face(models["llama"], values(models["llama"])), tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    reads = []
    real = TensorReader.read_metadata
    monkeypatch.setattr(TensorReader, "read_metadata", lambda self: reads.append(1) or real(self))
    export_here(models["llama"], tmp_path, tmp_path / "out", largest=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(parameter_shapes(models["llama"]))
    assert reads == [1]


def assert_refused(model, folder, *said):
    with pytest.raises(UsageError) as caught:
        import_here(model, folder, folder)
    for text in said:
        assert text in str(caught.value)
    assert not (folder / "weights").exists()


def test_files_that_hold_something_else_are_refused_with_all_reasons(models, tmp_path):
    tensors = hugging_face(models["llama"], values(models["llama"]))
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(7)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(7)
    save_file(tensors, tmp_path / FILE)
    assert_refused(
        models["llama"],
        tmp_path,
        "model.layers.2.self_attn.q_proj.weight is missing",
        "model.norm.weight has the shape [7]; the model has [128]",
        "model.layers.0.self_attn.q_proj.bias is not a tensor of this model",
    )


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (math.inf, torch.bfloat16), (-math.inf, torch.float16)]
)
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(models, tmp_path, value, dtype):
    tensors = hugging_face(models["mixtral"], values(models["mixtral"], dtype), dtype)
    name = next(name for name in reversed(tensors) if name.endswith("experts.1.w2.weight"))
    tensors[name][-1, -1] = value
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(UsageError, match=rf"^{name} in model\.safetensors has values that are not finite") as caught:
        import_here(models["mixtral"], tmp_path, tmp_path)
    assert caught.value.where == str(tmp_path)


def test_a_value_that_bf16_cannot_hold_is_not_exported(models, tmp_path):
    tensors = hugging_face(models["llama"], values(models["llama"]))
    tensors["model.norm.weight"][3] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    with pytest.raises(UsageError, match=r"^norm\.weight has values that are not finite in torch\.bfloat16"):
        export_here(models["llama"], tmp_path, tmp_path / "bf16", dtype="bf16")
    export_here(models["llama"], tmp_path, tmp_path / "fp32")


def test_a_long_list_of_reasons_is_cut_short(models, tmp_path):
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / FILE)
    assert_refused(models["llama"], tmp_path, "model.embed_tokens.weight is missing", "and 18 more")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_a_file_that_was_cut_off_is_refused(models, tmp_path, keep):
    save_file(hugging_face(models["llama"], values(models["llama"])), tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:keep])
    assert_refused(models["llama"], tmp_path, "not a complete safetensors file", "download it again")


def test_a_pickle_with_the_name_of_a_safetensors_file_is_not_read(models, tmp_path):
    torch.save(values(models["llama"]), tmp_path / FILE)
    assert_refused(models["llama"], tmp_path, "not a complete safetensors file")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    with (
        pytest.raises(UsageError, match=r"x is in a\.safetensors and in b\.safetensors"),
        open_files(tmp_path, ["a.safetensors", "b.safetensors"]),
    ):
        pass


@pytest.fixture
def saved(models, tmp_path):
    save_file(hugging_face(models["llama"], values(models["llama"])), tmp_path / FILE)
    import_here(models["llama"], tmp_path, tmp_path)
    return tmp_path


def test_a_checkpoint_of_another_model_than_its_record_says_is_refused(models, saved):
    wider = models["llama"].model_copy(update={"vocab_size": 600, "layers": 5})
    with pytest.raises(UsageError) as caught:
        export_here(wider, saved, saved / "out")
    assert "embed_tokens.weight has the shape [512, 128]; its model has [600, 128]" in str(caught.value)
    assert "layers.4.mlp.up_proj.weight is missing" in str(caught.value)
    assert not list((saved / "out").iterdir())


@pytest.mark.parametrize("damage", [b"", b"not a pickle"])
def test_metadata_that_cannot_be_read_is_said(models, saved, damage):
    (saved / "weights" / ".metadata").write_bytes(damage)
    with pytest.raises(UsageError, match="metadata cannot be read"):
        export_here(models["llama"], saved, saved / "out")


def test_weights_that_cannot_be_read_are_said(models, saved):
    largest = max((saved / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    with pytest.raises(UsageError, match="the checkpoint cannot be read: "):
        export_here(models["llama"], saved, saved / "out")


def test_a_folder_that_takes_no_files_is_said(models, saved):
    with pytest.raises(EnvironmentProblem, match=r"model\.safetensors cannot be written"):
        weights_export.write_file(Path(saved / "nowhere" / FILE), {"a": torch.ones(2)})
    job = ImportJob(source=str(saved), files=(FILE,), folder=str(saved / FILE), model=models["llama"])
    with pytest.raises(EnvironmentProblem, match="weights cannot be written"), warnings.catch_warnings(action="ignore"):
        import_weights(job, lambda done, total: None)
