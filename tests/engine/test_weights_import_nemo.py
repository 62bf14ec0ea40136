# SPDX-License-Identifier: Apache-2.0
"""Llama 3 from NeMo 2's files has the logits of transformers; what is not known is refused before anything is read."""

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from nemo_files import write_nemo
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.model.decoder import build_model
from llmb.engine.weights.weights_import import import_weights, parameter_shapes
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.conversion_request import ImportJob
from llmb.runs.huggingface.model_config import config_of
from llmb.setup.prepare.conversion import ImportRequest, import_checkpoint, read_source


def published(model):
    set_seed(5)
    config = AutoConfig.for_model(**config_of(model, "fp32"))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def import_here(model, source, folder):
    found, notes = read_source(source, model), []
    folder.mkdir(exist_ok=True)
    job = ImportJob(
        format=found.format,
        source=str(found.path),
        files=found.files,
        documents=found.documents,
        folder=str(folder),
        model=model,
        largest_file_bytes=100_000,
    )
    return import_weights(job, lambda *_: None, notes.append), notes


def loaded(model, folder):
    decoder = build_model(model)
    state = {MODEL + name: parameter.detach() for name, parameter in decoder.named_parameters()}
    with warnings.catch_warnings(action="ignore"):
        load(state, storage_reader=TensorReader(folder / "weights"), no_dist=True)
    return decoder


@pytest.fixture
def nemo(models, tmp_path):
    """A small Llama 3 in NeMo's files."""
    folder = tmp_path / "nemo"
    write_nemo(folder, models["llama"], published(models["llama"]).state_dict(), stacked=True)
    return folder


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-scaled"])
def test_logits_are_those_of_transformers(models, name, stacked, tmp_path):
    model, theirs = models[name], published(models[name])
    write_nemo(tmp_path / "nemo", model, theirs.state_dict(), stacked=stacked)
    imported, notes = import_here(model, tmp_path / "nemo", tmp_path / "new")
    assert imported.dtypes == ("fp32",)
    assert notes == [
        "tensors that the model does not have are skipped: "
        "module.decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"
    ]
    decoder = loaded(model, tmp_path / "new")
    for parameter, tensor in decoder.named_parameters():
        stored = parameter if parameter.startswith("lm_head") else f"model.{parameter}"
        assert torch.equal(tensor, theirs.state_dict()[stored]), parameter
    tokens = torch.randint(0, model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, decoder(tokens)
    assert float(expected.abs().max()) > 0.1
    assert float((expected - found).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_a_whole_import_keeps_bf16_and_the_tokenizer(tmp_path):
    model = find_model(Catalogue(), "finetune_llama3", "tiny")
    write_nemo(tmp_path / "nemo", model, published(model).bfloat16().state_dict(), stacked=True)
    request = ImportRequest(tmp_path / "nemo", tmp_path / "new", "finetune_llama3", model, 1)
    import_checkpoint(request, lambda *_: None, lambda _: None)
    record = read_checkpoint(tmp_path / "new").record
    assert record.imported_from
    assert (record.imported_from.format, record.weights_dtypes) == ("nemo", ("bf16",))
    context = {path.name for path in (tmp_path / "new" / "context").iterdir()}
    assert context == {"config.json", "tokenizer.json"}
    assert json.loads((tmp_path / "new" / "context" / "config.json").read_text())["dtype"] == "bfloat16"


def refused(model, folder):
    with pytest.raises(UsageError) as caught:
        import_here(model, folder, folder.parent / "new")
    assert "llm.export_ckpt" in (caught.value.do or "") or "see 'llmb list'" in (caught.value.do or "")
    assert not (folder.parent / "new" / "weights").exists()
    return str(caught.value)


def change(folder, **settings):
    path = folder / "context" / "model.yaml"
    content = yaml.safe_load(path.read_text())
    content["config"] |= settings
    path.write_text(yaml.safe_dump(content))


def test_other_families_are_refused_by_name(models, nemo):
    for name in ("nemotron4", "llama4", "mixtral", "qwen3"):
        said = refused(models[name], nemo)
        assert "NeMo 2 checkpoints are supported for Llama 3 and 3.1 only, not for " in said


def test_settings_of_another_model_are_refused(models, nemo):
    change(nemo, rotary_base=500_000, qk_layernorm=True, activation_func={"_target_": "torch.nn.functional.gelu"})
    said = refused(models["llama"], nemo)
    assert "rotary_base is 500000, not 10000.0" in said
    assert "qk_layernorm is True, not False" in said
    assert "gelu" in said
    assert "scale_factor is None, not 8.0" in refused(models["llama-scaled"], nemo)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("weights/metadata.json", '{"sharded_backend": "zarr"}', "was saved by 'zarr'; only 'torch_dist' is supported"),
        ("weights/metadata.json", None, "without 'weights/metadata.json'"),
        ("context/model.yaml", None, "without 'context/model.yaml'"),
        ("context/model.yaml", "config: [1", "the file cannot be read"),
        ("context/model.yaml", "config: 1", "no model settings"),
        ("weights/.metadata", "garbage", "the metadata cannot be read"),
    ],
)
def test_a_layout_that_is_not_known_is_refused(models, nemo, file, content, said):
    (nemo / file).unlink() if content is None else (nemo / file).write_text(content)
    assert said in refused(models["llama"], nemo)


def test_metadata_that_would_run_code_is_refused(models, nemo):
    (nemo / "weights" / ".metadata").write_bytes(pickle.dumps(Path.unlink))
    assert "which no checkpoint of NeMo contains" in refused(models["llama"], nemo)


def test_weights_of_another_shape_and_truncated_files_are_refused(models, nemo):
    wider = models["llama"].model_copy(update={"ffn_hidden_size": 512})
    change(nemo, ffn_hidden_size=512)
    said = refused(wider, nemo)
    assert (
        "module.decoder.layers.mlp.linear_fc1.weight has the shape [4, 512, 128]; the model has [4, 1024, 128]" in said
    )
    change(nemo, ffn_hidden_size=256)
    largest = max((nemo / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert f"{largest.name} has {largest.stat().st_size} bytes, and module." in refused(models["llama"], nemo)
    largest.unlink()
    assert f"{largest.name} is missing" in refused(models["llama"], nemo)


def test_all_parameters_of_the_engine_have_a_place(models):
    names = parameter_shapes(models["llama"])
    assert len(names) == 3 + 9 * models["llama"].layers
